"""The pipeline from end to end: real queues, runs in pieces, runs that are killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark.lake_history import OBJECTIVES, history
from taskharbor import Harbor
from taskharbor.client import Client
from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake import Lake, run_pipeline
from taskharbor.spark.lake.run import STEPS, RunSummary
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS, TABLES

CHILD = Path(__file__).with_name("lake_child.py")
JOBS = 120


class Crash(BaseException):
    """Ends a run as an interrupt would: past whatever catches exceptions."""


def contents(spark: SparkSession, lake: Lake) -> dict[str, Counter[str]]:
    """All rows of silver and gold, but for the number of the run that first saw a job."""
    return {
        table: Counter(str(row) for row in lake.read(spark, table).drop("first_seen_run").collect())
        for table in TABLES
        if table.startswith(("silver.", "gold."))
    }


def frame(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    return spark.createDataFrame(list(rows), ATTEMPT_COLUMNS).coalesce(1)


@pytest.mark.timeout(600)
def test_runs_that_are_killed_and_repeated_add_up_to_one_undisturbed_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two increments, killed at random steps: the first in a process that really dies, the second before and after its commit."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    rows = history(JOBS, rng.randrange(2**32), days=0.3)
    cut = rng.randrange(1, len(rows))
    dies, crashes = rng.choice(STEPS[2:-1]), rng.choice(STEPS[2:-1])
    print("cut", cut, "killed at", dies, crashes)

    def run(lake: Lake, cut: int, doomed: str = "") -> RunSummary:
        log = frame(spark, rows[:cut])
        return run_pipeline(spark, lake, log, name="log", objectives=OBJECTIVES, progress=crash_at(doomed))

    whole, pieces = Lake(tmp_path / "whole"), Lake(tmp_path / "pieces")
    with dying_for_real(tmp_path, pieces, rows[:cut], dies):
        run(whole, len(rows))
    assert pieces.manifest().number == 0
    assert run(pieces, cut).rows_read == cut
    first = pieces.manifest()
    with pytest.raises(Crash):
        run(pieces, len(rows), crashes)
    assert pieces.manifest() == first
    # After the commit: the run stands, and repeating it adds nothing.
    with pytest.raises(Crash):
        run(pieces, len(rows), "done")
    assert pieces.manifest() != first
    assert run(pieces, len(rows)).rows_read == 0
    expected, found = contents(spark, whole), contents(spark, pieces)
    for table in expected:
        assert found[table] == expected[table], f"{table} differs (seed {seed})"
    assert sum(expected["silver.attempts"].values()) == len(rows)
    assert sum(expected["silver.lifecycles"].values()) == JOBS
    assert sum(expected["gold.objectives"].values()) > 0


def crash_at(doomed: str) -> Any:
    def progress(step: str, number: int, steps: int) -> None:
        if step == doomed:
            raise Crash

    return progress


@contextmanager
def dying_for_real(folder: Path, lake: Lake, rows: Sequence[dict[str, Any]], step: str) -> Iterator[None]:
    """The same run in another process, which starts beside the block and is gone without a word at this step."""
    log = folder / "rows.json"
    log.write_text(json.dumps(list(rows), default=lambda when: when.isoformat()))
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(lake.path), str(log), step],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield
            _, errors = child.communicate(timeout=170)
        finally:
            child.kill()
    assert child.returncode == 9, errors[-2000:]


def busy_queue(url: str) -> Client:
    """A queue on which a worker did all there is to do: jobs that end well, that fail first, that die, that are cancelled."""
    harbor = Harbor(url)

    @harbor.job(name="fine")
    async def fine(n: int) -> None: ...

    @harbor.job(name="doomed", max_attempts=1)
    async def doomed(n: int) -> None:
        raise ValueError(f"no {n}")

    fine.enqueue_many([(n,) for n in range(30)])
    doomed.enqueue_many([(n,) for n in range(5)])
    harbor.worker(until_empty=True).run()
    harbor.close()
    return Client(url)


def check_lake_against(client: Client, spark: SparkSession, lake: Lake) -> None:
    (stats,) = client.stats()
    lives = Counter(row.state for row in lake.read(spark, "silver.lifecycles").collect())
    assert lives == {state.value: count for state, count in stats.counts.items() if count}
    hours = (
        lake.read(spark, "gold.hours").groupBy("type").sum("arrivals", "completions", "failures").collect()
    )
    assert {row[0]: tuple(row)[1:] for row in hours} == {"fine": (30, 30, 0), "doomed": (5, 0, 5)}
    assert [(row.fingerprint, row["count"]) for row in lake.read(spark, "gold.errors").collect()] == [
        ("no <n>", 5)
    ]
    ends = lake.read(spark, "gold.backlog").orderBy("minute").collect()
    assert ends[-1].waiting == 0
    assert lake.read(spark, "bronze.queues").first().done == stats.counts["done"]  # type: ignore[index,union-attr]


def test_a_postgres_queue_comes_into_the_lake_as_it_was(
    compiled_spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    spark = compiled_spark
    with busy_queue(postgres_url) as client:
        lake = Lake(tmp_path)
        assert run_pipeline(spark, lake, postgres_url).rows_read == 35
        check_lake_against(client, spark, lake)
        assert run_pipeline(spark, lake, postgres_url).rows_read == 0
        check_lake_against(client, spark, lake)
    (source,) = lake.manifest().cursors
    assert "@" not in source


def test_a_store_in_the_memory_of_one_process_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="use one they all can reach"):
        run_pipeline(spark, Lake(tmp_path), "memory://somewhere")
