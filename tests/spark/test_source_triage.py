"""Requeue, cancel and purge over a DataFrame of ids."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskharbor.drivers.contract import Driver, Fail
from taskharbor.jobs import Failure, JobRecord, JobState
from taskharbor.requests import new_id

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
else:
    pytest.importorskip("pyspark")

from spark.written import ask, jobs_in
from taskharbor.spark.source.triage import Summary, triage

SECOND = 1_000_000


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    given: str = request.getfixturevalue("postgres_url")
    return given


def kill_jobs(url: str, count: int) -> list[str]:
    """Ids of `count` jobs that have died."""
    now = time.time_ns() // 1000

    async def work(driver: Driver) -> list[str]:
        records = [
            JobRecord(id=new_id(), type="t", queue="q", run_at_us=now, created_at_us=now)
            for _ in range(count)
        ]
        await driver.enqueue(records, now=now)
        jobs = await driver.reserve("q", limit=count, lease_for=60 * SECOND, now=now, worker="w")
        ends = [Fail(job.id, job.token or "", 1, Failure("Broken", "it broke")) for job in jobs]
        assert await driver.settle(ends, now=now) == [None] * count
        return [job.id for job in jobs]

    ids: list[str] = ask(url, work)
    return ids


def enqueue(url: str, count: int) -> list[str]:
    now = time.time_ns() // 1000
    records = [
        JobRecord(id=new_id(), type="t", queue="q", run_at_us=now, created_at_us=now) for _ in range(count)
    ]
    ask(url, lambda driver: driver.enqueue(records, now=now))
    return [record.id for record in records]


def states(url: str) -> dict[str, JobState]:
    return {job.id: job.state for job in jobs_in(url)}


def save(spark: SparkSession, ids: list[str], url: str, mode: str) -> None:
    rows: list[Any] = [(job_id,) for job_id in ids]
    frame = spark.createDataFrame(rows, "id string").repartition(2)
    frame.write.format("taskharbor").option("url", url).option("mode", mode).mode("append").save()


def test_dead_jobs_are_requeued_cancelled_and_purged_by_id(spark: SparkSession, url: str) -> None:
    dead = kill_jobs(url, 7)
    save(spark, dead[:3], url, "requeue")
    save(spark, dead[:1], url, "cancel")
    save(spark, [dead[0], *dead[5:]], url, "purge")
    assert states(url) == {
        dead[1]: JobState.READY,
        dead[2]: JobState.READY,
        dead[3]: JobState.DEAD,
        dead[4]: JobState.DEAD,
    }


def test_what_could_not_be_done_is_counted_with_examples_and_the_rest_is_done(
    spark: SparkSession, url: str
) -> None:
    from pyspark.errors import PySparkException

    (dead,), (waiting,) = kill_jobs(url, 1), enqueue(url, 1)
    with pytest.raises(PySparkException) as caught:
        save(spark, [dead, waiting, "nobody"], url, "requeue")
    text = str(caught.value)
    assert "requeue: 1 done (ready 1)" in text
    assert f"1 not, only a dead job can be requeued (e.g. {waiting})" in text
    assert "1 not, no job with this id (never accepted, or removed by retention) (e.g. nobody)" in text
    assert states(url) == {dead: JobState.READY, waiting: JobState.READY}


def test_triage_needs_a_column_of_ids(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    url = f"sqlite:///{tmp_path}/jobs.db"
    frame = spark.range(1)
    writer = frame.write.format("taskharbor").option("url", url).option("mode", "cancel").mode("append")
    with pytest.raises(PySparkException, match="not text"):
        writer.save()
    writer = (
        frame.selectExpr("id AS n").write.format("taskharbor").option("url", url).option("mode", "cancel")
    )
    with pytest.raises(PySparkException, match="takes a column `id`"):
        writer.mode("append").save()


def test_more_ids_than_fit_in_one_batch_are_all_answered(url: str) -> None:
    ids = enqueue(url, 2500)
    answers = triage(url, "cancel", [*ids, "nobody"])
    assert answers[:-1] == [JobState.CANCELLED] * 2500
    summary = Summary("cancel", answers)
    assert summary.done.total() == 2500
    assert "2500 done (cancelled 2500); 1 not" in str(summary)
    assert len(triage(url, "purge", ids)) == 2500
    assert states(url) == {}
