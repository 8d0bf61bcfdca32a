"""`taskharbor list` and `taskharbor inspect`: jobs, newest accepted first, and everything about one of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from taskharbor.broker.models import AttemptView, ChangedJob, JobView, batch_item, job_view, model_of
from taskharbor.cli import output as out
from taskharbor.cli.errors import FAILED, BadInput, say_error
from taskharbor.cli.options import COUNT, Invocation, command, flag, open_client, option, queue_option
from taskharbor.cli.output import WIDE, Column, cell
from taskharbor.client import Client
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.records import JobFilter
from taskharbor.errors import CodecError, JobError, JobNotFound
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome, to_datetime
from taskharbor.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

LARGEST_PAGE = 1000
SHOWN_CHARACTERS = 2000
SHOWN_TRACE_LINES = 25
OUTCOME_STYLES = {
    Outcome.DONE: "green",
    Outcome.RETRIED: "yellow",
    Outcome.DEAD: "red",
    Outcome.EXPIRED: "magenta",
    Outcome.RELEASED: "blue",
    Outcome.REQUEUED: "cyan",
}
SHOWN = 50
_STATES = click.Choice([str(state) for state in JobState])

types_option = option("--type -t types", "TYPE", "Only this type; repeat for more.", multiple=True)
limit_option = option("--limit -n", COUNT, "At most so many.", 50)
cursor_option = option("--cursor", "CURSOR", "Go on where a listing stopped.")


@command("list")
@queue_option
@option("--state -s", _STATES, "Only this state; repeat for more.", multiple=True)
@types_option
@option("--key", "KEY", "Only jobs with this key.")
@option("--worker", "NAME", "Only jobs that this worker holds.")
@limit_option
@flag("--all everything", "All of them, page after page.")
@cursor_option
@flag("--payload", "With --json: payloads and results too.")
def list_jobs(
    settings: Invocation, /, limit: int, everything: bool, cursor: str | None, payload: bool, **selected: Any
) -> None:
    """List jobs, newest accepted first."""
    if payload and not settings.json:
        hint = "`taskharbor inspect ID` shows one"
        raise BadInput("--payload needs --json: a table has no room for it", hint=hint)
    states = tuple(map(JobState, selected.pop("state")))
    with open_client(settings) as client:
        listing = Listing(client, select(states=states, **selected), inf if everything else limit, cursor)
        listing.show(settings, "no jobs match", payload=payload)


def select(**selected: Any) -> JobFilter:
    """The filter that options describe. One that may be repeated is a tuple; an empty one does not restrict."""
    sets = {name: frozenset(value) or None for name, value in selected.items() if isinstance(value, tuple)}
    return JobFilter(**selected | sets)


class Listing:
    """Jobs page by page. `cursor` is the place where it stopped, None at the end."""

    def __init__(
        self, client: Client, selection: JobFilter, limit: float = inf, cursor: str | None = None
    ) -> None:
        self._client = client
        self._selection = selection
        self._left = limit
        self.cursor = cursor

    def __iter__(self) -> Iterator[JobRecord]:
        while self._left > 0:
            size = int(min(self._left, LARGEST_PAGE))
            page = self._client.list_jobs(self._selection, limit=size, cursor=self.cursor)
            self.cursor = page.cursor
            self._left -= len(page.jobs)
            yield from page.jobs
            if page.cursor is None:
                return

    def show(self, settings: Invocation, nothing: str, *, payload: bool = False) -> None:
        """Print a document for each job, or a table. If there are more jobs, the cursor follows."""
        if settings.json:
            for job in self:
                out.emit(job_view(job, payload=payload))
        elif jobs := list(self):
            out.print_table(_columns(self._client.now(), self._selection), jobs)
        else:
            click.echo(nothing, err=True)
        if self.cursor is not None:
            if settings.json:
                out.emit({"cursor": self.cursor})
            else:
                out.say(f"more: --cursor {shlex.quote(self.cursor)}, or --all", err=True)


def _columns(now: Micros, selection: JobFilter) -> list[Column]:
    """Return the columns, without those that say the same of all jobs. The id is always whole, for copying."""

    def with_remark(job: JobRecord) -> Text:
        below = cell(remark(job), "bright_black")
        below.truncate(34, overflow="ellipsis")
        return cell(job.id).append("\n  ").append(below) if below else cell(job.id)

    columns = [
        Column("id", with_remark, most=119),
        Column("id", least=120),
        Column("type", shrinks=True),
        Column("queue", shrinks=True, least=80),
        Column("state", lambda job: cell(*out.STATES[job.state][::-1]), most=WIDE - 1),
        Column("state", lambda job: out.state_cell(job.state), least=WIDE),
        Column("failed", lambda job: f"{job.spent}/{job.max_attempts}", True, least=WIDE),
        Column("when", lambda job: moment(job, now), least=80),
        Column("key / reason", lambda job: cell(remark(job), "bright_black"), shrinks=True, least=120),
    ]
    is_same = {"queue": selection.queue is not None, "state": len(selection.states or ()) == 1}
    return [column for column in columns if not is_same.get(column.title)]


def moment(job: JobRecord, now: Micros) -> str:
    """Return the most important instant of a job in its state: due, leased or ended."""
    if job.state is JobState.INFLIGHT:
        return out.relative_text(job.reserved_at_us or now, now)
    return out.relative_text(job.run_at_us if job.finished_at_us is None else job.finished_at_us, now)


def remark(job: JobRecord) -> str:
    """Return a remark on a job: a merge, its last error, or its key."""
    if job.merged_into:
        return f"merged into {job.merged_into}"
    if job.last_error and job.state is not JobState.DONE:
        return job.last_error.partition("\n")[0]
    return job.key or ""


def tell(
    results: Iterable[tuple[str, JobState | JobError]], settings: Invocation, words: dict[JobState, str]
) -> int:
    """Print one line per job, errors on stderr. Returns the exit code."""
    code = 0
    for job_id, result in results:
        if not isinstance(result, JobError):
            out.answer(settings, ChangedJob(job_id, result), f"{job_id} {words.get(result, result)}")
            continue
        code = FAILED
        if settings.json:
            out.emit(batch_item(job_id, result), err=True)
        else:
            say_error(str(result))
    return code


# -- one job -----------------------------------------------------------------------------------------------


class InspectedJob(JobView, kw_only=True):
    """A job and its attempts."""

    timeline: list[AttemptView]


@command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@flag("--no-payload", "Leave the payload and the result out.")
@flag("--full", "Cut nothing: whole payload, whole traceback.")
def inspect(settings: Invocation, ids: tuple[str, ...], no_payload: bool, full: bool) -> int:
    """Show everything about jobs, with the timeline of their attempts."""
    with open_client(settings) as client:
        jobs = client.get_many(ids)
        found = [(job, client.job_attempts(job.id)) for job in jobs if job is not None]
        now = client.now()
    for job, attempts in found:
        if settings.json:
            view = msgspec.structs.asdict(job_view(job, payload=not no_payload))
            out.emit(InspectedJob(**view, timeline=[model_of(AttemptView, one) for one in attempts]))
            continue
        screen = out.console()
        screen.print(_facts(job, now))
        if not no_payload:
            _show_value(screen, "payload", job.codec, job.payload, full)
            if job.result is not None:
                _show_value(screen, "result", job.codec, job.result, full)
        if job.last_error:
            _show_error(screen, job, now, full)
        screen.print()
        screen.print(timeline(job, attempts, now, screen), "")
    unknown = [(one, JobNotFound(one)) for one, job in zip(ids, jobs, strict=True) if job is None]
    return tell(unknown, settings, {})


def _facts(job: JobRecord, now: Micros) -> Table:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bright_black", no_wrap=True)
    facts.add_column(overflow="fold")
    state = out.state_cell(job.state)
    if job.cancel_requested:
        state.append("  (asked to stop)", "yellow")
    merged = f"{job.merged_into}  (same key: that job does the work)" if job.merged_into else None
    ended = job.finished_at_us
    told = (
        ("job", cell(job.id, "bold")),
        ("type", job.type),
        ("queue", job.queue),
        ("state", state),
        ("merged into", merged),
        ("accepted", _instant(job.created_at_us, now)),
        ("due", _instant(job.run_at_us, now) if ended is None else None),
        ("ended", None if ended is None else _instant(ended, now)),
        ("tries", _tries(job)),
        ("lease", None if job.lease is None else _lease(job, now)),
        ("progress", None if job.progress is None else str(msgspec.json.decode(job.progress))),
        ("priority", str(job.priority) if job.priority else None),
        ("timeout", out.duration_text(job.timeout_us) if job.timeout_us else None),
        ("overdue", cell("yes: the worker's log has the stack", "red") if job.is_overdue(now) else None),
        ("key", job.key or None),
        ("idempotency", job.idempotency_key or None),
        ("headers", ", ".join(f"{name}={value}" for name, value in job.headers.items()) or None),
    )
    for label, text in told:
        if text is not None:
            facts.add_row(label, out.as_cell(text))
    return facts


def _instant(when: Micros, now: Micros) -> Any:
    text = cell(to_datetime(when).astimezone().strftime("%Y-%m-%d %H:%M:%S"))
    text.append(f"  {out.relative_text(when, now)}", "bright_black")
    return text


def _tries(job: JobRecord) -> str:
    spent = [(job.attempts, "failed"), (job.stalls, "lost with a worker")]
    parts = ", ".join(f"{count} {how}" for count, how in spent if count)
    if not parts:
        return f"none spent, {job.max_attempts} allowed"
    return f"{job.spent} of {job.max_attempts} spent: {parts}"


def _lease(job: JobRecord, now: Micros) -> str:
    expires = job.expires_at_us or now
    left = expires - now
    until = f"{out.duration_text(left)} left" if left > 0 else f"expired {out.duration_text(-left)} ago"
    return f"held by {job.worker}, {until}, fence {job.fence}"


_codecs = CodecRegistry()


def _show_value(screen: Console, label: str, codec: str, data: bytes, full: bool) -> None:
    try:
        encoded = msgspec.json.encode(_codecs.get(codec).decode(data))
    except (CodecError, TypeError, ValueError):
        # This process cannot read the bytes, or JSON cannot hold their value: msgspec writes bytes in base64.
        encoded = msgspec.json.encode({"base64": data})
    text = msgspec.json.format(encoded, indent=2).decode()
    if len(text) <= 60:
        text = encoded.decode()
    if not full and len(text) > SHOWN_CHARACTERS:
        cut = len(text) - SHOWN_CHARACTERS
        text = f"{text[:SHOWN_CHARACTERS]}\n... {cut} more characters: --full shows them"
    _show_section(screen, f"{label} ({codec}, {len(data)} bytes)", printable(text, "\n"), "cyan")


def _show_error(screen: Console, job: JobRecord, now: Micros, full: bool) -> None:
    assert job.last_error is not None
    first, *trace = printable(job.last_error, "\n\t").split("\n")
    when = f"  {out.relative_text(job.failed_at_us, now)}" if job.failed_at_us is not None else ""
    over = "" if job.state is not JobState.DONE else "  (an earlier try; the job is done)"
    _show_section(screen, f"last error{when}{over}", first, "red")
    if not full and len(trace) > SHOWN_TRACE_LINES:
        cut = len(trace) - SHOWN_TRACE_LINES
        trace = [f"... {cut} lines left out: --full shows them", *trace[-SHOWN_TRACE_LINES:]]
    for line in trace:
        screen.print(f"  {line}", style="bright_black", soft_wrap=True)


def _show_section(screen: Console, heading: str, text: str, style: str) -> None:
    screen.print()
    screen.print(cell(heading, "bold"))
    screen.print(text, style=style, soft_wrap=True)


class _Row(NamedTuple):
    """One execution in the timeline."""

    reserved: Micros | None
    end: Micros
    outcome: str
    style: str
    worker: str | None
    error: str = ""

    @property
    def start(self) -> Micros:
        return self.end if self.reserved is None else self.reserved


def timeline(job: JobRecord, attempts: list[Attempt], now: Micros, screen: Console) -> RenderableType:
    """Draw the attempts of a job. Instants count from its acceptance; the bar spans from there to its end, or to now."""
    rows = [
        _Row(
            one.reserved_at_us,
            one.ended_at_us,
            str(one.outcome),
            OUTCOME_STYLES.get(one.outcome, "bright_black"),
            one.worker,
            ": ".join(part for part in (one.error_type, one.error_message) if part),
        )
        for one in attempts
    ]
    if job.state is JobState.INFLIGHT and (since := job.reserved_at_us) is not None:
        rows.append(_Row(since, max(now, since), "running", "yellow", job.worker))
    if not rows:
        return cell("timeline: not tried yet", "bright_black")
    accepted, ended = job.created_at_us, now if job.finished_at_us is None else job.finished_at_us
    length = max(1, max(ended, *(row.end for row in rows)) - accepted)
    width = 12 if screen.width < WIDE else 24
    on, off = ("█", "·") if (screen.encoding or "").lower().startswith("utf") else ("#", ".")

    def bar(row: _Row) -> Text:
        first, last = ((when - accepted) * width // length for when in (row.start, row.end))
        first = min(width - 1, max(0, first))
        last = min(width, max(first, last) + 1)
        text = cell(off * first, "bright_black")
        text.append(on * (last - first), row.style)
        return text.append(off * (width - last), "bright_black")

    def took(row: _Row) -> str:
        return "-" if row.reserved is None else out.duration_text(row.end - row.reserved)

    columns = (
        Column("at", lambda row: f"+{out.duration_text(max(0, row.start - accepted))}", right=True),
        Column("took", took, right=True),
        Column(out.duration_text(length).rjust(width), bar),
        Column("outcome", lambda row: cell(row.outcome, row.style)),
        Column("worker", lambda row: cell(row.worker or "-", "bright_black"), shrinks=True, least=80),
        Column("error", lambda row: cell(row.error, "bright_black"), shrinks=True),
    )
    some = "" if len(rows) <= SHOWN else f" (the last {SHOWN} of {len(rows)})"
    return out.table(screen, columns, rows[-SHOWN:], title=f"timeline{some}")
