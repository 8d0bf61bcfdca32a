"""A job's attempts as a table with a bar each: when it waited, when it ran, who ran it and how that ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskharbor.cli.output import Column, cell, is_narrow, table
from taskharbor.cli.values import duration_text
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

OUTCOME_STYLES = {
    Outcome.DONE: "green",
    Outcome.RETRIED: "yellow",
    Outcome.DEAD: "red",
    Outcome.EXPIRED: "magenta",
    Outcome.RELEASED: "blue",
    Outcome.CANCELLED: "bright_black",
    Outcome.MERGED: "bright_black",
    Outcome.REQUEUED: "cyan",
}
SHOWN = 50


def timeline(job: JobRecord, attempts: list[Attempt], now: Micros, screen: Console) -> RenderableType:
    """Instants are counted from when the job was accepted; the bar spans from there to its end, or to now."""
    running = job.state is JobState.INFLIGHT and job.reserved_at_us is not None
    if not attempts and not running:
        return cell("timeline: not tried yet", "bright_black")
    end = job.finished_at_us if job.finished_at_us is not None else now
    span = Span(job.created_at_us, max([end, *(one.ended_at_us for one in attempts)]), screen)
    narrow = is_narrow(screen)
    columns = [
        Column("at", right=True),
        Column("took", right=True),
        Column(span.heading()),
        Column("outcome"),
        *([] if narrow else [Column("worker", shrinks=1)]),
        Column("error", shrinks=2),
    ]
    rows = []
    for one in attempts[-SHOWN:]:
        start = one.ended_at_us if one.reserved_at_us is None else one.reserved_at_us
        style = OUTCOME_STYLES[one.outcome]
        row = [
            cell(f"+{duration_text(max(0, start - job.created_at_us))}"),
            cell("-" if one.reserved_at_us is None else duration_text(one.ended_at_us - start)),
            span.bar(start, one.ended_at_us, style),
            cell(str(one.outcome), style),
        ]
        if not narrow:
            row.append(cell(one.worker or "-", "bright_black"))
        error = ": ".join(part for part in (one.error_type, one.error_message) if part)
        rows.append([*row, cell(error, "bright_black")])
    if running and job.reserved_at_us is not None:
        row = [
            cell(f"+{duration_text(max(0, job.reserved_at_us - job.created_at_us))}"),
            cell(duration_text(max(0, now - job.reserved_at_us))),
            span.bar(job.reserved_at_us, now, "yellow"),
            cell("running", "yellow"),
        ]
        rows.append([*row, *([] if narrow else [cell(job.worker or "-", "bright_black")]), cell("")])
    some = "" if len(attempts) <= SHOWN else f" (the last {SHOWN} of {len(attempts)})"
    return table(screen, columns, rows, title=f"timeline{some}")


class Span:
    """A stretch of time drawn over a few columns."""

    def __init__(self, start: Micros, end: Micros, screen: Console) -> None:
        self._start = start
        self._length = max(1, end - start)
        self._columns = 12 if is_narrow(screen) else 24
        unicode = (screen.encoding or "").lower().startswith("utf")
        self._on, self._off = ("█", "·") if unicode else ("#", ".")

    def heading(self) -> str:
        return duration_text(self._length).rjust(self._columns)

    def bar(self, start: Micros, end: Micros, style: str) -> Text:
        first = min(self._columns - 1, max(0, self._column(start)))
        last = min(self._columns, max(first + 1, self._column(end) + 1))
        text = cell(self._off * first, "bright_black")
        text.append(self._on * (last - first), style)
        text.append(self._off * (self._columns - last), "bright_black")
        return text

    def _column(self, when: Micros) -> int:
        return (when - self._start) * self._columns // self._length
