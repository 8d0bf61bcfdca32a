"""The pipeline over made-up histories: how its time grows with the rows, and what a little more costs once much is there.

The histories are written to Parquet beforehand and not counted; neither is the start of Spark, nor a small first run, in which
the Java machine warms up.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import Figure, Series
from taskharbor.spark.lake import Lake, Objective, RunSummary, run_pipeline
from taskharbor.spark.session import FOR_MILLIONS, local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MILLION = 1_000_000
WARM_UP_ROWS = 20_000
_OBJECTIVES = [Objective(name="soon", kind="wait", threshold_ms=60_000)]


@functools.cache
def _spark() -> tuple[SparkSession, float]:
    began = time.perf_counter()
    spark = local_session("benchmarks", settings=FOR_MILLIONS)
    started = time.perf_counter() - began
    with _history(spark, WARM_UP_ROWS) as rows, _lake() as lake:
        _run(spark, lake, rows)
    return spark, started


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="taskharbor-pipeline-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lake() -> Iterator[Lake]:
    with _folder() as folder:
        yield Lake(folder)


@contextmanager
def _history(spark: SparkSession, rows: int) -> Iterator[DataFrame]:
    """A history as a log: numbered in the order in which things ended."""
    from pyspark.sql import functions as F

    from taskharbor_testkit.histories import generate

    with _folder() as folder:
        attempts, _ = generate(spark, rows=rows, seed=1)
        in_order = attempts.orderBy("ended_at").withColumn("seq", F.monotonically_increasing_id() + 1)
        in_order.write.parquet(str(folder / "log"))
        yield spark.read.parquet(str(folder / "log"))


def _run(spark: SparkSession, lake: Lake, rows: DataFrame) -> RunSummary:
    return run_pipeline(spark, lake, rows, name="benchmark", objectives=_OBJECTIVES)


@functools.cache
def _full(rows: int) -> tuple[float, float, str]:
    """Seconds for all but the newest 1% of the rows, then for that 1%, and the memory that was needed at most."""
    spark, _ = _spark()
    with _history(spark, rows) as log, _lake() as lake:
        (last,) = log.selectExpr(f"percentile_approx(seq, 0.99, {MILLION})").head()  # type: ignore[misc]
        _forget_peaks(spark)
        most = _run(spark, lake, log.where(f"seq <= {last}"))
        rest = _run(spark, lake, log)
        assert most.rows_read + rest.rows_read == log.count()
        return most.seconds, rest.seconds, _peaks(spark)


def _driver_pids(spark: SparkSession) -> dict[str, str]:
    gateway = spark.sparkContext._gateway
    return {"Python": "self", "Java": str(gateway.proc.pid)} if gateway is not None else {}


def _forget_peaks(spark: SparkSession) -> None:
    for pid in _driver_pids(spark).values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peaks(spark: SparkSession) -> str:
    """What the driver's two processes needed at most since the peaks were forgotten."""
    found = []
    for name, pid in _driver_pids(spark).items():
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if peak is not None:
            found.append(f"{name} {int(peak[1]) / 1024:,.0f} MiB")
    return ", ".join(found)


def growth(rows: int, base: int, goal: float) -> Figure:
    """Time for many rows against time for few."""
    many, _, many_peak = _full(rows)
    few, _, few_peak = _full(base)
    return Figure(
        name=f"pipeline over {rows:,} attempts, against {base:,}",
        ours=Series(f"{rows:,} attempts", "s", [many]),
        limit=Series(f"{base:,} attempts", "s", [few]),
        goal=goal,
        higher_is_better=False,
        facts={
            "start of Spark": f"{_spark()[1]:.1f} s",
            f"memory for {base:,}": few_peak,
            f"memory for {rows:,}": many_peak,
        },
    )


def increment(rows: int) -> Figure:
    """A run over 1% more rows, against the run over the 99% that were there."""
    most, rest, _ = _full(rows)
    return Figure(
        name=f"pipeline, 1% new rows on top of {rows:,}",
        ours=Series("the newest 1%", "s", [rest]),
        limit=Series("all before", "s", [most]),
        goal=0.1,
        higher_is_better=False,
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    if quick:
        return [lambda: growth(60_000, 20_000, 3.3), lambda: increment(60_000)]
    return [
        lambda: growth(3 * MILLION, MILLION, 3.3),
        lambda: growth(10 * MILLION, MILLION, 11),
        lambda: increment(10 * MILLION),
    ]
