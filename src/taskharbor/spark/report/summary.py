"""The report for a terminal: the verdict, the numbers, and how they went over time in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from taskharbor.spark.report.data import ReportData, Verdict
from taskharbor.spark.report.wording import count, duration, percent, plural, shortened, span_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
ERRORS = 3


def summary(data: ReportData) -> RenderableType:
    """Something for rich to print. Nothing stored in a job can steer the terminal."""
    from rich.console import Group
    from rich.text import Text

    if data.is_empty:
        return Text("The attempt log has no rows yet.")
    return Group(verdict_line(data.verdict), Text(), _numbers(data), Text(), _over_time(data), *_errors(data))


def verdict_line(found: Verdict | None) -> Text:
    from rich.text import Text

    if found is None:
        return Text("Not audited.", "bright_black")
    checked = f"{plural(found.leases, 'lease')} of {plural(found.jobs, 'job')}"
    if found.is_clean:
        return Text(f"No violation in {checked}.", "bold green")
    kinds = ", ".join(f"{count(number)} {kind}" for kind, number in found.kinds.items())
    return Text(f"{plural(sum(found.kinds.values()), 'violation')} in {checked}: {kinds}", "bold red")


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """One character per share of the time, the highest value in it; a gap where nothing was measured."""
    if not values:
        return ""
    shares = min(width, len(values))
    edges = [index * len(values) // shares for index in range(shares + 1)]
    tops = [
        max((value for value in values[start:end] if value is not None), default=None)
        for start, end in pairwise(edges)
    ]
    highest = max((top for top in tops if top is not None), default=0)
    if not highest:
        return "".join(" " if top is None else BLOCKS[0] for top in tops)
    last = len(BLOCKS) - 1
    return "".join(" " if top is None else BLOCKS[round(last * max(0, top) / highest)] for top in tops)


def _numbers(data: ReportData) -> RenderableType:
    from rich.table import Table

    totals = data.totals
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black")
    grid.add_column()
    grid.add_row("span", span_text(data.start_us, data.end_us))
    grid.add_row(
        "jobs",
        f"{count(totals.jobs)}: {count(totals.done)} done, {count(totals.dead)} dead, "
        f"{count(totals.cancelled)} cancelled, {count(totals.open)} not ended",
    )
    grid.add_row(
        "executions",
        f"{count(totals.executions)}: {count(totals.retried)} retried, {count(totals.expired)} expired "
        f"({percent(totals.retried + totals.expired, totals.executions)})",
    )
    grid.add_row("wait", f"p50 {duration(totals.wait_p50_us)}, p95 {duration(totals.wait_p95_us)}")
    grid.add_row("run", f"p50 {duration(totals.run_p50_us)}, p95 {duration(totals.run_p95_us)}")
    return grid


def _over_time(data: ReportData) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    flow = data.flow
    backlog = [sum(one.waiting[index] for one in data.backlog) for index in range(data.buckets)]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black")
    grid.add_column(no_wrap=True)
    grid.add_column(style="bright_black")
    each = duration(data.bucket_us)
    for name, values, style, said in (
        ("arrived", flow.arrivals, "white", f"at most {count(max(flow.arrivals, default=0))} per {each}"),
        (
            "completed",
            flow.completions,
            "cyan",
            f"at most {count(max(flow.completions, default=0))} per {each}",
        ),
        ("retried", flow.retries, "yellow", count(sum(flow.retries))),
        ("expired", flow.expiries, "magenta", count(sum(flow.expiries))),
        ("died", flow.failures, "red", count(sum(flow.failures))),
        ("backlog", backlog, "blue", f"at most {count(max(backlog, default=0))}"),
        ("wait p95", data.wait.p95, "blue", f"at most {duration(_most(data.wait.p95))}"),
    ):
        grid.add_row(name, Text(sparkline(values), style), said)
    return grid


def _errors(data: ReportData) -> list[RenderableType]:
    from rich.text import Text

    shown: list[RenderableType] = []
    for one in data.errors[:ERRORS]:
        message = _plain(shortened(f"{one.error_type}: {one.sample_message}", 70))
        shown.append(Text.assemble((f"{count(one.count):>10}  ", "red"), message))
    return [Text(), Text("Most frequent errors", "bold"), *shown] if shown else []


def _plain(text: str) -> str:
    """Control characters made visible."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
