"""Redis and object stores through the data source: written, read, streamed and triaged by Spark."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskharbor.drivers.contract import Ack, Driver, Fail, QueueSettings, Settlement
from taskharbor.jobs import SECOND, Failure, JobRecord
from taskharbor.requests import new_ids
from taskharbor_testkit.servers.s3 import fresh_s3_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
else:
    pytest.importorskip("pyspark")

from spark.written import ForMapInArrow, ask, jobs_in
from taskharbor.spark.lake.sources import source_name

DAY = 86_400 * SECOND
ROWS = 4_000


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[SparkSession]:
    """So that a partition is many batches, and one that dies has staged some of them."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "250")
    yield spark
    spark.conf.unset(name)


@pytest.fixture(params=["redis", "files", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that has yet to be made. Segments are small, so that there are several."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    if request.param == "s3":
        return f"{fresh_s3_url()}&segment_rows=500"
    return f"file://{tmp_path}/store?segment_rows=500"


def failing_once() -> ForMapInArrow:
    """The first try of partition 1 raises, after two batches. Travels to Spark's workers by value."""

    def passed_on(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 2 and context.partitionId() == 1 and context.attemptNumber() == 0:
                raise RuntimeError("this partition does not survive its first try")
            yield batch

    return passed_on


def load(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("taskharbor").option("url", url).options(**options).load()


def save(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("taskharbor").option("url", url).options(**options).mode("append").save()


async def work_off(driver: Driver) -> int:
    """Every third job dies."""
    count = 0
    now = await driver.time()
    error = Failure("ValueError", "no")
    while held := await driver.reserve("q", limit=500, lease_for=60 * SECOND, now=now, worker="w"):
        ends: list[Settlement] = [
            Ack(job.id, job.token or "")
            if json.loads(job.payload)["n"] % 3
            else Fail(job.id, job.token or "", 1, error)
            for job in held
        ]
        assert await driver.settle(ends, now=now) == [None] * len(ends)
        count += len(held)
    return count


class Stream:
    """A streaming query that keeps what it reads in files."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder

    def catch_up(self) -> list[int]:
        """Read all that is available now; how many rows each batch had."""
        log = self._spark.readStream.format("taskharbor").option("url", self._url)
        rows = log.option("maxRowsPerBatch", "3000").load()
        sink = rows.writeStream.format("parquet").option("path", f"{self._folder}/rows")
        query = sink.option("checkpointLocation", f"{self._folder}/check").trigger(availableNow=True).start()
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def rows(self) -> list[Any]:
        return self._spark.read.parquet(f"{self._folder}/rows").collect()


def test_a_dataframe_becomes_jobs_that_are_read_streamed_and_requeued(
    small_batches: SparkSession, url: str, tmp_path: Path
) -> None:
    spark = small_batches
    numbers = spark.range(0, ROWS, 1, 2).selectExpr("id AS n")
    save(numbers.mapInArrow(failing_once(), "n long"), url, type="t", queue="q")
    assert sorted(json.loads(job.payload)["n"] for job in jobs_in(url)) == list(range(ROWS))

    assert ask(url, work_off) == ROWS
    stream = Stream(spark, url, tmp_path)
    assert stream.catch_up() == [3000, ROWS - 3000]

    dead = load(spark, url, table="jobs", state="dead", queue="q")
    chosen = dead.where("get_json_object(CAST(payload AS STRING), '$.n') < 300").select("id")
    save(chosen, url, mode="requeue")
    # Of those that are done, an object store has most in segments.
    for state in ("dead", "done"):
        some = load(spark, url, table="jobs", state=state)
        save(some.where("get_json_object(CAST(payload AS STRING), '$.n') < 3000"), url, mode="purge")
    (queue,) = load(spark, url, table="queues").collect()
    assert (queue.queue, queue.ready, queue.dead, queue.done) == ("q", 100, 334, 666)
    assert load(spark, url, table="jobs", parallelism="4").count() == 1100

    # A requeue and a second death for each that was requeued.
    assert ask(url, work_off) == 100
    assert stream.catch_up() == [200]
    streamed = Counter(row.seq for row in stream.rows())
    read = Counter(row.seq for row in load(spark, url, table="attempts").select("seq").collect())
    assert streamed == read
    assert len(read) == read.total() == ROWS + 200


def test_a_stream_of_rows_becomes_jobs_once_per_batch(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    source = tmp_path / "source"
    source.mkdir()

    def run() -> None:
        rows = spark.readStream.schema("n long").json(str(source))
        sink = rows.writeStream.format("taskharbor").option("url", url).option("type", "t")
        query = sink.option("checkpointLocation", f"{tmp_path}/check").trigger(availableNow=True).start()
        query.awaitTermination()

    for lot in range(2):
        (source / f"{lot}.json").write_text("\n".join(json.dumps({"n": lot * 50 + n}) for n in range(50)))
        run()
    # As if Spark had died between the commit of the last batch and the note that it is done.
    (tmp_path / "check" / "commits" / "1").unlink()
    (tmp_path / "check" / "commits" / ".1.crc").unlink(missing_ok=True)
    run()
    assert sorted(json.loads(job.payload)["n"] for job in jobs_in(url)) == list(range(100))


def test_a_stream_that_history_has_left_behind_says_so(spark: SparkSession, url: str, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    url = url.replace("segment_rows=500", "segment_rows=3")

    async def add(driver: Driver) -> None:
        now = time.time_ns() // 1000
        await driver.enqueue(
            [
                JobRecord(id=one, type="t", queue="q", payload=b'{"n":1}', run_at_us=now, created_at_us=now)
                for one in new_ids(5)
            ],
            now=now,
        )
        await work_off(driver)

    async def forget(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    stream = Stream(spark, url, tmp_path)
    ask(url, add)
    assert stream.catch_up() == [5]
    ask(url, add)
    ask(url, forget)
    with pytest.raises(
        StreamingQueryException, match=r"attempt log of queue 'q' after .* removed by retention"
    ):
        stream.catch_up()


def test_object_stores_are_told_apart_without_their_secrets() -> None:
    one = "s3://jobs/one?region=r&endpoint=http://minio:9000&access_key_id=me&secret_access_key=hidden"
    assert source_name(one) != source_name(one.replace("/one?", "/two?"))
    assert source_name(one) != source_name(one.replace("minio", "other"))
    assert source_name(one) == source_name(one.replace("hidden", "changed").replace("region=r", "region=s"))
    assert "hidden" not in source_name(one)
    assert source_name("file:///a/b?sync=off") == source_name("file:///a/b/")


def test_stores_of_one_redis_server_are_told_apart_by_their_prefix() -> None:
    one, two = "redis://:secret@host:6379/2?prefix=one:", "redis://:other@host:6379/2?prefix=two:&timeout=3"
    assert source_name(one) != source_name(two)
    assert "secret" not in source_name(one)
    assert source_name(two) == source_name("redis://host:6379/2?prefix=two:")
