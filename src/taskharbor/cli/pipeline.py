"""`taskharbor pipeline` and `taskharbor history`: the attempt log as a lake of tables, its audit, its report and its upkeep; and
a log that looks like production, to try the pipeline on and to prove the audit with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import msgspec

from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.errors import FAILED, BadInput
from taskharbor.cli.options import Invocation, option
from taskharbor.cli.output import Column, cell, count_text
from taskharbor.errors import MissingExtra

_lake = option("--lake folder", opt.FOLDER, "The folder of the lake.", "lake")
_master = option("--master", "URL", "Where Spark runs.  [default: this machine's cores, or spark-submit's]")
_session_options = opt.together(_master, _lake)


@click.group(cls=opt.Group)
def pipeline(settings: Invocation) -> None:
    """Analyse the attempt log with Spark: tables, audit, report."""


@pipeline.command()
@option("--objectives", opt.FILE, "Objectives in TOML or JSON; they hold for later runs too.")
@_session_options
def run(settings: Invocation, folder: Path, objectives: Path | None, master: str | None) -> None:
    """Take in what is new since the last run."""
    opt.require_store(settings)
    began = time.monotonic()
    with _session(settings, folder, master, may_be_new=True) as (spark, lake, show):
        from taskharbor.spark.lake import load_objectives, run_pipeline

        startup = time.monotonic() - began
        wanted = None if objectives is None else load_objectives(objectives)
        summary = run_pipeline(spark, lake, settings.url, objectives=wanted, progress=show)
    summary.startup_seconds = startup
    text = (
        f"{summary.source}: {summary.rows_read:,} new rows of the attempt log in {summary.seconds:.1f} s "
        f"(and {summary.startup_seconds:.1f} s for starting Spark)"
    )
    out.answer(settings, out.rounded(summary), text)
    shown = {name: rows for name, rows in summary.tables.items() if not name.startswith("state.")}
    if shown and not settings.json:
        columns = (
            Column("table", lambda name: name),
            Column("rows written", lambda name: count_text(shown[name]), right=True),
            Column("seconds", lambda name: f"{summary.steps.get(name, 0.0):.1f}", right=True),
        )
        out.print_table(columns, shown)


@pipeline.command()
@_session_options
def audit(settings: Invocation, folder: Path, master: str | None) -> int:
    """Check the guarantees over everything the lake holds; exit with 1 where one was broken."""
    with _session(settings, folder, master) as (spark, lake, show):
        from taskharbor.spark.audit import audit_lake

        show("audit", 0, 1)
        result = audit_lake(spark, lake)
    if settings.json:
        out.emit({"clean": result.is_clean, **msgspec.to_builtins(result)})
    else:
        screen = out.console()
        found = "no violation" if result.is_clean else f"{result.violations:,} violations"
        headline = f"{found} in {result.rows:,} rows of {result.jobs:,} jobs"
        screen.print(cell(headline, "bold green" if result.is_clean else "bold red"))
        for kind, count in result.kinds.items():
            screen.print(cell(f"{count:>8,}  {kind}", "red"))
        for one in result.examples:
            screen.print(cell(f"{one.kind}: {one.text}"))
    return 0 if result.is_clean else FAILED


@pipeline.command()
@option("--output -o", opt.FILE, "The page to write.  [default: report.html in the lake]")
@_session_options
def report(settings: Invocation, folder: Path, output: Path | None, master: str | None) -> None:
    """Write one HTML page with everything worth seeing."""
    with _session(settings, folder, master) as (spark, lake, show):
        from taskharbor.spark.audit import audit_lake
        from taskharbor.spark.report import collect, summary, write_page

        show("audit", 0, 2)
        audited = audit_lake(spark, lake)
        show("report", 1, 2)
        data = collect(spark, lake, audit=audited)
        written = write_page(data, output or folder / "report.html")
    if settings.json:
        out.emit({"report": str(written), "clean": audited.is_clean})
    else:
        out.console().print(summary(data))
        click.echo(f"\nreport: {written}")


@pipeline.command()
@_session_options
def compact(settings: Invocation, folder: Path, master: str | None) -> None:
    """Make few files of the many small ones that runs leave."""
    with _session(settings, folder, master) as (spark, lake, show):
        from taskharbor.spark.lake import compact as compact_lake

        summary = compact_lake(spark, lake, progress=show)
    text = (
        f"{summary.files_before:,} files became {summary.files_after:,}, in {sum(summary.tables.values()):,} dates of "
        f"{len(summary.tables)} tables ({summary.seconds:.1f} s); `taskharbor pipeline vacuum` removes the old ones"
    )
    if not summary.tables:
        text = "nothing to do: every date is in few files already"
    out.answer(settings, out.rounded(summary), text)


@pipeline.command()
@option("--keep", opt.COUNT, "Keep what the newest so many states of the lake need, for their readers.", 2)
@option(
    "--unlisted-for", opt.duration, "Leave younger files alone: an unfinished run may be writing them.", "6h"
)
@option("--before", click.DateTime(["%Y-%m-%d"]), "Drop the rows of earlier dates.", metavar="DATE")
@_lake
def vacuum(
    settings: Invocation, folder: Path, keep: int, unlisted_for: timedelta, before: datetime | None
) -> None:
    """Remove files that nothing needs any more."""
    _require_lake(folder)
    # The lake's modules need PySpark even where no session does, and the error should say so.
    from taskharbor.spark.session import check

    check()
    from taskharbor.spark.lake import Lake
    from taskharbor.spark.lake import vacuum as vacuum_lake

    date = None if before is None else before.date()
    summary = vacuum_lake(Lake(folder), keep_manifests=keep, unlisted_for=unlisted_for, before=date)
    dropped = f"{summary.dates:,} dates dropped; " if before is not None else ""
    removed = f"{summary.directories:,} directories removed ({summary.bytes / 1e6:,.1f} MB)"
    out.answer(settings, summary, f"{dropped}{removed}, {summary.manifests:,} old states forgotten")


# -- before ---------------------------------------------------------------------------------------------------


@contextmanager
def _session(
    settings: Invocation, folder: Path, master: str | None, *, may_be_new: bool = False
) -> Iterator[tuple[Any, Any, out.Show]]:
    """A SparkSession, the lake, and how to show progress. No type is named: no command imports PySpark."""
    if not may_be_new:
        _require_lake(folder)
    with out.progress(settings) as show:
        from taskharbor.spark.session import FOR_MILLIONS, local_session

        show("starting Spark", 0, 1)
        spark = local_session("taskharbor pipeline", master=master, settings=FOR_MILLIONS)
        from taskharbor.spark.lake import Lake

        yield spark, Lake(folder), show


def _require_lake(folder: Path) -> None:
    """An empty lake would answer a wrong --lake with "no violations"."""
    if not (folder / "_lake").is_dir():
        hint = "`taskharbor pipeline run` makes one; --lake names its folder"
        raise BadInput(f"there is no lake in {folder}", hint=hint)


# -- a log to try it on --------------------------------------------------------------------------------------


@opt.command(has_store=False)
@option("--rows", opt.COUNT, "How many attempts.", 100_000)
@option("--days", opt.COUNT, "Over how many days.", 7)
@option("--seed", int, "The same seed makes the same rows.", 0)
@option("--violations", click.IntRange(min=0), "Break the guarantees this often.", 0)
@option("--lake", opt.FOLDER, "Run it through this lake.")
@option("--parquet", opt.FOLDER, "Write it below this folder: attempts, queues, planted.")
def history(settings: Invocation, /, lake: Path | None, parquet: Path | None, **wanted: int) -> None:
    """Make up a realistic history, clean or with planted violations."""
    folder = lake or parquet
    if folder is None or (lake is not None and parquet is not None):
        raise click.UsageError("say where it goes: either --lake DIR or --parquet DIR")
    from taskharbor.spark.session import check, local_session

    check()
    try:
        from taskharbor_testkit.histories.generation import fill_lake, write_parquet
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "made-up histories are part of the testkit: pip install 'taskharbor-testkit[histories]'"
        ) from missing

    spark, began = local_session("taskharbor history"), time.monotonic()
    write = write_parquet if lake is None else fill_lake
    count = write(spark, folder, **wanted)
    seconds, rows, seed = time.monotonic() - began, wanted["rows"], wanted["seed"]
    document = {"rows": rows, "planted": count, "seed": seed, "seconds": seconds, "path": str(folder)}
    text = f"{rows:,} attempts, {count:,} violations planted, in {folder} ({seconds:.1f} s)"
    out.answer(settings, out.rounded(document), text)
