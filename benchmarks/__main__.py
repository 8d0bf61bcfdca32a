"""`make bench`: every figure with its raw limit, as a table; `--json FILE` keeps the runs.

`peers-postgres` and `peers-redis` run only when they are named: they install other queues and take their time. `size` counts the
code, and `walk` the files that one job's path enters.
"""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import (
    memory,
    objectstore,
    postgres,
    postgres_server,
    redis,
    redis_server,
    schedules,
    size,
    sqlite,
)
from benchmarks.measure import Figure, Series
from benchmarks.peers.installed import DEFAULT_CACHE
from benchmarks.peers.postgres_track import PostgresTrack
from benchmarks.peers.race import Result, race
from benchmarks.peers.redis_track import RedisTrack
from benchmarks.peers.report import table as race_table
from benchmarks.peers.track import Track


def _spark(quick: bool) -> list[Callable[[], Figure]]:
    """Imported when asked for: PySpark alone takes longer to import than some of the others run."""
    from benchmarks import continuous, pipeline, spark_reading, spark_writing

    modules = (spark_reading, spark_writing, pipeline, continuous)
    return [figure for module in modules for figure in module.figures(quick)]


def _http(quick: bool) -> list[Callable[[], Figure]]:
    """Imported when asked for: not everybody has the packages of a broker."""
    from benchmarks import http

    return http.figures(quick)


SUITES: dict[str, Callable[[bool], list[Callable[[], Figure]]]] = {
    "memory": memory.figures,
    "sqlite": sqlite.figures,
    "postgres": postgres.figures,
    "redis": redis.figures,
    "http": _http,
    "objectstore": objectstore.figures,
    "schedules": schedules.figures,
    "spark": _spark,
}
CODE = ("size", "walk")
"""Reports on the code itself, not figures of it."""
PEERS: dict[str, Track] = {"peers-postgres": PostgresTrack(), "peers-redis": RedisTrack()}


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice([*SUITES, *PEERS, *CODE]))
@click.option("--quick", is_flag=True, help="One small round: to see that it runs, not to quote.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write every run to this file.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_CACHE,
    show_default=True,
    help=f"Where {' and '.join(PEERS)} install other queues.",
)
def main(suites: tuple[str, ...], quick: bool, output: Path | None, cache: Path) -> None:
    """Measure TaskHarbor against the raw limit of each backend, in the same run."""
    console = Console()
    measured: list[Figure] = []
    raced: dict[str, list[Result]] = {}
    code: dict[str, object] = {}
    for name in suites or SUITES:
        if name in CODE:
            code[name] = _code_report(name, console)
            continue
        if name in PEERS:
            raced[name] = race(PEERS[name], cache, quick, console.print)
            console.print(race_table(raced[name]))
            continue
        for take in SUITES[name](quick):
            with console.status(f"measuring {name} ({len(measured) + 1}) ..."):
                figure = take()
            measured.append(figure)
            console.print(f"{figure.name}: {figure.ratio:.2f}", highlight=False)
    if measured:
        console.print(_table(measured))
    for figure in measured:
        for what, seen in figure.facts.items():
            console.print(f"{figure.name}, {what}: {seen}", highlight=False)
    if output is not None:
        report = {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "postgres": postgres_server.version_started(),
            "redis": redis_server.version_started(),
            "figures": [
                {**msgspec.to_builtins(figure), "ratio": round(figure.ratio, 3), "holds": figure.holds}
                for figure in measured
            ],
            "peers": msgspec.to_builtins(raced),
            "code": msgspec.to_builtins(code),
        }
        output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def _code_report(name: str, console: Console) -> object:
    if name == "size":
        folders = {tree: size.measure(root) for tree, root in size.TREES.items()}
        for tree, found in folders.items():
            console.print(size.table(tree, found))
        return folders
    # Imported when asked for: it needs the packages of every driver.
    from benchmarks import walk

    with console.status("enqueueing and running a job on every driver ..."):
        walks = list(walk.walk(walk.STORES))
    console.print(walk.table(walks))
    return walks


def _table(figures: list[Figure]) -> Table:
    table = Table("figure", "ours", "limit", "ratio", "goal")
    for figure in figures:
        sign = ">=" if figure.higher_is_better else "<="
        colour = "green" if figure.holds else "red"
        table.add_row(
            figure.name,
            _shown(figure.ours),
            _shown(figure.limit),
            f"[{colour}]{figure.ratio:.2f}[/]",
            f"{sign} {figure.goal:g}",
        )
    return table


def _shown(series: Series) -> str:
    spread = f"{min(series.runs):,.4g}..{max(series.runs):,.4g}"
    return f"{series.median:,.4g} {series.unit}\n[dim]{series.name}, {spread}[/]"


if __name__ == "__main__":
    main()
