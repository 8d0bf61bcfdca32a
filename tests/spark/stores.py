"""Stores as the tests of the data source see them: through Spark, past Spark, and while others work on them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bulk.stores import within
from drivers.postgres.harness import Raw, held
from records import make_record
from taskharbor.bulk.stage import wall_clock
from taskharbor.client import Client
from taskharbor.demo.analysis import SMALL
from taskharbor.drivers.contract import Ack, Driver, Fail, JobFilter
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.jobs import SECOND, Failure, JobRecord, JobRequest, JobState

MapInArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Dies = Callable[[JobRecord], bool]
BROKEN = Failure("Broken", "it broke")

# -- past Spark ---------------------------------------------------------------------------------------------------


def jobs_in(url: str) -> list[JobRecord]:
    page = within(url, lambda driver: driver.list_jobs(JobFilter(), now=wall_clock(), limit=1_000_000))
    return list(page.jobs)


def payloads(url: str) -> list[int]:
    return sorted(json.loads(job.payload)["n"] for job in jobs_in(url))


def staged_rows(url: str) -> int:
    """Of PostgreSQL rows of a table, else blobs."""
    if not url.startswith("postgres"):
        return len(within(url, lambda driver: driver.list_blobs("staging")))
    with Raw(parse_url(url)) as raw:
        return int(raw.one("SELECT count(*) FROM staged"))


def add(url: str, count: int, *, queue: str = "q", later: int = 0) -> list[str]:
    """Enqueue so many jobs; their ids."""
    records = [make_record(now=wall_clock() + later, queue=queue, payload=b'{"n":1}') for _ in range(count)]
    within(url, lambda driver: driver.enqueue(records, now=records[0].created_at_us - later))
    return [record.id for record in records]


def work_off(url: str, *, queue: str = "q", later: int = 0, dies: Dies = lambda job: False) -> int:
    """End all jobs that wait, well or not; how many there were."""

    async def work(driver: Driver) -> int:
        count, now = 0, await driver.time() + later
        while leased := await driver.reserve(queue, limit=5_000, lease_for=60 * SECOND, now=now, worker="w"):
            ends = [Fail(*held(job), 1, BROKEN) if dies(job) else Ack(*held(job)) for job in leased]
            assert await driver.settle(ends, now=now + SECOND) == [None] * len(leased)
            count += len(leased)
        return count

    return within(url, work)


def enqueue(client: Client, type: str, payloads: Iterable[Any], **options: Any) -> list[str]:
    """Jobs of `worker_app`; their ids."""
    requests = [JobRequest(type=type, payload=one, **options) for one in payloads]
    return [one.id for one in client.enqueue_many(requests)]


def job_counts(client: Client, queue: str = "default") -> dict[JobState, int]:
    (stats,) = client.stats(queue)
    return {state: count for state, count in stats.counts.items() if count}


# -- through Spark ------------------------------------------------------------------------------------------------


@contextmanager
def compiling(spark: SparkSession) -> Iterator[None]:
    """Spark's own defaults instead of settings for few rows."""
    changed = [name for name in SMALL if name != "spark.sql.shuffle.partitions"]
    for name in changed:
        spark.conf.unset(name)
    try:
        yield
    finally:
        for name in changed:
            spark.conf.set(name, SMALL[name])


def load(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("taskharbor").options(url=url, **options).load()


def save(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("taskharbor").options(url=url, **options).mode("append").save()


def below(frame: DataFrame, most: int) -> DataFrame:
    """Those jobs whose payload has a smaller number."""
    return frame.where(f"get_json_object(CAST(payload AS STRING), '$.n') < {most}").select("id")


class LogStream:
    """A streaming query that keeps what it reads in files, each batch exactly once."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, **options: str) -> None:
        self.spark = spark
        self.folder = folder
        self.options = {"url": url, **options}

    def start(self, **trigger: Any) -> StreamingQuery:
        log = self.spark.readStream.format("taskharbor").options(**self.options).load()
        sink = log.writeStream.format("parquet").option("path", f"{self.folder}/rows")
        return sink.option("checkpointLocation", f"{self.folder}/checkpoint").trigger(**trigger).start()

    def catch_up(self) -> list[int]:
        """Read all that is available now; how many rows each batch had."""
        query = self.start(availableNow=True)
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def column(self, name: str = "seq") -> Counter[Any]:
        rows = self.spark.read.parquet(f"{self.folder}/rows").select(name).collect()
        return Counter(row[0] for row in rows)


def dying(*, partition: int, tries: int, killed: bool = False) -> MapInArrow:
    """After two batches, the first tries of a partition raise, or lose their process.

    An inner function travels to Spark's workers by value: they cannot import the tests.
    """

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 2 and context.partitionId() == partition and context.attemptNumber() < tries:
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("this partition does not survive")
            yield batch

    return passed_on
