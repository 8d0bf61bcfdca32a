"""`python -m taskharbor_testkit.planted`: run the kit on every planted bug and tell which case catches which."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table

from taskharbor_testkit.planted import PLANTED
from taskharbor_testkit.planted.table import as_markdown, make_table


@click.command("python -m taskharbor_testkit.planted")
@click.argument("bugs", nargs=-1, type=click.Choice(sorted(PLANTED)), metavar="[BUG]...")
@click.option("--json", "json_", is_flag=True, help="Print all names of cases, as JSON.")
@click.option("--markdown", is_flag=True, help="Print the page PLANTED.md.")
@click.option(
    "--processes", default=1, show_default=True, type=click.IntRange(1), help="Run bugs side by side."
)
@click.pass_context
def main(context: click.Context, bugs: tuple[str, ...], json_: bool, markdown: bool, processes: int) -> None:
    """Run the conformance kit on planted bugs (all of them where none is named). Exit code 1 if one is not caught."""
    if json_ and markdown:
        raise click.UsageError("--json and --markdown: one of them at a time")
    table = make_table(bugs or list(PLANTED), processes)
    if json_:
        click.echo(msgspec.json.format(msgspec.json.encode(table)))
    elif markdown:
        click.echo(as_markdown(table), nl=False)
    else:
        shown = Table("bug", "cases", "state machine", "the most specific case")
        for one in table:
            name = one.cases[0] if one.cases else "-"
            shown.add_row(one.bug, str(len(one.cases)), "yes" if one.by_machine else "no", name)
        Console().print(shown)
    context.exit(0 if all(one.cases or one.by_machine for one in table) else 1)


if __name__ == "__main__":
    main()
