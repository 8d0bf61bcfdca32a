"""`df.write` and `df.writeStream`: exactly the DataFrame's rows become jobs, whatever happens to the tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from needing import need
from taskharbor.jobs import to_micros
from taskharbor.spark.session import SparkUnavailable, check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
else:
    pytest.importorskip("pyspark")

from spark.two_hosts import two_hosts
from spark.written import ask, dying_midway, jobs_in, never_ending_well, staged_rows

ROWS = 12_000
PARTITIONS = 4


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    given: str = request.getfixturevalue("postgres_url")
    return given


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[SparkSession]:
    """So that a partition is many batches, and one that dies has staged some of them."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "500")
    yield spark
    spark.conf.unset(name)


def save(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("taskharbor").option("url", url).options(**options).mode("append").save()


def payloads(url: str) -> list[int]:
    return sorted(json.loads(job.payload)["n"] for job in jobs_in(url))


def test_every_row_becomes_a_job_with_the_fields_its_columns_name(spark: SparkSession, url: str) -> None:
    rows = spark.sql(
        "SELECT 'mail' AS type, 'a' AS queue, timestamp'2030-01-01 00:00:00' AS run_at, 7 AS priority, "
        "       map('h', 'x') AS headers, 1.5 AS timeout, named_struct('to', array('b', 'c')) AS payload "
        "UNION ALL SELECT 'sms', NULL, NULL, NULL, NULL, NULL, named_struct('to', array('d'))"
    )
    save(rows, url, queue="fallback", max_attempts="2")
    mail, sms = sorted(jobs_in(url), key=lambda job: job.type)
    assert (mail.queue, mail.priority, mail.headers) == ("a", 7, {"h": "x"})
    assert mail.run_at_us == to_micros(datetime(2030, 1, 1, tzinfo=UTC))
    assert (mail.timeout_us, mail.max_attempts) == (1_500_000, 2)
    assert json.loads(mail.payload) == {"to": ["b", "c"]}
    assert (sms.queue, sms.priority, json.loads(sms.payload)) == ("fallback", 0, {"to": ["d"]})


def test_tasks_that_die_midway_add_nothing_twice_and_lose_nothing(
    small_batches: SparkSession, url: str
) -> None:
    rows = small_batches.range(0, ROWS, 1, PARTITIONS).selectExpr("id AS n")
    save(rows.mapInArrow(dying_midway(), "n long"), url, type="t")
    assert payloads(url) == list(range(ROWS))
    assert staged_rows(url) == 0


def test_jobs_run_in_the_order_of_the_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    save(spark.range(0, 300, 1, 5).selectExpr("id AS n").coalesce(3), url, type="t")
    claimed = ask(
        url,
        lambda driver: driver.reserve(
            "default", limit=300, lease_for=1_000_000, now=time.time_ns() // 1000, worker="w"
        ),
    )
    assert [json.loads(job.payload)["n"] for job in claimed] == list(range(300))


def test_an_aborted_write_leaves_no_job_and_nothing_staged(small_batches: SparkSession, url: str) -> None:
    from pyspark.errors import PySparkException

    rows = small_batches.range(0, ROWS, 1, PARTITIONS).selectExpr("id AS n")
    with pytest.raises(PySparkException, match="never survives"):
        save(rows.mapInArrow(never_ending_well(), "n long"), url, type="t")
    assert jobs_in(url) == []
    assert staged_rows(url) == 0


def test_a_row_that_cannot_be_a_job_fails_the_write_with_the_reason_and_the_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException

    url = f"sqlite:///{tmp_path}/jobs.db"
    rows = spark.sql("SELECT if(id = 77, '{oops', '{}') AS payload, 't' AS type FROM range(0, 100, 1, 2)")
    with pytest.raises(PySparkException) as caught:
        save(rows, url)
    assert "the payload is no JSON" in str(caught.value)
    assert "payload='{oops'" in str(caught.value)
    assert jobs_in(url) == []
    assert staged_rows(url) == 0


def test_what_is_wrong_with_the_write_is_said_before_a_task_runs(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    rows = spark.range(1)
    url = f"sqlite:///{tmp_path}/jobs.db"
    for options, reason in (
        ({}, "of what type"),
        ({"type": "t", "prioritty": "1"}, "unknown option prioritty"),
        ({"type": "t", "mode": "delete"}, "choose enqueue"),
    ):
        with pytest.raises(PySparkException, match=reason):
            save(rows, url, **options)
    with pytest.raises(PySparkException, match="only ever added"):
        rows.write.format("taskharbor").option("url", url).option("type", "t").mode("overwrite").save()
    with pytest.raises(PySparkException, match="memory of one process"):
        save(rows, "memory://", type="t")
    assert not (tmp_path / "jobs.db").exists()


def test_a_batch_of_a_stream_that_is_done_over_is_published_once(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()

    def run(first: int, count: int) -> None:
        if count:
            lines = "\n".join(json.dumps({"n": n}) for n in range(first, first + count))
            (source / f"{first}.json").write_text(lines)
        stream = spark.readStream.schema("n long").json(str(source))
        query = (
            stream.writeStream.format("taskharbor")
            .option("url", url)
            .option("type", "t")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run(0, 30)
    run(30, 20)
    latest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    assert latest == 1
    # As if Spark had died after the jobs were published and before it took note of it.
    for path in (checkpoint / "commits").iterdir():
        if path.name in (str(latest), f".{latest}.crc"):
            path.unlink()
    run(50, 0)
    assert payloads(url) == list(range(50))
    run(50, 5)
    assert payloads(url) == list(range(55))
    assert staged_rows(url) == 0


@pytest.mark.timeout(400)
def test_of_a_task_that_runs_twice_at_once_only_one_copy_counts(postgres_url: str, tmp_path: Path) -> None:
    """On a cluster of its own, with speculation on: Spark starts a second copy of the straggler, and a task dies as well."""
    try:
        check()
    except SparkUnavailable as error:
        need(str(error))
    urls = [postgres_url, f"sqlite:///{tmp_path}/jobs.db"]
    program = Path(__file__).with_name("speculating_app.py")
    with two_hosts(tmp_path) as master:
        done = subprocess.run(
            [sys.executable, str(program), master, str(tmp_path), str(ROWS), *urls],
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-5000:]
    for number, url in enumerate(urls):
        for partition in (1, 3):
            assert len(list((tmp_path / str(number)).glob(f"{partition}.*"))) >= 2
        assert payloads(url) == list(range(ROWS))
        assert staged_rows(url) == 0
