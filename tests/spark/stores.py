"""Stores as the tests of the data source see them: through Spark, past Spark, and while others work on them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from records import make_record
from taskharbor.bulk.stage import wall_clock
from taskharbor.client import Client
from taskharbor.demo.analysis import SMALL
from taskharbor.drivers.contract import Ack, Driver, Fail, JobFilter, Settlement
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Failure, JobRecord, JobRequest, JobState

T = TypeVar("T")
MapInArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
BROKEN = Failure("Broken", "it broke")

# -- past Spark ---------------------------------------------------------------------------------------------------


def ask(url: str, work: Callable[[Driver], Awaitable[T]]) -> T:
    async def asked() -> T:
        async with connect(url) as driver:
            return await work(driver)

    return asyncio.run(asked())


def jobs_in(url: str) -> list[JobRecord]:
    page = ask(url, lambda driver: driver.list_jobs(JobFilter(), now=wall_clock(), limit=1_000_000))
    return list(page.jobs)


def payloads(url: str) -> list[int]:
    return sorted(json.loads(job.payload)["n"] for job in jobs_in(url))


def staged_rows(url: str) -> int:
    """Of PostgreSQL rows of a table, else blobs."""
    if not url.startswith("postgres"):
        return len(ask(url, lambda driver: driver.list_blobs("staging")))
    with connected(url) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM staged").fetchall()
    return int(count)


def add(url: str, count: int, *, queue: str = "q", later: int = 0) -> list[str]:
    """Enqueue so many jobs; their ids."""
    records = [make_record(now=wall_clock() + later, queue=queue, payload=b'{"n":1}') for _ in range(count)]
    ask(url, lambda driver: driver.enqueue(records, now=records[0].created_at_us))
    return [record.id for record in records]


def work_off(
    url: str, *, queue: str = "q", later: int = 0, dies: Callable[[JobRecord], bool] = lambda job: False
) -> int:
    """End all jobs that wait, well or not; how many there were."""

    async def work(driver: Driver) -> int:
        count, now = 0, await driver.time() + later
        while held := await driver.reserve(queue, limit=5_000, lease_for=60 * SECOND, now=now, worker="w"):
            ends: list[Settlement] = [
                Fail(job.id, job.token or "", 1, BROKEN) if dies(job) else Ack(job.id, job.token or "")
                for job in held
            ]
            assert await driver.settle(ends, now=now + SECOND) == [None] * len(held)
            count += len(held)
        return count

    return ask(url, work)


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
        return Counter(
            row[0] for row in self.spark.read.parquet(f"{self.folder}/rows").select(name).collect()
        )


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


# -- a PostgreSQL store past its driver ---------------------------------------------------------------------------


def log_row(connection: psycopg.Connection[Any]) -> int:
    """Write a row of the log, which nobody sees before the connection commits; its number."""
    found = connection.execute(
        "INSERT INTO attempts (fence, created_at, run_at, ended_at, queue_id, payload_size, rank, outcome, state, "
        "job_id, type) SELECT 1, 1, 1, %s, id, 0, 0, 0, 4, 'late', 't' FROM queues LIMIT 1 RETURNING seq",
        [wall_clock()],
    ).fetchall()
    return int(found[0][0])


def connected(url: str) -> psycopg.Connection[Any]:
    options = parse_url(url)
    connection = psycopg.connect(options.conninfo)
    connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(options.schema)))
    connection.commit()
    return connection
