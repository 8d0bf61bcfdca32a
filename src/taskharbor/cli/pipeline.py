"""`taskharbor pipeline` and `taskharbor history`: the attempt log as a lake of tables, its audit, its report and its upkeep; and
a log that looks like production, to try the pipeline on and to prove the audit with."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.errors import FAILED, QUARANTINED, TERMINATED, CommandFailed
from taskharbor.cli.errors import report as report_error
from taskharbor.cli.options import Invocation, option
from taskharbor.cli.output import Column, cell, count_text
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import MissingExtra
from taskharbor.printable import printable, printable_json

lake_option = option("--lake place", "PLACE", "A folder, or s3://, gs:// or az:// with options.", "lake")
_master = option("--master", "URL", "Where Spark runs.  [default: this machine's cores, or spark-submit's]")
_session_options = opt.together(_master, lake_option)


def _dates(text: str) -> tuple[date, date]:
    """`2026-03-01..2026-03-07`, or one date."""
    first, _, last = text.partition("..")
    try:
        return date.fromisoformat(first), date.fromisoformat(last or first)
    except ValueError:
        raise click.BadParameter(f"{text!r}: write like 2026-03-01..2026-03-07") from None


@click.group(cls=opt.Group)
def pipeline(settings: Invocation) -> None:
    """Analyse the attempt log with Spark: tables, audit, report."""


@pipeline.command()
@option("--objectives", opt.FILE, "Objectives in TOML or JSON; they hold for later runs too.")
@option("--every", opt.duration, "Stay, and run at this interval until SIGTERM or Ctrl-C.")
@option("--keep-for", opt.duration, "With --every: as of `vacuum`, which it does by itself.", "1h")
@option("--reprocess", _dates, "Compute these dates again from bronze, and take in nothing new.")
@_session_options
def run(
    settings: Invocation,
    place: str,
    objectives: Path | None,
    every: timedelta | None,
    keep_for: timedelta,
    reprocess: tuple[date, date] | None,
    master: str | None,
) -> int:
    """Take in what is new since the last run; exit with 5 where rows went into quarantine."""
    if reprocess is None:
        _require_store(settings)
    elif every or objectives:
        raise click.UsageError("--reprocess takes in nothing new: give it without --every and --objectives")
    began, found = time.monotonic(), Counter[str]()

    def has_few_rows() -> bool:
        from taskharbor.spark.lake.run import has_few_news

        return every is None and reprocess is None and has_few_news(lake_at(place), settings.url)

    with _session(settings, place, master, has_few_rows, is_quiet=every is not None) as (spark, lake, show):
        from taskharbor.spark import lake as lakes
        from taskharbor.spark.failures import plain_failures

        startup = time.monotonic() - began
        wanted = None if objectives is None else lakes.load_objectives(objectives)

        def once() -> lakes.RunSummary:
            # A store that does not answer is waited for, also where a task finds it.
            with plain_failures():
                if reprocess is not None:
                    return lakes.reprocess(spark, lake, *reprocess, progress=show)
                return lakes.run_pipeline(spark, lake, settings.url, objectives=wanted, progress=show)

        def done(summary: lakes.RunSummary) -> None:
            found.update(summary.quarantined)
            summary.startup_seconds = startup if every is None else 0.0
            out.answer(settings, out.rounded(summary), _line(summary, is_dated=every is not None))

        if every is None:
            done(summary := once())
        else:

            def log(text: str) -> None:
                click.echo(printable_json({"note": text}) if settings.json else printable(text), err=True)

            stopping = _stops_at_signals(log)
            lakes.run_at_intervals(lake, once, every, stopping, done=done, log=log, keep_for=keep_for)
    if every is None:
        shown = {name: rows for name, rows in summary.tables.items() if not name.startswith("state.")}
        if shown and not settings.json:
            columns = (
                Column("table", lambda name: name),
                Column("rows written", lambda name: count_text(shown[name]), right=True),
                Column("seconds", lambda name: f"{summary.steps.get(name, 0.0):.1f}", right=True),
            )
            out.print_table(columns, shown)
    return QUARANTINED if found else 0


def _line(summary: Any, *, is_dated: bool) -> str:
    at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z run {summary.run}, " if is_dated else ""
    started = f" (and {summary.startup_seconds:.1f} s for starting Spark)" if summary.startup_seconds else ""
    text = f"{at}{summary.source}: {summary.rows_read:,} new rows of the attempt log in {summary.seconds:.1f} s{started}"
    if apart := sum(summary.quarantined.values()):
        said = ", ".join(f"{count:,} {reason}" for reason, count in summary.quarantined.items())
        text += f"; {apart:,} in quarantine: {said}"
    return text


def _stops_at_signals(say: Callable[[str], None]) -> threading.Event:
    """An event that the first signal sets. The second one ends the process at once, which harms no lake."""
    stopping = threading.Event()

    def stop(number: int, _: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        stopping.set()
        say(f"{signal.Signals(number).name}: it ends after this run; once more: at once")

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    return stopping


@pipeline.command()
@option(
    "--waiting-limit", opt.duration, "With --url: a job that is due for longer, unclaimed, is a violation."
)
@_session_options
def audit(settings: Invocation, place: str, waiting_limit: timedelta | None, master: str | None) -> int:
    """Check the guarantees over everything the lake holds, and with --url beside that store; exit with 1 where one was broken."""
    checked = _snapshot(place)
    url = settings.url if settings.given_url or settings.environment_url or settings.app else None
    if url is not None:
        from taskharbor.spark.audit.run import held_source

        _require_store(settings)
        # The environment's store need not be one of this lake. One that is given has to be.
        url = url if settings.given_url or held_source(checked, url) else None
    if waiting_limit is not None and url is None:
        raise click.UsageError("--waiting-limit is about jobs in a store: give its --url")
    with _session(settings, place, master, partial(_has_few_rows, checked)) as (spark, _, show):
        from taskharbor.spark.audit.checks import STORE_KINDS
        from taskharbor.spark.audit.run import audit_lake

        show("audit", 0, 1)
        result = audit_lake(spark, checked, url=url, waiting_limit=waiting_limit)
    if settings.json:
        out.emit({"clean": result.is_clean, **msgspec.to_builtins(result)})
    else:
        screen = out.console()
        broken = out.plural(result.violations, "violation") if result.kinds else "nothing to judge"
        found = "no violation" if result.is_clean else broken
        headline = f"{found} in {out.plural(result.rows, 'row')} of {out.plural(result.jobs, 'job')}"
        screen.print(cell(headline, "bold green" if result.is_clean else "bold red"))
        for kind, count in result.kinds.items():
            screen.print(cell(f"{count:>8,}  {kind}", "red"))
        for one in result.examples:
            screen.print(cell(f"{one.kind}: {one.text}"))
        if result.unchecked:
            missing = "--url of the store" if url is None else "--waiting-limit"
            screen.print(cell(f"not checked without {missing}: {', '.join(result.unchecked)}"))
        for source in result.without_store:
            screen.print(cell(f"not checked of {source} without its --url: {', '.join(STORE_KINDS)}"))
    return 0 if result.is_clean else FAILED


@pipeline.command()
@option("--output -o", opt.FILE, "The page to write.  [default: report.html, in the lake if it is a folder]")
@_session_options
def report(settings: Invocation, place: str, output: Path | None, master: str | None) -> None:
    """Write one HTML page with everything worth seeing. With --url, jobs that wait are counted now, by type."""
    checked = _snapshot(place)
    url = settings.url if settings.given_url or settings.environment_url or settings.app else None
    if url is not None:
        _require_store(settings)
    with _session(settings, place, master, partial(_has_few_rows, checked)) as (spark, _, show):
        from taskharbor.spark.audit import audit_lake
        from taskharbor.spark.report import collect, summary, write_page

        show("audit", 0, 2)
        audited = audit_lake(spark, checked)
        show("report", 1, 2)
        data = collect(spark, checked, audit=audited, url=url)
        folder = Path(checked.lake.place.root) if checked.lake.place.is_folder else Path()
        written = write_page(data, output or folder / "report.html")
    if settings.json:
        out.emit({"report": str(written), "clean": audited.is_clean})
    else:
        out.console().print(summary(data))
        click.echo(f"\nreport: {written}")


@pipeline.command()
@lake_option
def compact(settings: Invocation, place: str) -> None:
    """Make few files of the many small ones that runs leave."""
    lake = lake_at(place)
    from taskharbor.lake.upkeep import compact as compact_lake

    summary = compact_lake(lake)
    before, after = sum(summary.files_before.values()), sum(summary.files_after.values())
    text = f"{before:,} files of {len(summary.files_before)} tables became {after:,}"
    text += "; `taskharbor pipeline vacuum` removes the old ones"
    out.answer(settings, summary, text if before else "nothing to do: every date is in few files already")


@pipeline.command()
@option("--keep-for", opt.duration, "Keep what versions need that are younger, for their readers.", "7d")
@option("--before", click.DateTime(["%Y-%m-%d"]), "Drop the rows of earlier dates.", metavar="DATE")
@lake_option
def vacuum(settings: Invocation, place: str, keep_for: timedelta, before: datetime | None) -> None:
    """Remove files that nothing needs any more."""
    lake = lake_at(place)
    from taskharbor.lake.upkeep import vacuum as vacuum_lake

    summary = vacuum_lake(lake, keep_for=keep_for, before=None if before is None else before.date())
    dropped = f", and {summary.dropped:,} files of earlier dates dropped" if before is not None else ""
    out.answer(settings, summary, f"{summary.files:,} files removed{dropped}")


# -- before ---------------------------------------------------------------------------------------------------


@contextmanager
def _session(
    settings: Invocation,
    place: str,
    master: str | None,
    has_few_rows: Callable[[], bool],
    *,
    is_quiet: bool = False,
) -> Iterator[tuple[Any, Any, out.Show]]:
    """A SparkSession, the lake, and how to show progress. No type is named: no command imports PySpark."""
    lake = lake_at(place)
    with out.progress(settings, on_terminal_only=is_quiet) as show:
        from taskharbor.spark.session import FOR_MILLIONS, local_session

        show("starting Spark", 0, 1)
        fitting = None if has_few_rows() else FOR_MILLIONS
        spark = local_session("taskharbor pipeline", master=master, settings=fitting, archive=True)
        from taskharbor.spark.failures import plain_failures

        def end(*_: object) -> None:
            code = report_error(CommandFailed("interrupted", code=TERMINATED, kind="aborted"), settings)
            # Java and Py4J would each tell at length of the calls and tasks that are cut off.
            if java := getattr(spark.sparkContext._gateway, "proc", None):
                java.kill()
            os._exit(code)

        before = signal.signal(signal.SIGTERM, end)
        try:
            with plain_failures():
                yield spark, lake, show
        finally:
            signal.signal(signal.SIGTERM, before)


def _require_store(settings: Invocation) -> None:
    """Refuse what tasks could not read before Spark starts."""
    from taskharbor.spark.session import require_shared_store

    opt.require_store(settings)
    require_shared_store(settings.url)


def lake_at(place: str) -> Any:
    try:
        from taskharbor.lake.delta import Lake
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            f"{missing.name} is not installed: pip install 'taskharbor[lake]', or [spark]"
        ) from missing
    return Lake(place)


def _snapshot(place: str) -> Any:
    """All tables of the lake, checked before Spark starts: a wrong --lake must not be answered with "no violations"."""
    from taskharbor.spark.session import check

    check()
    return lake_at(place).snapshot()


def _has_few_rows(checked: Any) -> bool:
    from taskharbor.spark.session import FEW_ROWS

    rows: int = sum(checked.record.totals.values())
    return rows <= FEW_ROWS


# -- a log to try it on --------------------------------------------------------------------------------------


@opt.command()
@option("--rows", opt.COUNT, "How many attempts.", 100_000)
@option("--days", opt.COUNT, "Over how many days.", 7)
@option("--seed", int, "The same seed makes the same rows.", 0)
@option("--violations", click.IntRange(min=0), "Break the guarantees about this often.", 0)
@option("--lake", "PLACE", "Run it through this lake.")
@option("--parquet", opt.FOLDER, "Write it below this folder: attempts, queues, planted.")
def history(settings: Invocation, /, lake: str | None, parquet: Path | None, **wanted: int) -> None:
    """Make up a history: --lake, --parquet or --url.

    It looks like production. It is clean, or violations are planted in it.
    """
    places = [str(one) for one in (lake, parquet, settings.given_url) if one is not None]
    if len(places) != 1:
        raise click.UsageError("say where it goes: either --lake DIR, --parquet DIR or --url URL")
    is_store = settings.given_url is not None
    if is_store and wanted["violations"]:
        raise click.UsageError("a store keeps the guarantees: give --violations with --lake or --parquet")
    from taskharbor.spark.session import check, local_session

    if lake is not None:
        lake_at(lake)
    if not is_store:
        check()
    try:
        from taskharbor_testkit.histories.generation import fill_lake, write_parquet
        from taskharbor_testkit.histories.stores import fill_store
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "made-up histories are part of the testkit: pip install 'taskharbor-testkit[histories]'"
        ) from missing

    began, count, apart, rows, seed = time.monotonic(), 0, 0, wanted["rows"], wanted["seed"]
    if is_store:
        rows = asyncio.run(fill_store(settings.url, rows=rows, days=wanted["days"], seed=seed))
    elif lake is not None:
        rows, apart, count = fill_lake(local_session("taskharbor history"), lake, **wanted)
    elif parquet is not None:
        rows, count = write_parquet(local_session("taskharbor history"), parquet, **wanted)
    place, seconds = shown_url(places[0]), time.monotonic() - began
    document = {
        "rows": rows,
        "planted": count,
        "quarantined": apart,
        "seed": seed,
        "seconds": seconds,
        "path": place,
    }
    text = f"{rows:,} attempts, {count:,} violations planted, in {place} ({seconds:.1f} s)"
    text += f"; {apart:,} of the attempts are in quarantine" if apart else ""
    out.answer(settings, out.rounded(document), text)
