"""`taskharbor history`: a log that looks like production, to try the pipeline on and to prove the audit with."""

from __future__ import annotations

import time
from pathlib import Path

import click

from taskharbor.cli.options import COUNT, FOLDER, Settings, shared_options
from taskharbor.cli.output import answer, rounded
from taskharbor.errors import MissingExtra


@click.command()
@click.option("--rows", default=100_000, type=COUNT, help="How many attempts.")
@click.option("--days", default=7, type=COUNT, help="Over how many days.")
@click.option("--seed", default=0, type=int, help="The same seed makes the same rows.")
@click.option("--violations", default=0, type=click.IntRange(min=0), help="Break the guarantees this often.")
@click.option("--lake", type=FOLDER, help="Run it through this lake.")
@click.option("--parquet", type=FOLDER, help="Write it below this folder: attempts, queues, planted.")
@shared_options
def history(
    settings: Settings,
    rows: int,
    days: int,
    seed: int,
    violations: int,
    lake: Path | None,
    parquet: Path | None,
) -> None:
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

    spark = local_session("taskharbor history")
    began = time.monotonic()
    write = write_parquet if lake is None else fill_lake
    count = write(spark, folder, rows=rows, days=days, seed=seed, violations=violations)
    seconds = time.monotonic() - began
    document = {"rows": rows, "planted": count, "seed": seed, "seconds": seconds, "path": str(folder)}
    text = f"{rows:,} attempts, {count:,} violations planted, in {folder} ({seconds:.1f} s)"
    answer(settings, rounded(document), text)
