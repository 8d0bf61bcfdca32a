"""The race as a table: medians with their spread, and each one's drain as a share of the raw limit's and against ours."""

from __future__ import annotations

from rich.table import Table

from benchmarks.measure import Series
from benchmarks.peers.contender import OURS, RAW
from benchmarks.peers.race import Result


def table(results: list[Result]) -> Table:
    drains = {one.name: one.drain.median for one in results if not one.failure}
    shown = Table(
        "contender", "bulk enqueue", "drain, one worker process", "of raw", "ours is", "idle pick-up, p50"
    )
    for one in results:
        name = f"{one.name}\n[dim]{one.settings}[/]"
        if one.failure:
            shown.add_row(name, f"[red]{one.failure[:160]}[/]")
            continue
        speed = drains[one.name]
        shown.add_row(
            name,
            _cell(one.enqueue),
            _cell(one.drain),
            f"{speed / drains[RAW]:.3f}" if RAW in drains else "",
            f"{drains[OURS] / speed:.1f} x" if OURS in drains and one.name != OURS else "",
            _cell(one.pick_up),
        )
    return shown


def _cell(series: Series) -> str:
    return f"{_number(series.median)} {series.unit}\n[dim]{_number(min(series.runs))} to {_number(max(series.runs))}[/]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
