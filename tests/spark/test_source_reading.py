"""`spark.read.format("taskharbor")` and `spark.readStream`: tables as they are, and every row of the log once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from bulk.stores import fresh_url, within
from drivers.postgres.harness import Raw, log_row
from records import make_record
from spark.histories import life_on
from spark.stores import LogStream, add, load, work_off
from taskharbor.bulk.stage import wall_clock
from taskharbor.drivers.contract import DAY, Driver, QueueSettings
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.errors import InvalidRequest
from taskharbor.spark.source import TaskHarborDataSource

DONE = 3_000


async def _fill(driver: Driver) -> None:
    now = wall_clock()
    await driver.configure("mail", QueueSettings(max_inflight=20_000), now=now)
    mail = [make_record(now=now, queue="mail", type="odd" if n % 2 else "even") for n in range(DONE)]
    slow = [make_record(f"wait{n}", now=now, queue="slow", headers={"n": str(n)}) for n in range(3)]
    await driver.enqueue([*mail, *slow], now=now)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with jobs of two queues: most are done, a few wait."""
    with fresh_url(request.param, tmp_path_factory.mktemp("store")) as url:
        within(url, _fill)
        assert work_off(url, queue="mail") == DONE
        yield url


def test_tables_are_read_whole_and_in_parallel(spark: SparkSession, url: str) -> None:
    log = load(spark, url, table="attempts", parallelism="4")
    took = F.min(F.col("ended_at") - F.col("reserved_at"))
    groups = log.groupBy("queue", "outcome", "state", "worker")
    (found,) = groups.agg(F.count("*"), F.countDistinct("job_id"), took).collect()
    assert tuple(found)[:-1] == ("mail", "done", "done", "w", DONE, DONE)
    assert found[-1].total_seconds() == 1
    jobs = load(spark, url, table="jobs").groupBy("queue", "state").count().collect()
    assert set(map(tuple, jobs)) == {("mail", "done", DONE), ("slow", "ready", 3)}
    queues = {one.queue: one for one in load(spark, url, table="queues").collect()}
    assert (queues["mail"].done, queues["mail"].max_inflight, queues["slow"].ready) == (DONE, 20_000, 3)


def test_options_restrict_what_is_read(spark: SparkSession, url: str) -> None:
    waiting = load(spark, url, table="jobs", queue="slow", state="ready").collect()
    assert sorted((one.id, one.headers, bytes(one.payload)) for one in waiting) == [
        (f"wait{n}", f'{{"n":"{n}"}}', b"") for n in range(3)
    ]
    odd = load(spark, url, type="odd", since="2020-01-01", until="2100-01-01T00:00:00+02:00")
    assert odd.count() == DONE // 2


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
def test_spark_says_what_is_wrong_before_anything_runs_and_a_secret_is_in_no_plan_and_no_message(
    spark: SparkSession, capsys: pytest.CaptureFixture[str], hidden: str
) -> None:
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


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_stream_goes_on_where_it_was_takes_no_more_than_it_may_and_says_if_history_left_it_behind(
    spark: SparkSession, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db?durability=normal"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    stream = LogStream(spark, url, tmp_path, maxRowsPerBatch="10")
    add(url, 25)
    work_off(url)
    assert stream.catch_up() == [10, 10, 5]
    add(url, 5)
    add(url, 2, queue="other")
    work_off(url)
    work_off(url, queue="other")
    assert stream.catch_up() == [7]
    assert stream.column() == Counter(range(1, 33))
    if kind == "postgres":
        return

    async def forget(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    add(url, 5)
    work_off(url)
    within(url, forget)
    add(url, 2, later=2 * DAY)
    work_off(url, later=2 * DAY)
    with pytest.raises(StreamingQueryException, match="attempt log after 32 were removed by retention"):
        stream.catch_up()


def test_a_stream_can_begin_at_the_end_and_take_one_queue_only(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db?durability=normal"
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
