"""`taskharbor lake`: the lake's tables without Spark."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.options import Invocation, option
from taskharbor.cli.output import Column, count_text
from taskharbor.cli.pipeline import lake_at, lake_option

_SHOWN = 1000
"""Rows of a table on a screen."""


@click.group(cls=opt.Group, has_store=False)
def lake(settings: Invocation) -> None:
    """Read the pipeline's tables, without Java."""


@lake.command(has_store=False)
@lake_option
def tables(settings: Invocation, place: str) -> None:
    """List the tables: columns, rows, versions."""
    opened = lake_at(place)
    from taskharbor.lake.query import tables as tables_of

    found = tables_of(opened)
    if settings.json:
        out.emit(msgspec.to_builtins(found))
        return
    columns = (
        Column("table", lambda one: one.name),
        Column("rows", lambda one: count_text(one.rows), right=True),
        Column("run", lambda one: str(one.run), right=True),
        Column("version", lambda one: str(one.version), right=True),
        Column("files", lambda one: count_text(one.files), right=True),
        Column("MB", lambda one: f"{one.bytes / 1e6:,.1f}", right=True),
        Column("columns", lambda one: ", ".join(one.columns), shrinks=True),
    )
    out.print_table(columns, found)


@lake.command(has_store=False)
@click.argument("query")
@option("--format -f kind", click.Choice(["table", "csv", "json", "parquet"]), "Of the result.", "table")
@option("--output -o", opt.FILE, "Where it goes.  [default: the screen]")
@lake_option
def sql(settings: Invocation, place: str, query: str, kind: str, output: Path | None) -> None:
    """Ask in SQL: `SELECT count(*) FROM silver.attempts`."""
    if kind == "parquet" and output is None:
        raise click.UsageError("a Parquet file needs a name: --output FILE")
    if output is not None and not output.parent.is_dir():
        raise click.UsageError(f"--output: there is no folder {output.parent}")
    opened = lake_at(place)
    from taskharbor.lake.query import sql as ask
    from taskharbor.lake.query import write_result

    found = ask(opened, query)
    if settings.json or kind != "table" or output is not None:
        with click.open_file("-" if output is None else str(output), "wb") as sink:
            write_result(found, "json" if settings.json or kind == "table" else kind, sink)
        return

    def column(number: int, name: str) -> Column:
        return Column(name, lambda row: "" if row[number] is None else str(row[number]))

    columns = [column(number, name) for number, name in enumerate(found.schema.names)]
    out.print_table(
        columns, list(zip(*(one.to_pylist() for one in found.slice(0, _SHOWN).columns), strict=True))
    )
    if found.num_rows > _SHOWN:
        click.echo(f"{found.num_rows - _SHOWN:,} more rows: use --format csv, json or parquet", err=True)
