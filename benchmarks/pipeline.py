"""The pipeline over made-up histories: beside one DuckDB process that makes the same tables and checks, how its time grows with
the rows, and what a little more costs once much is there.

The histories are written to Parquet beforehand and not counted. A cold figure is of a new process, without Spark's start; before
the others a small run warms the Java machine. `python -m benchmarks.pipeline LOG LAKE STEPS` is the process of a cold figure.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow import parquet

from benchmarks.measure import Figure, Series
from taskharbor.spark.lake import Lake, Objective, RunSummary, run_pipeline
from taskharbor.spark.session import FEW_ROWS, FOR_MILLIONS, local_session

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


# -- beside DuckDB, cold -------------------------------------------------------------------------------------------

_SQL = Path(__file__).parent / "sql"


def _duckdb(log: Path) -> tuple[float, float]:
    """Seconds for the tables, and for the checks, in one process with two threads."""
    import duckdb

    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.read_parquet(f"{log}/*.parquet").create_view("log")
        times = [time.perf_counter()]
        for name in ("pipeline_tables.sql", "pipeline_audit.sql"):
            for statement in filter(str.strip, (_SQL / name).read_text("utf-8").split(";\n")):
                connection.execute(statement).fetchall()
            times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def _child(log: str, place: str, steps: str) -> None:
    """Run, audit and report, or only a run over few new rows, and print the seconds of each."""
    from taskharbor.spark.audit import audit_lake
    from taskharbor.spark.report import collect

    has_few = steps == "run" or parquet.ParquetDataset(log).read(columns=[]).num_rows <= FEW_ROWS
    times = [time.perf_counter()]
    spark = local_session(
        "benchmarks",
        settings=None if has_few else FOR_MILLIONS,
        archive="XDG_CACHE_HOME" in os.environ,
    )
    times.append(time.perf_counter())
    lake = Lake(place)
    _run(spark, lake, spark.read.parquet(log))
    times.append(time.perf_counter())
    if steps == "all":
        result = audit_lake(spark, lake)
        assert result.is_clean
        times.append(time.perf_counter())
        collect(spark, lake, audit=result)
        times.append(time.perf_counter())
    print(json.dumps([after - before for before, after in pairwise(times)]))


def _in_new_process(log: DataFrame, place: Path, cache: Path | None, steps: str = "all") -> list[float]:
    """The seconds of start, run, audit and report. `cache`: the folder for the archive of Java's classes."""
    (path,) = {str(Path(name.removeprefix("file://")).parent) for name in log.inputFiles()}
    command = [sys.executable, "-m", "benchmarks.pipeline", path, str(place), steps]
    environment = os.environ | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


@functools.cache
def _cold(rows: int, *, archive: bool = True) -> tuple[list[float], tuple[float, float]]:
    """Start, run, audit and report in a new process; and what DuckDB takes right after. With an archive of Java's classes that an
    earlier process left, as the command finds one."""
    with _history(_spark()[0], rows) as log, _folder() as place:
        times = _in_new_process(log, place, _archive() if archive else None)
        return times, _duckdb(Path(log.inputFiles()[0].removeprefix("file://")).parent)


@functools.cache
def _archive() -> Path:
    """A cache folder with the archive that a process left when it ended."""
    cache = Path(tempfile.mkdtemp(prefix="taskharbor-archive-"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    with _history(_spark()[0], 3_500) as log, _folder() as place:
        _in_new_process(log, place, cache)
    # Only one that has been there for a while is taken, since Java may still be at it.
    for draft in cache.glob("taskharbor/*.jsa.*"):
        os.utime(draft, (0, 0))
    return cache


def cold(rows: int, goal: float, *, audit: bool = False) -> Figure:
    """A run, or an audit, against DuckDB."""
    times, limits = _cold(rows)
    what = "audit" if audit else "pipeline run"
    return Figure(
        name=f"{what} of {rows:,} attempts, cold, against DuckDB",
        ours=Series("Spark, without its start", "s", [times[1 + audit]]),
        limit=Series("DuckDB", "s", [limits[audit]]),
        goal=goal,
        higher_is_better=False,
        facts={"start of Spark": f"{times[0]:.1f} s"},
    )


def fixed_cost(goal: float, *, archive: bool) -> Figure:
    """Start, run, audit and report of a few rows, as in the demo."""
    times, _ = _cold(3_500, archive=archive)
    return Figure(
        name=f"start, run, audit and report of 3,500 attempts, {'with' if archive else 'without'} an archive of classes",
        ours=Series("all together", "s", [sum(times)]),
        limit=Series("one second", "s", [1.0]),
        goal=goal,
        higher_is_better=False,
        facts={name: f"{seconds:.1f} s" for name, seconds in zip(_PARTS, times, strict=True)},
    )


_PARTS = ("start", "run", "audit", "report")


def few(rows: int, *, scattered: bool, cold: bool) -> Figure:
    """1,000 new attempts on top of many: the newest ones, or from all over the history. In a warm session, or with the start of a
    new one, without an archive of classes."""
    from pyspark.sql import functions as F

    spark, _ = _spark()
    with _history(spark, rows) as log, _lake() as lake, _folder() as folder:
        (last,) = log.selectExpr(f"percentile_approx(seq, {1 - 1000 / rows}, {MILLION})").head()  # type: ignore[misc]
        is_new = F.pmod(F.hash("job_id"), F.lit(rows // 1000)) == 0 if scattered else F.col("seq") > last
        # What is new gets higher numbers than all the rest.
        late = F.when(is_new, F.col("seq") + F.lit(2**60)).otherwise(F.col("seq"))
        log.withColumn("seq", late).write.parquet(str(folder / "log"))
        numbered = spark.read.parquet(str(folder / "log"))
        before = _run(spark, lake, numbered.where(f"seq < {2**60}"))
        if cold:
            seconds = sum(_in_new_process(numbered, Path(lake.place.root), None, "run"))
        else:
            seconds = _run(spark, lake, numbered).seconds
        new = sum(lake.record().totals.values()) - before.rows_read
    assert 900 < new < 1100, new
    goals = {(False, False): 5, (False, True): 10, (True, False): 20, (True, True): 30}
    return Figure(
        name=f"1,000 new attempts, {'scattered' if scattered else 'recent'}, on {rows:,}, {'cold' if cold else 'warm'}",
        ours=Series("the start and the second run" if cold else "the second run", "s", [seconds]),
        limit=Series("one second", "s", [1.0]),
        goal=goals[cold, scattered],
        higher_is_better=False,
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    if quick:
        return [
            lambda: fixed_cost(25, archive=False),
            lambda: cold(60_000, 60),
            lambda: growth(60_000, 20_000, 3.3),
            lambda: increment(60_000),
        ]
    return [
        lambda: fixed_cost(25, archive=False),
        lambda: fixed_cost(15, archive=True),
        lambda: cold(MILLION, 15),
        lambda: cold(MILLION, 15, audit=True),
        lambda: cold(10 * MILLION, 8),
        *(
            partial(few, MILLION, scattered=scattered, cold=cold)
            for scattered in (False, True)
            for cold in (False, True)
        ),
        lambda: growth(3 * MILLION, MILLION, 3.3),
        lambda: growth(10 * MILLION, MILLION, 11),
        lambda: increment(10 * MILLION),
    ]


if __name__ == "__main__":
    _child(*sys.argv[1:])
