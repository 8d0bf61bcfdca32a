"""Output of the commands: JSON documents for programs, tables and texts for people.

Nothing stored in a job can steer the terminal. Lease tokens stay inside: whoever holds one can settle the job.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

import taskharbor
from taskharbor.cli.options import Settings
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import QueueSettings, QueueStats
from taskharbor.errors import CodecError
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Micros, to_datetime

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 200
"""Columns where nobody looks at a terminal: enough not to cut anything that a script may want."""

GAP = 2
NARROWEST = 6

STATE_STYLES = {
    JobState.SCHEDULED: "blue",
    JobState.READY: "cyan",
    JobState.BLOCKED: "magenta",
    JobState.INFLIGHT: "yellow",
    JobState.DONE: "green",
    JobState.DEAD: "red",
    JobState.CANCELLED: "bright_black",
}

SHORT_STATES = {
    JobState.SCHEDULED: "sched",
    JobState.READY: "ready",
    JobState.BLOCKED: "block",
    JobState.INFLIGHT: "run",
    JobState.DONE: "done",
    JobState.DEAD: "dead",
    JobState.CANCELLED: "canc",
}
"""For narrow terminals."""


def emit(document: Any) -> None:
    """One JSON document on one line."""
    click.echo(msgspec.json.encode(document).decode())


def answer(settings: Settings, document: Any, text: str) -> None:
    """The document with --json, the text otherwise."""
    if settings.json:
        emit(document)
    else:
        click.echo(text)


def banner(log_format: str, parts: Iterable[str], advice: str = "") -> None:
    """Two lines for somebody who starts a server on a terminal."""
    if sys.stderr.isatty() and log_format != "json":
        click.secho(" · ".join([f"TaskHarbor {taskharbor.__version__}", *parts]), fg="cyan", err=True)
        click.secho(f"pid {os.getpid()}; {advice}Ctrl-C stops gracefully", dim=True, err=True)


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=wide, highlight=False, markup=False, emoji=False)


def plain(text: str) -> str:
    """Stored text as it may be shown: control characters (escape sequences above all) made visible."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else f"\\x{ord(character):02x}"
        for character in text
    )


def cell(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text).replace("\n", " "), style=style)


def state_cell(state: JobState) -> Text:
    return cell(str(state), STATE_STYLES[state])


class Column(NamedTuple):
    title: str
    draw: Callable[[Any], Text | str]
    """The cell of an item."""
    right: bool = False
    shrinks: int = 0
    """Where a row is too wide, the columns with the highest number give way first; those with 0 never do."""
    footer: str = ""
    is_shown: bool = True


def table(
    screen: Console, columns: Iterable[Column], items: Iterable[Any], *, title: str | None = None
) -> Table:
    """Columns with no lines but one under the header: reads well, copies well, fits narrow terminals.

    rich would narrow all columns alike, ids too; so the widths are chosen here.
    """
    from rich import box
    from rich.table import Table

    columns = [column for column in columns if column.is_shown]
    rows = [[as_cell(column.draw(item)) for column in columns] for item in items]
    drawn = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        footer_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_footer=any(column.footer for column in columns),
    )
    for column, width in zip(columns, _widths(screen.width, columns, rows), strict=True):
        drawn.add_column(
            column.title,
            column.footer,
            justify="right" if column.right else "left",
            width=width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def as_cell(drawn: Text | str) -> Text:
    return cell(drawn) if isinstance(drawn, str) else drawn


def _widths(available: int, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> list[int]:
    widths = [
        max([len(column.title), len(column.footer), *(row[index].cell_len for row in rows)])
        for index, column in enumerate(columns)
    ]
    excess = sum(widths) + GAP * (len(columns) - 1) + 1 - available
    for index in sorted(range(len(columns)), key=lambda index: -columns[index].shrinks):
        if excess > 0 and columns[index].shrinks:
            given = min(excess, max(0, widths[index] - NARROWEST))
            widths[index] -= given
            excess -= given
    return widths


def is_narrow(screen: Console) -> bool:
    return screen.width < 90


# -- documents: jobs, attempts and queues as JSON -------------------------------------------------------------

_CODECS = CodecRegistry()


def fields_of(record: msgspec.Struct, names: str) -> dict[str, Any]:
    """Fields of a record, named with spaces between them; instants as text."""
    fields = record.__struct_fields__
    return {
        name: iso_text(getattr(record, f"{name}_us")) if f"{name}_us" in fields else getattr(record, name)
        for name in names.split()
    }


def job_document(job: JobRecord, *, payload: bool) -> dict[str, Any]:
    document = {
        **fields_of(job, "id type queue state priority created_at run_at finished_at"),
        **fields_of(job, "attempts stalls max_attempts max_stalls"),
        "timeout": job.timeout_us / SECOND if job.timeout_us else None,
        "backoff": [job.backoff_min_us / SECOND, job.backoff_max_us / SECOND],
        **fields_of(job, "key idempotency_key headers codec"),
        "payload_bytes": len(job.payload),
        "fence": job.fence,
        "lease": None if job.lease is None else fields_of(job, "worker reserved_at expires_at"),
        **fields_of(job, "cancel_requested merged_into last_error failed_at"),
        "progress": None if job.progress is None else msgspec.json.decode(job.progress),
    }
    if payload:
        document["payload"] = decoded(job.codec, job.payload)
        document["result"] = None if job.result is None else decoded(job.codec, job.result)
    return document


def decoded(codec: str, data: bytes) -> Any:
    """The value of the bytes, or the bytes themselves in base64 where this process cannot read or JSON cannot hold it."""
    try:
        value = _CODECS.get(codec).decode(data)
        msgspec.json.encode(value)
    except (CodecError, TypeError, ValueError):
        return {"base64": base64.b64encode(data).decode()}
    return value


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    names = "fence outcome state worker run_at reserved_at lease_expires_at ended_at error_type error_message"
    return fields_of(attempt, names)


def settings_document(settings: QueueSettings) -> dict[str, Any]:
    kept = {name: getattr(settings, f"{name}_us") for name in ("keep_done", "keep_dead", "keep_attempts")}
    return {
        **fields_of(settings, "paused max_inflight failure_queue"),
        **{name: None if age is None else age / SECOND for name, age in kept.items()},
    }


def stats_document(stats: QueueStats, now: Micros) -> dict[str, Any]:
    return {
        "queue": stats.queue,
        "counts": {str(state): count for state, count in stats.counts.items()},
        **fields_of(stats, "done_total dead_total cancelled_total"),
        "lag": None if stats.head_run_at_us is None else max(0, now - stats.head_run_at_us) / SECOND,
        **settings_document(stats.settings),
    }


def rounded(value: Any) -> Any:
    """Seconds in a document to the millisecond, which is enough for whoever reads them."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


# -- texts ----------------------------------------------------------------------------------------------------


def duration_text(duration: Micros) -> str:
    """Two figures that matter: 12 ms, 1.4 s, 3 m 20 s, 2 h 5 m, 4 d."""
    sign, us = ("-", -duration) if duration < 0 else ("", duration)
    seconds = us / SECOND
    if us < 1000:
        return f"{sign}{us} µs" if us else "0 s"
    if seconds < 0.9995:
        return f"{sign}{us / 1000:.0f} ms"
    if seconds < 59.95:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, small_size in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // small_size
            return f"{sign}{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{sign}{whole} s"


def relative_text(when: Micros, now: Micros) -> str:
    """`3 m ago`, `in 20 s`, `now`."""
    apart = when - now
    if abs(apart) < SECOND // 2:
        return "now"
    return f"in {coarse_text(apart)}" if apart > 0 else f"{coarse_text(-apart)} ago"


def coarse_text(duration: Micros) -> str:
    """One unit, for tables: 20 s, 3 m, 2 h."""
    seconds = duration / SECOND
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def local_text(when: Micros) -> str:
    return to_datetime(when).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso_text(when: Micros | None) -> str | None:
    return None if when is None else to_datetime(when).isoformat().replace("+00:00", "Z")


def kept_text(kept: Micros | None) -> str:
    return "forever" if kept is None else duration_text(kept) if kept else "not at all"


def count_text(count: int) -> str:
    """At most five characters, for tables."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            scaled = count / (1000 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return str(count)
