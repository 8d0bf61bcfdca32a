"""`taskharbor inspect`: everything about one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskharbor.cli.documents import attempt_document, decoded, job_document
from taskharbor.cli.output import cell, console, emit, plain, state_cell
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.cli.timeline import timeline
from taskharbor.cli.values import duration_text, local_text, relative_text
from taskharbor.jobs import JobRecord, JobState, Micros

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_CHARACTERS = 2000
SHOWN_TRACE_LINES = 25


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--no-payload", is_flag=True, help="Leave the payload and the result out.")
@click.option("--full", is_flag=True, help="Cut nothing: whole payload, whole traceback.")
@shared_options
@click.pass_obj
def inspect(settings: Settings, job_id: str, no_payload: bool, full: bool) -> None:
    """Show everything about a job, with its attempt timeline."""
    with open_client(settings) as client:
        job = client.get(job_id)
        attempts = client.job_attempts(job_id)
        now = client.now()
    if settings.json:
        document = job_document(job, payload=not no_payload)
        emit({**document, "timeline": [attempt_document(one) for one in attempts]})
        return
    screen = console()
    screen.print(_facts(job, now))
    if not no_payload:
        _show_value(screen, "payload", job.codec, job.payload, full)
        if job.result is not None:
            _show_value(screen, "result", job.codec, job.result, full)
    if job.last_error:
        _show_error(screen, job, now, full)
    screen.print()
    screen.print(timeline(job, attempts, now, screen))


def _facts(job: JobRecord, now: Micros) -> Table:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bright_black", no_wrap=True)
    facts.add_column(overflow="fold")
    state = state_cell(job.state)
    if job.cancel_requested:
        state.append("  (asked to stop)", "yellow")
    facts.add_row("job", cell(job.id, "bold"))
    facts.add_row("type", cell(job.type))
    facts.add_row("queue", cell(job.queue))
    facts.add_row("state", state)
    if job.merged_into:
        facts.add_row("merged into", cell(f"{job.merged_into}  (same key: that job does the work)"))
    facts.add_row("accepted", _instant(job.created_at_us, now))
    if job.finished_at_us is None:
        facts.add_row("due", _instant(job.run_at_us, now))
    else:
        facts.add_row("ended", _instant(job.finished_at_us, now))
    facts.add_row("tries", cell(_tries(job)))
    if job.lease is not None:
        facts.add_row("lease", cell(_lease(job, now)))
    if job.progress is not None:
        facts.add_row("progress", cell(str(msgspec.json.decode(job.progress))))
    optional = (
        ("priority", str(job.priority) if job.priority else ""),
        ("timeout", duration_text(job.timeout_us) if job.timeout_us else ""),
        ("key", job.key or ""),
        ("idempotency", job.idempotency_key or ""),
        ("headers", ", ".join(f"{name}={value}" for name, value in job.headers.items())),
    )
    for label, text in optional:
        if text:
            facts.add_row(label, cell(text))
    return facts


def _instant(when: Micros, now: Micros) -> Any:
    text = cell(local_text(when))
    text.append(f"  {relative_text(when, now)}", "bright_black")
    return text


def _tries(job: JobRecord) -> str:
    spent = f"{job.attempts + job.stalls} of {job.max_attempts} spent"
    if not job.attempts and not job.stalls:
        return f"none spent, {job.max_attempts} allowed"
    parts = [f"{job.attempts} failed"] if job.attempts else []
    if job.stalls:
        parts.append(f"{job.stalls} lost with a worker")
    return f"{spent}: {', '.join(parts)}"


def _lease(job: JobRecord, now: Micros) -> str:
    expires = job.expires_at_us or now
    left = expires - now
    until = f"{duration_text(left)} left" if left > 0 else f"expired {duration_text(-left)} ago"
    return f"held by {job.worker}, {until}, fence {job.fence}"


def _show_value(screen: Console, label: str, codec: str, data: bytes, full: bool) -> None:
    value = decoded(codec, data)
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if len(text) <= 60:
        text = msgspec.json.encode(value).decode()
    screen.print()
    screen.print(cell(f"{label} ({codec}, {len(data)} bytes)", "bold"))
    if not full and len(text) > SHOWN_CHARACTERS:
        cut = len(text) - SHOWN_CHARACTERS
        text = f"{text[:SHOWN_CHARACTERS]}\n... {cut} more characters: --full shows them"
    screen.print(plain(text), style="cyan", soft_wrap=True)


def _show_error(screen: Console, job: JobRecord, now: Micros, full: bool) -> None:
    assert job.last_error is not None
    first, *trace = plain(job.last_error).splitlines()
    when = f"  {relative_text(job.failed_at_us, now)}" if job.failed_at_us is not None else ""
    over = "" if job.state is not JobState.DONE else "  (an earlier try; the job is done)"
    screen.print()
    screen.print(cell(f"last error{when}{over}", "bold"))
    screen.print(first, style="red", soft_wrap=True)
    if trace and not full and len(trace) > SHOWN_TRACE_LINES:
        cut = len(trace) - SHOWN_TRACE_LINES
        trace = [f"  ... {cut} lines left out: --full shows them", *trace[-SHOWN_TRACE_LINES:]]
    for line in trace:
        screen.print(line, style="bright_black", soft_wrap=True)
