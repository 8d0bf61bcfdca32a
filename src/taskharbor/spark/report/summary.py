"""The report for a terminal: the verdict, the numbers, and a sparkline for each count over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskharbor.spark.report.data import ReportData, Verdict
from taskharbor.spark.report.formatting import count, duration, percent, shortened, span_text

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
ERRORS = 3


def summary(data: ReportData) -> RenderableType:
    """A renderable for rich. Stored text cannot send control characters to the terminal."""
    if data.is_empty:
        said = f"\nWaiting: {data.waiting_text}" if data.waiting else ""
        return Text(f"The attempt log has no rows yet.{said}")
    return Group(_verdict(data.verdict), Text(), _numbers(data), Text(), _over_time(data), *_errors(data))


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """One character for the highest value of each share of the time; a space where nothing was measured."""
    shares = min(width, len(values))
    edges = [index * len(values) // shares for index in range(shares + 1)] if shares else []
    tops = [
        max((value for value in values[start:end] if value is not None), default=None)
        for start, end in pairwise(edges)
    ]
    scale = (len(BLOCKS) - 1) / (max((top for top in tops if top is not None), default=0) or 1)
    return "".join(" " if top is None else BLOCKS[round(scale * max(0, top))] for top in tops)


def _verdict(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("Not audited.", "bright_black")
    if verdict.is_clean:
        return Text(f"{verdict.headline}.", "bold green")
    kinds = ", ".join(f"{count(number)} {kind}" for kind, number in verdict.kinds.items())
    return Text(f"{verdict.headline}: {kinds}", "bold red")


def _numbers(data: ReportData) -> RenderableType:
    totals = data.totals
    jobs = (
        f"{count(totals.jobs)}: {count(totals.done)} done, {count(totals.dead)} dead, "
        f"{count(totals.cancelled)} cancelled, {count(totals.open)} not ended"
    )
    failed = percent(totals.retried + totals.expired, totals.executions)
    tries = f"{count(totals.retried)} retried, {count(totals.expired)} expired ({failed})"
    grid = Table.grid("", "", padding=(0, 2))
    grid.columns[0].style = "bright_black"
    grid.add_row("span", span_text(data.start_us, data.timeline.end_us))
    grid.add_row("jobs", jobs)
    grid.add_row("executions", f"{count(totals.executions)}: {tries}")
    waits = (totals.wait_p50_us, totals.wait_p95_us, totals.wait_p99_us)
    grid.add_row("wait", "about p50 {}, p95 {}, p99 {}".format(*map(duration, waits)))
    grid.add_row("run", f"about p50 {duration(totals.run_p50_us)}, p95 {duration(totals.run_p95_us)}")
    if data.waiting:
        grid.add_row("waiting", data.waiting_text)
    if data.quarantined:
        grid.add_row("quarantine", f"{count(data.quarantined)} rows of the log are in quarantine.attempts")
    return grid


def _over_time(data: ReportData) -> RenderableType:
    flow, backlog, each = data.flow, data.total_backlog, f"per {duration(data.bucket_us)}"
    died, dead = sum(data.flow.failures), data.totals.dead
    died_note = f"{count(died)}, {count(dead)} of them dead now" if died > dead else count(died)
    waits = [value for value in data.wait.p95 if value is not None]
    rows: list[tuple[str, Sequence[float | None], str, str]] = [
        ("arrived", flow.arrivals, "white", f"at most {count(max(flow.arrivals, default=0))} {each}"),
        ("completed", flow.completions, "cyan", f"at most {count(max(flow.completions, default=0))} {each}"),
        ("retried", flow.retries, "yellow", count(sum(flow.retries))),
        ("expired", flow.expiries, "magenta", count(sum(flow.expiries))),
        ("died", flow.failures, "red", died_note),
        (
            "backlog",
            backlog,
            "blue",
            f"at most {count(max(backlog, default=0))} at the end of {duration(data.bucket_us)}",
        ),
        ("wait p95", data.wait.p95, "blue", f"at most {duration(max(waits, default=None))}"),
    ]
    grid = Table.grid("", "", "", padding=(0, 2))
    grid.columns[0].style = grid.columns[2].style = "bright_black"
    grid.columns[1].no_wrap = True
    for name, values, style, note in rows:
        grid.add_row(name, Text(sparkline(values), style), note)
    return grid


def _errors(data: ReportData) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for one in data.errors[:ERRORS]:
        message = shortened(f"{one.error_type}: {one.sample_message}", 70)
        plain = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in message)
        shown.append(Text.assemble((f"{count(one.count):>10}  ", "red"), plain))
    return [Text(), Text("Most frequent errors", "bold"), *shown] if shown else []
