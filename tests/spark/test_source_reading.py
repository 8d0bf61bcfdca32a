"""`spark.read.format("taskharbor")`: the tables as DataFrames, found without registration, wrong options named at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskharbor.drivers.contract import Ack, Driver, QueueSettings
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, JobRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DONE = 12_000


async def _fill(driver: Driver) -> None:
    """Jobs of two queues, most of them done, a few waiting."""
    async with driver:
        now = await driver.time()
        await driver.configure("mail", QueueSettings(max_inflight=20_000), now=now)
        records = [
            JobRecord(
                id=f"job{n}",
                type="odd" if n % 2 else "even",
                queue="mail",
                payload=b"{}",
                run_at_us=now,
                created_at_us=now,
            )
            for n in range(DONE)
        ]
        await driver.enqueue(records, now=now)
        held = await driver.reserve("mail", limit=DONE, lease_for=60 * SECOND, now=now, worker="w")
        await driver.settle([Ack(job.id, job.token or "") for job in held], now=now + SECOND)
        waiting = [
            JobRecord(
                id=f"wait{n}", type="t", queue="slow", headers={"n": str(n)}, run_at_us=now, created_at_us=now
            )
            for n in range(3)
        ]
        await driver.enqueue(waiting, now=now)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "postgres":
        from taskharbor_testkit.servers import drop_schema, with_fresh_schema

        address = with_fresh_schema(request.getfixturevalue("postgres_server").url)
    else:
        address = f"sqlite:///{tmp_path_factory.mktemp('store')}/jobs.db?durability=normal"
    asyncio.run(_fill(connect(address)))
    yield address
    if request.param == "postgres":
        drop_schema(address)


def load(spark: SparkSession, url: str, table: str, **options: str) -> DataFrame:
    return spark.read.format("taskharbor").options(url=url, table=table, **options).load()


def test_the_attempt_log_is_read_whole_and_in_parallel(spark: SparkSession, url: str) -> None:
    from pyspark.sql import functions as f

    log = load(spark, url, "attempts", parallelism="4")
    totals = log.groupBy("queue", "outcome", "state", "worker").agg(
        f.count("*").alias("rows"),
        f.countDistinct("job_id").alias("jobs"),
        f.min(f.col("ended_at") - f.col("reserved_at")).alias("took"),
    )
    (row,) = totals.collect()
    assert (row.queue, row.outcome, row.state, row.worker) == ("mail", "done", "done", "w")
    assert (row.rows, row.jobs, row.took.total_seconds()) == (DONE, DONE, 1.0)


def test_jobs_and_queues_are_read(spark: SparkSession, url: str) -> None:
    jobs = {
        (row.queue, row.state): row["count"]
        for row in load(spark, url, "jobs").groupBy("queue", "state").count().collect()
    }
    assert jobs == {("mail", "done"): DONE, ("slow", "ready"): 3}
    queues = {row.queue: row for row in load(spark, url, "queues").collect()}
    assert (queues["mail"].done, queues["mail"].max_inflight, queues["slow"].ready) == (DONE, 20_000, 3)


def test_options_restrict_what_is_read(spark: SparkSession, url: str) -> None:
    waiting = load(spark, url, "jobs", queue="slow", state="ready").collect()
    assert sorted((row.id, row.headers, bytes(row.payload)) for row in waiting) == [
        (f"wait{n}", f'{{"n":"{n}"}}', b"") for n in range(3)
    ]
    odd = load(spark, url, "attempts", type="odd", since="2020-01-01", until="2100-01-01T00:00:00+02:00")
    future = load(spark, url, "attempts", since="2100-01-01")
    assert (odd.count(), future.count()) == (DONE // 2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say which store"),
        ({"url": "memory://here"}, "memory of one process"),
        ({"url": "nothing://here"}, "no installed driver answers to nothing"),
        ({"url": "sqlite:///jobs.db?colour=red"}, "unknown option 'colour'"),
        ({"url": "sqlite:///jobs.db", "colour": "red"}, "unknown option colour: known are url, table"),
        ({"url": "sqlite:///jobs.db", "table": "leases"}, "choose one of attempts, jobs, queues"),
        ({"url": "sqlite:///jobs.db", "state": "happy"}, "choose one of scheduled, ready"),
        ({"url": "sqlite:///jobs.db", "since": "tomorrow"}, "is not a time"),
        ({"url": "sqlite:///jobs.db", "parallelism": "0"}, "whole number above zero"),
        ({"url": "sqlite:///jobs.db", "table": "queues", "type": "t"}, "restricted by the option queue"),
        ({"url": "sqlite:///jobs.db", "startingOffsets": "now"}, "choose earliest or latest"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    from taskharbor.errors import InvalidRequest
    from taskharbor.spark.source import TaskHarborDataSource

    with pytest.raises(InvalidRequest, match=message):
        TaskHarborDataSource(options).schema()


def test_spark_says_what_is_wrong_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="choose one of attempts, jobs, queues"):
        load(spark, "postgresql://me:secret@127.0.0.1:1/jobs", "leases")
    with pytest.raises(AnalysisException, match="schema of its own"):
        spark.read.format("taskharbor").schema("seq long").options(
            url=f"sqlite:///{tmp_path}/jobs.db"
        ).load().count()


def test_a_password_is_in_no_plan_and_no_message(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.errors import AnalysisException

    log = load(spark, "postgresql://me:secret@127.0.0.1:1/jobs", "attempts")
    log.explain("extended")
    with pytest.raises(AnalysisException, match=r"127\.0\.0\.1:1/jobs") as error:
        log.count()
    shown = capsys.readouterr()
    assert "BatchScan taskharbor" in shown.out
    assert "secret" not in str(error.value) + shown.out + shown.err
