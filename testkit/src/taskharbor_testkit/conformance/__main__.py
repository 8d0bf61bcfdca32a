"""`python -m taskharbor_testkit.conformance URL`: judge a driver by its URL. Exit code 0 only if everything passed.

Every case wants a fresh store, so the URL says where fresh ones are: `{fresh}` in it becomes a new name each time.
A lasting store without it, and any store that is not empty, is refused before anything is written.
"""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from taskharbor.drivers.registry import connect
from taskharbor.errors import TaskHarborError
from taskharbor_testkit.conformance import check
from taskharbor_testkit.conformance.backend import FRESH
from taskharbor_testkit.conformance.effort import Effort
from taskharbor_testkit.conformance.report import as_json, print_table
from taskharbor_testkit.conformance.runner import Verdict


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
    effort = msgspec.structs.replace(
        Effort.from_environment(), **{name: value for name, value in given.items() if value is not None}
    )
    try:
        _refuse_unless_fresh(url)
    except TaskHarborError as refused:
        raise click.ClickException(str(refused)) from None
    console = Console(stderr=json_)

    def tell(verdict: Verdict) -> None:
        if verdict.outcome == "failed" and not json_:
            console.print(f"[red]failed[/] {verdict.name}")

    report = check(url, only=only, machine=machine, effort=effort, fail_fast=fail_fast, on_verdict=tell)
    if json_:
        click.echo(as_json(report))
    else:
        print_table(report, console)
    context.exit(0 if report.ok else 1)


def _refuse_unless_fresh(url: str) -> None:
    """A lasting store is shared by all cases and has a life after them: neither is what the kit wants."""
    if FRESH not in url and connect(url).capabilities.durable:
        raise click.ClickException(
            f"{url} names one store, and every case wants a fresh one: put {FRESH} where a new name belongs, "
            f"e.g. sqlite:////tmp/{FRESH}.db"
        )


if __name__ == "__main__":
    main()
