"""`python -m taskharbor_testkit.conformance URL`: judge a driver by its URL. Exit code 0 only if everything passed.

Every case wants a fresh store, so the URL says where fresh ones are: `{fresh}` in it becomes a new name each time.
A lasting store without it, and any store that is not empty, is refused before anything is written.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from taskharbor.drivers.registry import connect
from taskharbor.errors import TaskHarborError
from taskharbor_testkit.conformance import check
from taskharbor_testkit.conformance.backend import FRESH, Backend
from taskharbor_testkit.conformance.machine import Effort
from taskharbor_testkit.conformance.runner import Report, Verdict


@click.command("python -m taskharbor_testkit.conformance")
@click.argument("url")
@click.option("--only", default="*", help="Pattern of case names, e.g. 'keyed.*'.")
@click.option("--json", "json_", is_flag=True, help="Print the report as JSON.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option("--machine/--no-machine", default=True, help="Whether to run the state machine.")
@click.option("--examples", type=click.IntRange(1), help="Histories the state machine tries.")
@click.option("--shrink/--no-shrink", default=None, help="Whether to look for the shortest failing history.")
@click.option("--seed", type=int, help="Other histories than those of every run; the same for the same seed.")
@click.pass_context
def main(
    context: click.Context,
    url: str,
    only: str,
    json_: bool,
    fail_fast: bool,
    machine: bool,
    examples: int | None,
    shrink: bool | None,
    seed: int | None,
) -> None:
    """Run the conformance kit on the driver that answers to URL.

    Write {fresh} where a name belongs that was never used, e.g. sqlite:////tmp/{fresh}.db; memory:// needs none.
    """
    given = {"examples": examples, "seed": seed, "shrink": shrink}
    try:
        effort = msgspec.structs.replace(
            Effort.from_environment(), **{name: value for name, value in given.items() if value is not None}
        )
        asyncio.run(_refuse_unless_fresh(url))
    except TaskHarborError as refused:
        raise click.ClickException(str(refused)) from None
    console = Console(stderr=json_)

    def tell(verdict: Verdict) -> None:
        if verdict.outcome == "failed" and not json_:
            console.print(f"[red]failed[/] {verdict.name}")

    report = check(url, only=only, machine=machine, effort=effort, fail_fast=fail_fast, on_verdict=tell)
    if not report.verdicts:
        raise click.UsageError(f"--only {only}: no case has such a name")
    if json_:
        body = {"ok": report.ok, "effort": report.effort, "verdicts": report.verdicts}
        click.echo(msgspec.json.format(msgspec.json.encode(body)))
    else:
        _print_table(report, console)
    context.exit(0 if report.ok else 1)


async def _refuse_unless_fresh(url: str) -> None:
    """A lasting store is shared by all cases and has a life after them: neither is what the kit wants. A store that cannot be
    opened would fail in every case."""
    if FRESH not in url and connect(url).capabilities.durable:
        raise click.ClickException(
            f"{url} names one store, and every case wants a fresh one: put {FRESH} where a new name belongs, "
            f"e.g. sqlite:////tmp/{FRESH}.db"
        )
    async with Backend.from_url(url).store(Path()):
        pass


def _print_table(report: Report, console: Console) -> None:
    """One line per file of cases, then every failure in full."""
    table = Table("part", "passed", "failed", "skipped", "seconds")
    verdicts = [(verdict.name.partition(".")[0], verdict) for verdict in report.verdicts]
    for part in dict.fromkeys(part for part, _ in verdicts):
        own = Report([verdict for name, verdict in verdicts if name == part], report.effort)
        counts = [str(own.count(outcome)) for outcome in ("passed", "failed", "skipped")]
        seconds = sum(verdict.seconds for verdict in own.verdicts)
        table.add_row(part, *counts, f"{seconds:.2f}", style="" if own.ok else "red")
    console.print(table)
    for verdict in report.failures:
        console.rule(f"[red]{escape(verdict.name)}")
        console.print(escape(verdict.message), highlight=False)
    told = {verdict.message for verdict in report.verdicts if verdict.outcome == "skipped"}
    for reason in sorted(told):
        console.print(f"skipped: {escape(reason)}")
    colour = "green" if report.ok else "red"
    console.print(
        f"[{colour}]{report.count('passed')} passed, {len(report.failures)} failed, "
        f"{report.count('skipped')} skipped[/] ({escape(str(report.effort))})"
    )


if __name__ == "__main__":
    main()
