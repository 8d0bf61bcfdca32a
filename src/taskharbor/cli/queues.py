"""`taskharbor queues` and `taskharbor stats`: the settings of queues, and every queue at a glance, once or live."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from taskharbor.broker.models import StatsView, queue_stats_view, queue_view, stats_view
from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.errors import BadInput
from taskharbor.cli.jobs import LARGEST_PAGE, Listing
from taskharbor.cli.options import Invocation, flag, option
from taskharbor.cli.output import WIDE, Column, cell, count_text
from taskharbor.client import Client
from taskharbor.drivers.records import JobFilter, QueueSettings, QueueStats
from taskharbor.drivers.urls import shown_url
from taskharbor.jobs import SECOND, JobState, Micros

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

NO_QUEUES = "no queues yet: the first enqueue makes one"


@click.group(cls=opt.Group, invoke_without_command=True)
def queues(settings: Invocation) -> None:
    """Queues: list, pause, resume, limit, retention."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        context.invoke(list_queues)


@queues.command("list")
def list_queues(settings: Invocation) -> None:
    """List queues with their settings."""
    with opt.open_client(settings) as client:
        found, now = client.stats(), client.now()
    if settings.json:
        for one in found:
            out.emit(queue_stats_view(one, now))
    elif found:
        _show(found)
    else:
        click.echo(NO_QUEUES, err=True)


_names = click.argument("names", nargs=-1, required=True, metavar="QUEUE...")
_create = flag("--create", "Make a queue that was never seen.")


@queues.command()
@_names
@_create
def pause(settings: Invocation, names: tuple[str, ...], create: bool) -> None:
    """Pause queues: no more jobs start. Running jobs finish; enqueueing goes on."""
    _change_all(settings, names, create, paused=True)


@queues.command()
@_names
@_create
def resume(settings: Invocation, names: tuple[str, ...], create: bool) -> None:
    """Undo a pause."""
    _change_all(settings, names, create, paused=False)


_age = functools.partial(option, kind=opt.age, metavar="AGE|forever")


@queues.command("set")
@_names
@option("--max-inflight", opt.count_or_none, "Never more jobs at once, over all workers.", metavar="N|none")
@option("--failure-queue", "QUEUE|none", "Enqueue a job there for every one that dies here.")
@_age("--keep-done", help="Keep done and cancelled jobs so long: 7d, 12h, forever.")
@_age("--keep-dead", help="Keep dead jobs so long.")
@_age("--keep-attempts", help="Keep the attempt log so long.")
@_create
def set_(settings: Invocation, /, names: tuple[str, ...], create: bool, **options: Any) -> None:
    """Change settings: the limit, the failure queue, retention. What is not named stays."""
    nothing = (0, "none", opt.FOREVER)
    given = {name: value for name, value in options.items() if value is not None}
    changes = {name: None if value in nothing else value for name, value in given.items()}
    if not changes:
        wanted = "--max-inflight, --failure-queue or --keep-..., like --keep-done 7d"
        raise BadInput(f"nothing to change: give {wanted}")
    _change_all(settings, names, create, **changes)


def _change_all(settings: Invocation, names: tuple[str, ...], create: bool, **changes: Any) -> None:
    with opt.open_client(settings, creating=create) as client:
        if not create and (unknown := set(names) - {one.queue for one in client.stats()}):
            hint = "`taskharbor queues` lists all; --create makes a new one. Nothing was changed"
            said = f"queue {', '.join(map(repr, sorted(unknown)))} is not known: no job, setting or declaration has named it"
            raise BadInput(said, hint=hint)
        for name in names:
            client.configure(name, create=True, **changes)
            changed = client.settings(name)
            out.answer(settings, queue_view(name, changed), f"{name}: {_sentence(changed)}")


def _sentence(settings: QueueSettings) -> str:
    parts = [
        "paused" if settings.paused else "running",
        f"at most {settings.max_inflight} at once" if settings.max_inflight else "no limit",
    ]
    if settings.failure_queue:
        parts.append(f"failures to {settings.failure_queue}")
    kept = f"done {out.kept_text(settings.keep_done_us)}, dead {out.kept_text(settings.keep_dead_us)}"
    return f"{', '.join(parts)}; keeps {kept}, attempts {out.kept_text(settings.keep_attempts_us)}"


def _show(stats: list[QueueStats]) -> None:
    columns = (
        Column("queue", shrinks=True),
        Column("state", lambda one: cell("paused", "yellow") if one.settings.paused else cell("on", "green")),
        Column("scheduled", functools.partial(_count, JobState.SCHEDULED), right=True, least=WIDE),
        Column("ready", functools.partial(_count, JobState.READY), right=True),
        Column("inflight", functools.partial(_count, JobState.INFLIGHT), right=True),
        Column("limit", lambda one: str(one.settings.max_inflight or "-"), right=True),
        Column("failures to", lambda one: one.settings.failure_queue or "-", shrinks=True, least=WIDE),
        Column("keeps done / dead / log", lambda one: _kept(one.settings)),
    )
    out.print_table(columns, stats)


def _kept(settings: QueueSettings) -> str:
    kept = (settings.keep_done_us, settings.keep_dead_us, settings.keep_attempts_us)
    return " / ".join(map(out.kept_text, kept))


# -- stats -------------------------------------------------------------------------------------------------


Look: TypeAlias = tuple[list[QueueStats], Counter[str] | None, Micros]


class WatchedStats(StatsView, kw_only=True):
    """Figures of queues. `overdue`: the jobs that run longer than their timeouts, by queue; null where too many run to look."""

    overdue: dict[str, int] | None


@opt.command()
@opt.queue_option
@flag("--watch -w", "Stay, and show changes until Ctrl-C.")
@option("--interval", click.FloatRange(min=0.1), "Seconds between looks.", 1.0)
@option("--times", opt.COUNT, "With --watch: end after so many looks.")
def stats(settings: Invocation, queue: str | None, watch: bool, interval: float, times: int | None) -> None:
    """Show queues: jobs per state, lag, totals."""
    with opt.open_client(settings) as client:
        looks = _looks(client, queue, interval, times if watch else 1)
        try:
            if settings.json:
                for taken, late, now in looks:
                    out.emit(WatchedStats(**msgspec.structs.asdict(stats_view(taken, now)), overdue=late))
            elif watch:
                _watch(settings, looks)
            else:
                screen = out.console()
                screen.print(view(*next(looks), screen))
        except KeyboardInterrupt:
            # Ctrl-C ends a watch. That is no error.
            if not watch:
                raise


def _looks(client: Client, queue: str | None, interval: float, times: int | None) -> Iterator[Look]:
    for number in itertools.count(1):
        taken, now = client.stats(queue), client.now()
        running = sum(one.counts[JobState.INFLIGHT] for one in taken)
        late: Counter[str] | None = None
        # A page at most: nothing but a listing knows, and a look must stay cheap in a busy store.
        if running <= LARGEST_PAGE:
            jobs = (
                Listing(client, JobFilter(queue=queue, states=frozenset({JobState.INFLIGHT})), LARGEST_PAGE)
                if running
                else ()
            )
            late = Counter(job.queue for job in jobs if job.is_overdue(now))
        yield taken, late, now
        if number == times:
            return
        time.sleep(interval)


def _watch(settings: Invocation, looks: Iterator[Look]) -> None:
    from rich.console import Group
    from rich.live import Live

    screen = out.console()
    before: tuple[Micros, int] | None = None
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        for taken, late, now in looks:
            ended, pace = sum(map(_ended_ever, taken)), ""
            if before is not None and now > before[0]:
                pace = f"{(ended - before[1]) * SECOND / (now - before[0]):.0f} jobs/s  "
            before = now, ended
            line = f"{shown_url(settings.url)}  {time.strftime('%H:%M:%S')}  {pace}Ctrl-C ends this"
            live.update(Group(cell(line, "bright_black"), view(taken, late, now, screen)), refresh=True)


def view(
    taken: list[QueueStats], late: dict[str, int] | None, now: Micros, screen: Console
) -> RenderableType:
    """Return the table, with a sum under it if there are several queues."""
    if not taken:
        return cell(NO_QUEUES)

    def footer(text: str) -> str:
        return text if len(taken) > 1 else ""

    columns = [Column("queue", shrinks=True, footer=footer("all"))]
    for state in JobState:
        total = sum(one.counts.get(state, 0) for one in taken)
        title = out.STATES[state][1] if screen.width < WIDE else str(state)
        # A narrow screen has no room for columns of zeros.
        least = 0 if total or state is JobState.READY else WIDE
        draw = functools.partial(_count, state)
        columns.append(Column(title, draw, True, footer=footer(count_text(total)), least=least))
    if late:
        overdue = footer(count_text(sum(late.values())))
        columns.append(
            Column("overdue", lambda one: _figure(late.get(one.queue, 0), "red"), True, footer=overdue)
        )
    ever = footer(count_text(sum(map(_ended_ever, taken))))
    columns += [
        Column("lag", lambda one: _lag(one, now), right=True),
        Column("ended ever", lambda one: count_text(_ended_ever(one)), True, footer=ever, least=WIDE),
    ]
    return out.table(screen, columns, taken)


def _ended_ever(one: QueueStats) -> int:
    return one.done_total + one.dead_total + one.cancelled_total


def _count(state: JobState, one: QueueStats) -> Text:
    return _figure(one.counts.get(state, 0), out.STATES[state][0])


def _figure(count: int, style: str) -> Text:
    return cell(count_text(count), style if count else "bright_black")


def _lag(one: QueueStats, now: Micros) -> Text:
    """Return the time for which the next job has been due. A paused queue lags on purpose."""
    if one.settings.paused:
        return cell("paused", "yellow")
    if one.head_run_at_us is None or one.head_run_at_us >= now:
        return cell("-", "bright_black")
    return cell(out.coarse_text(now - one.head_run_at_us))
