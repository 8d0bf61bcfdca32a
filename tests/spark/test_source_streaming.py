"""`spark.readStream.format("taskharbor")`: every row of the log once, across restarts and whatever commits in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark.committers import Committers
from taskharbor.drivers.contract import Ack, Driver, QueueSettings
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, JobRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

DAY = 86_400 * SECOND


def within(url: str, use: Any) -> Any:
    async def run() -> Any:
        async with connect(url) as driver:
            return await use(driver)

    return asyncio.run(run())


def add(url: str, count: int, name: str, *, queue: str = "q", later: int = 0) -> None:
    async def work(driver: Driver) -> None:
        now = await driver.time() + later
        records = [
            JobRecord(id=f"{name}{n}", type="t", queue=queue, run_at_us=now, created_at_us=now)
            for n in range(count)
        ]
        await driver.enqueue(records, now=now)
        held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
        await driver.settle([Ack(job.id, job.token or "") for job in held], now=now)

    within(url, work)


class Reader:
    """A streaming query that keeps what it reads in files, each batch exactly once."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, **options: str) -> None:
        self.spark = spark
        self.folder = folder
        self._options = {"url": url, **options}

    def start(self, **trigger: Any) -> StreamingQuery:
        log = self.spark.readStream.format("taskharbor").options(**self._options).load()
        sink = log.writeStream.format("parquet").option("path", f"{self.folder}/rows")
        return sink.option("checkpointLocation", f"{self.folder}/checkpoint").trigger(**trigger).start()

    def catch_up(self) -> list[int]:
        """Read all that is available now; how many rows each batch had."""
        query = self.start(availableNow=True)
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def seqs(self) -> Counter[int]:
        return Counter(
            row.seq for row in self.spark.read.parquet(f"{self.folder}/rows").select("seq").collect()
        )


def test_a_stream_goes_on_where_it_was_and_takes_no_more_than_it_may(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    urls = {"sqlite": f"sqlite:///{tmp_path}/jobs.db?durability=normal", "postgres": postgres_url}
    for name, url in urls.items():
        add(url, 25, "first")
        reader = Reader(spark, url, tmp_path / name, maxRowsPerBatch="10")
        assert reader.catch_up() == [10, 10, 5]
        add(url, 5, "second")
        add(url, 2, "other", queue="other")
        assert reader.catch_up() == [7]
        assert reader.seqs() == Counter(range(1, 33))


def test_a_stream_can_begin_at_the_end_and_take_one_queue_only(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db?durability=normal"
    add(url, 5, "before")
    query = Reader(spark, url, tmp_path, startingOffsets="latest", queue="mine").start(
        processingTime="0 seconds"
    )
    try:
        # The first look has fixed where it begins.
        query.processAllAvailable()
        add(url, 3, "mine", queue="mine")
        add(url, 3, "yours", queue="yours")
        query.processAllAvailable()
    finally:
        query.stop()
    rows = spark.read.parquet(f"{tmp_path}/rows").collect()
    assert sorted(row.job_id for row in rows) == ["mine0", "mine1", "mine2"]


def test_a_stream_that_history_has_left_behind_says_so(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    url = f"sqlite:///{tmp_path}/jobs.db?durability=normal"
    reader = Reader(spark, url, tmp_path)
    add(url, 5, "read")
    assert reader.catch_up() == [5]
    add(url, 5, "unread")

    async def remove(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    within(url, remove)
    add(url, 2, "new", later=2 * DAY)
    with pytest.raises(
        StreamingQueryException, match="rows of the attempt log after 5 were removed by retention"
    ):
        reader.catch_up()


def test_a_stream_of_jobs_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    reader = Reader(spark, f"sqlite:///{tmp_path}/jobs.db", tmp_path, table="jobs")
    with pytest.raises(StreamingQueryException, match="cannot be read as a stream"):
        reader.catch_up()


def wait_for_rows(query: StreamingQuery) -> None:
    """Until the query has finished a batch that had rows. There is always one: what was let go on is never read before."""
    while not any(progress["numInputRows"] for progress in query.recentProgress):
        assert not query.awaitTermination(timeout=0.05), "the query ended by itself"


@pytest.mark.timeout(600)
def test_eight_committers_and_a_reader_that_is_stopped_at_random_lose_and_double_nothing(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    within(postgres_url, lambda driver: driver.time())
    committers = Committers(postgres_url, jobs=20_000, workers=8, stages=8, seed=seed)
    committers.start()
    try:
        for session in range(committers.stages // 2):
            committers.let()
            # Without a limit a reader comes right up to what is being committed, with one it stays behind.
            limit = {"maxRowsPerBatch": str(dice.randrange(500, 3_000))} if session % 2 else {}
            reader = Reader(spark, postgres_url, tmp_path, **limit)
            query = reader.start(processingTime="0 seconds")
            wait_for_rows(query)
            committers.let()
            # In the middle of whatever comes next.
            query.awaitTermination(timeout=dice.uniform(0, 2))
            query.stop()
        assert reader.seqs()
    finally:
        for _ in range(committers.stages):
            committers.let()
        committers.finish()
    Reader(spark, postgres_url, tmp_path).catch_up()

    seen = Reader(spark, postgres_url, tmp_path).seqs()
    log = within(postgres_url, lambda driver: driver.read_attempts(limit=1_000_000)).attempts
    assert [seq for seq, times in seen.items() if times > 1] == []
    assert set(seen) == {one.seq for one in log}
    assert Counter(one.outcome for one in log)["done"] == 20_000 + len(committers.late)
    assert len(committers.late) > 20
