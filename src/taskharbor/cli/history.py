"""`taskharbor history`: a log that looks like production, to try the pipeline on and to prove the audit with."""

from __future__ import annotations

import time
from pathlib import Path

import click

from taskharbor.cli.output import emit
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.errors import MissingExtra


@click.command()
@click.option(
    "--rows", default=100_000, show_default=True, type=click.IntRange(min=1), help="How many attempts."
)
@click.option("--days", default=7, show_default=True, type=click.IntRange(min=1), help="Over how many days.")
@click.option("--seed", default=0, show_default=True, type=int, help="The same seed makes the same rows.")
@click.option(
    "--violations",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Break the guarantees this often.",
)
@click.option("--lake", type=click.Path(path_type=Path, file_okay=False), help="Run it through this lake.")
@click.option(
    "--parquet",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write it below this folder: attempts, queues, planted.",
)
@shared_options
@click.pass_obj
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
    if (lake is None) == (parquet is None):
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
    if lake is not None:
        count = fill_lake(spark, lake, rows=rows, days=days, seed=seed, violations=violations)
    elif parquet is not None:
        count = write_parquet(spark, parquet, rows=rows, days=days, seed=seed, violations=violations)
    seconds = time.monotonic() - began
    where = str(lake or parquet)
    if settings.json:
        emit({"rows": rows, "planted": count, "seed": seed, "seconds": round(seconds, 3), "path": where})
    else:
        click.echo(f"{rows:,} attempts, {count:,} violations planted, in {where} ({seconds:.1f} s)")
