"""`spark.read.format("taskharbor")` and `spark.readStream`: tables as they are, and every row of the log once. And every kind of
store through the data source: written, read, streamed and triaged."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from bulk.stores import within
from drivers.postgres.harness import Raw, log_row
from records import make_record
from spark.histories import life_on
from spark.stores import LogStream, add, below, dying, jobs_in, load, payloads, save, staged_rows, work_off
from taskharbor.broker.tokens import parse_token
from taskharbor.bulk import publish_staged
from taskharbor.bulk.stage import new_write
from taskharbor.bulk.store import open_store
from taskharbor.drivers.contract import DAY, Driver, QueueSettings
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake.run import source_name
from taskharbor.spark.source import TaskHarborDataSource
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.servers.s3 import fresh_s3_url

STORE = {"url": "sqlite:///jobs.db"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say which store"),
        ({"url": "memory://here"}, "memory of one process"),
        ({"url": "nothing://here"}, "no installed driver answers to nothing"),
        (STORE | {"colour": "red"}, "unknown option colour: known are url, queue"),
        (STORE | {"table": "leases"}, "choose attempts or jobs or queues"),
        (STORE | {"state": "happy"}, "choose scheduled or ready"),
        (STORE | {"since": "tomorrow"}, "is not a time"),
        (STORE | {"parallelism": "0"}, "a whole number between 1 and"),
        (STORE | {"table": "queues", "type": "t"}, "restricted by the option queue"),
        (STORE | {"startingOffsets": "now"}, "choose earliest or latest"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TaskHarborDataSource(options).schema()


def test_tables_that_change_are_no_streams_and_have_schemas_of_their_own() -> None:
    source = TaskHarborDataSource(STORE | {"table": "jobs"})
    with pytest.raises(InvalidRequest, match="cannot be read as a stream"):
        source.streamReader(source.schema())
    with pytest.raises(InvalidRequest, match="schema of its own"):
        source.reader(StructType())


@pytest.mark.parametrize("hidden", ["postgresql://me:secret@127.0.0.1:1/jobs", "http://secret@127.0.0.1:1"])
def test_a_secret_is_in_no_plan(spark: SparkSession, capsys: pytest.CaptureFixture[str], hidden: str) -> None:
    """Nor in a message. Spark says what is wrong before anything runs."""
    with pytest.raises(AnalysisException, match="choose attempts or jobs or queues") as wrong:
        load(spark, hidden, table="leases")
    log = load(spark, hidden)
    log.explain("extended")
    plan: Any = log._jdf.queryExecution()
    with pytest.raises(AnalysisException, match=r"127\.0\.0\.1:1") as nobody:
        log.count()
    shown = capsys.readouterr()
    assert "BatchScan taskharbor" in shown.out
    assert "secret" not in str(wrong.value) + str(nobody.value) + shown.out + shown.err + plan.toString()


# -- the attempt log as a stream ----------------------------------------------------------------------------------


def test_a_stream_that_history_left_behind_says_so(spark: SparkSession, tmp_path: Path, url: str) -> None:
    """It takes no more than it may."""
    stream = LogStream(spark, url, tmp_path, maxRowsPerBatch="10")
    add(url, 25)
    work_off(url)
    assert stream.catch_up() == [10, 10, 5]

    async def forget(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    add(url, 5)
    work_off(url)
    within(url, forget)
    add(url, 2, later=2 * DAY)
    work_off(url, later=2 * DAY)
    with pytest.raises(StreamingQueryException, match="attempt log after 25 were removed by retention"):
        stream.catch_up()


def test_a_stream_of_one_queue_can_begin_at_the_end(spark: SparkSession, tmp_path: Path, url: str) -> None:
    add(url, 5)
    work_off(url)
    stream = LogStream(spark, url, tmp_path, startingOffsets="latest", queue="mine")
    query = stream.start(processingTime="0 seconds")
    try:
        # The first look has fixed where it begins.
        query.processAllAvailable()
        mine = add(url, 3, queue="mine")
        add(url, 3, queue="yours")
        work_off(url, queue="mine")
        work_off(url, queue="yours")
        query.processAllAvailable()
    finally:
        query.stop()
    assert stream.column("job_id") == Counter(mine)


def read_for_a_while(query: StreamingQuery, seconds: Any) -> None:
    """Until the query has finished a batch that had rows, and then for so long: it is stopped in the middle of whatever."""
    moment: Any = 0.05
    while not any(progress["numInputRows"] for progress in query.recentProgress):
        assert not query.awaitTermination(moment), "the query ended by itself"
    query.awaitTermination(seconds)
    query.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stages", "steps"), [(2, 20), pytest.param(8, 100, marks=pytest.mark.slow)])
async def test_eight_committers_and_a_reader_that_is_stopped_at_random_lose_and_double_nothing(
    spark: SparkSession, tmp_path: Path, postgres_url: str, stages: int, steps: int
) -> None:
    """Some rows are written early and committed late."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    late: list[int] = []
    async with life_on(postgres_url, seed, 8) as life:
        await life.live(1)
        with Raw(parse_url(postgres_url)) as one, Raw(parse_url(postgres_url)) as other:
            for stage in range(stages):
                await life.live(steps)
                # Without a limit a reader comes right up to what is being committed, with one it stays behind.
                limit = {"maxRowsPerBatch": str(dice.randrange(10, 100))} if stage % 2 else {}
                query = LogStream(spark, postgres_url, tmp_path, **limit).start(processingTime="0 seconds")
                reading = asyncio.create_task(asyncio.to_thread(read_for_a_while, query, dice.uniform(0, 2)))
                while not reading.done():
                    # Each row is committed when the next one is written and others have committed theirs.
                    one("BEGIN")
                    late.append(log_row(one))
                    await life.live(2)
                    other("COMMIT")
                    one, other = other, one
                    await asyncio.wait([reading], timeout=0.1)
                await reading
            other("COMMIT")
        log, _ = await life.told()
    stream = LogStream(spark, postgres_url, tmp_path)
    stream.catch_up()
    assert stream.column() == Counter(one.seq for one in log)
    assert set(late) <= set(stream.column())
    assert len(log) > 8 * stages


# -- every kind of store ------------------------------------------------------------------------------------------

TOKEN = "hidden-from-everybody-0123456789"
ROWS = 1_200


@pytest.fixture
def broker_url(tmp_path: Path) -> Iterator[str]:
    """Of a broker that wants a token and takes small batches, in front of an SQLite file."""
    store, tokens = f"sqlite:///{tmp_path}/jobs.db?durability=normal", (parse_token(f"spark:admin:{TOKEN}"),)
    with running_broker(store, tokens=tokens, max_batch=1000) as address:
        yield address.replace("://", f"://{TOKEN}@")


KINDS = ["sqlite", "postgres", "redis", "files", "broker", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that has yet to be made. Segments are small, so that there are several."""
    if request.param == "s3":
        return f"{fresh_s3_url()}&segment_rows=150"
    files = {"sqlite": f"sqlite:///{tmp_path}/jobs.db", "files": f"file://{tmp_path}/store?segment_rows=150"}
    found: str = files.get(request.param) or request.getfixturevalue(f"{request.param}_url")
    return found


def test_a_dataframe_becomes_jobs_that_are_read_streamed_and_requeued(
    small_batches: SparkSession, any_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "taskharbor")
    spark = small_batches
    frame = spark.range(0, ROWS, 1, 2).selectExpr("id AS n")
    frame = frame.mapInArrow(dying(partition=0, tries=2, killed=True), "n long")
    save(frame.mapInArrow(dying(partition=1, tries=1), "n long"), any_url, type="t", queue="q")
    assert (payloads(any_url), staged_rows(any_url)) == (list(range(ROWS)), 0)
    assert work_off(any_url, dies=lambda job: json.loads(job.payload)["n"] % 3 == 0) == ROWS
    log = load(
        spark, any_url, type="t", since="2020-01-01", until="2100-01-01T00:00:00+02:00", parallelism="4"
    )
    (ends,) = log.agg(F.countDistinct("job_id"), F.min(F.col("ended_at") - F.col("reserved_at"))).collect()
    # A broker has a clock of its own.
    assert (ends[0], timedelta(0) < ends[1] <= timedelta(seconds=1)) == (ROWS, True)
    assert [load(spark, any_url, **{name: "none"}).count() for name in ("type", "queue")] == [0, 0]
    stream = LogStream(spark, any_url, tmp_path / "stream", maxRowsPerBatch="1000")
    assert stream.catch_up() == [1000, ROWS - 1000]

    save(below(load(spark, any_url, table="jobs", state="dead", queue="q"), 90), any_url, mode="requeue")
    # Of those that are done, an object store has most in segments.
    save(below(load(spark, any_url, table="jobs", state="done", parallelism="4"), 900), any_url, mode="purge")
    (queue,) = load(spark, any_url, table="queues").collect()
    assert (queue.queue, queue.ready, queue.dead, queue.done, queue.done_total) == ("q", 30, 370, 200, 800)

    # A requeue and an end for each that was requeued.
    assert work_off(any_url) == 30
    assert stream.catch_up() == [60]
    read = Counter(one.seq for one in load(spark, any_url).collect())
    assert stream.column() == read
    assert len(read) == read.total() == ROWS + 60
    # Neither offsets nor logs tell whose they are.
    written = (path for path in stream.folder.rglob("*") if path.is_file())
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    assert TOKEN not in caplog.text


def test_a_publisher_may_have_a_wrong_clock(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker refuses calls from clocks that are far off, and Spark's machines have clocks of their own."""
    with open_store(broker_url) as store:
        write = new_write()
        store.stage(write, "0.1", [[make_record(now=1) for _ in range(3)]])
        monkeypatch.setattr(publish_staged, "wall_clock", lambda: 1)
        assert store.publish(write, ["0.1"]) == 3
    assert len(jobs_in(broker_url)) == 3


Changes = list[tuple[str, str]]
S3 = "s3://jobs/one?region=r&endpoint=http://minio:9000&access_key_id=me&secret_access_key=hidden"
REDIS = "redis://:hidden@host:6379/2?prefix=one:"
BROKER = "https://hidden@a.example:7433,b.example:7433/jobs?timeout=3"
POSTGRES = "postgresql://me:hidden@db.example:5432/jobs?schema=th&password=hidden"


@pytest.mark.parametrize(
    ("url", "same", "other"),
    [
        (S3, [("hidden", "changed"), ("region=r", "region=s")], [("/one?", "/two?"), ("minio", "other")]),
        (REDIS, [("hidden", "changed"), ("one:", "one:&timeout=3")], [("one:", "two:"), ("79/2", "79/3")]),
        (BROKER, [("hidden", "changed"), ("timeout=3", "timeout=4")], [("b.example", "c.example")]),
        (POSTGRES, [("hidden", "changed"), ("me:hidden@", "")], [("=th", "=other"), ("/jobs?", "/more?")]),
        ("file:///a/b?sync=off", [("?sync=off", "/")], [("/a/b", "/a/c")]),
        ("sqlite:////var/jobs.db?timeout=3", [("?timeout=3", "")], [("jobs.db", "more.db")]),
    ],
)
def test_stores_are_told_apart_without_their_secrets(url: str, same: Changes, other: Changes) -> None:
    name = source_name(url)
    assert "hidden" not in name
    assert {source_name(url.replace(*change)) for change in same} == {name}
    assert name not in {source_name(url.replace(*change)) for change in other}
