"""A store behind a broker through the data source: read, streamed and written by Spark, with a token nobody gets to see."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskharbor.broker.tokens import parse_token
from taskharbor.drivers.contract import Ack, Driver
from taskharbor.jobs import SECOND

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
else:
    pytest.importorskip("pyspark")

from spark.written import ask, jobs_in
from taskharbor.bulk import publish
from taskharbor.bulk.stage import new_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.jobs import JobRecord
from taskharbor.spark.lake.sources import source_name
from taskharbor.testing.broker import running_broker

TOKEN = "hidden-from-everybody-0123456789"
ROWS = 2_500


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db?durability=normal"


@pytest.fixture
def url(store_url: str) -> Iterator[str]:
    tokens = (parse_token(f"spark:admin:{TOKEN}"),)
    with running_broker(store_url, tokens=tokens, max_batch=1000) as address:
        yield address.replace("://", f"://{TOKEN}@")


def load(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("taskharbor").option("url", url).options(**options).load()


def save(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("taskharbor").option("url", url).options(**options).mode("append").save()


async def work_off(driver: Driver) -> int:
    count = 0
    now = await driver.time()
    while held := await driver.reserve("default", limit=500, lease_for=60 * SECOND, now=now, worker="w"):
        done = await driver.settle([Ack(job.id, job.token or "") for job in held], now=now)
        assert done == [None] * len(held)
        count += len(held)
    return count


def catch_up(spark: SparkSession, url: str, folder: Path) -> list[int]:
    log = spark.readStream.format("taskharbor").option("url", url).option("maxRowsPerBatch", "1000").load()
    sink = log.writeStream.format("parquet").option("path", f"{folder}/rows")
    query = sink.option("checkpointLocation", f"{folder}/check").trigger(availableNow=True).start()
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def written_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_jobs_are_written_read_and_streamed_through_a_broker(
    spark: SparkSession, url: str, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "taskharbor")
    save(spark.range(0, ROWS, 1, 2).selectExpr("id AS n"), url, type="t")
    # Past the broker: they are in the store behind it.
    assert sorted(json.loads(job.payload)["n"] for job in jobs_in(store_url)) == list(range(ROWS))
    assert load(spark, url, table="jobs", state="ready").count() == ROWS

    assert ask(url, work_off) == ROWS
    stream = tmp_path / "stream"
    assert catch_up(spark, url, stream) == [1000, 1000, ROWS - 2000]
    streamed = Counter(row.seq for row in spark.read.parquet(f"{stream}/rows").collect())
    read = Counter(row.seq for row in load(spark, url).collect())
    assert streamed == read
    assert len(read) == read.total() == ROWS
    (queue,) = load(spark, url, table="queues").collect()
    assert (queue.queue, queue.done, queue.done_total) == ("default", ROWS, ROWS)

    save(spark.range(1).selectExpr("id AS n"), url, type="t")
    assert ask(url, work_off) == 1
    assert catch_up(spark, url, stream) == [1]
    # Neither offsets nor logs tell whose they are.
    assert TOKEN.encode() not in written_below(stream)
    assert TOKEN not in caplog.text


def test_a_batch_of_a_stream_is_written_once_through_a_broker(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def run() -> None:
        rows = spark.readStream.schema("n long").json(str(source))
        sink = rows.writeStream.format("taskharbor").option("url", url).option("type", "t")
        query = sink.option("checkpointLocation", f"{tmp_path}/check").trigger(availableNow=True).start()
        query.awaitTermination()

    (source / "0.json").write_text("\n".join(json.dumps({"n": n}) for n in range(50)))
    run()
    # As if Spark had died between the commit of the batch and the note that it is done.
    (tmp_path / "check" / "commits" / "0").unlink()
    (tmp_path / "check" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()
    assert sorted(json.loads(job.payload)["n"] for job in jobs_in(url)) == list(range(50))
    assert TOKEN.encode() not in written_below(tmp_path / "check")


def test_dead_jobs_are_cancelled_by_id_through_a_broker(spark: SparkSession, url: str) -> None:
    save(spark.range(20).selectExpr("id AS n"), url, type="t")
    some = load(spark, url, table="jobs").where("get_json_object(CAST(payload AS STRING), '$.n') < 5")
    save(some, url, mode="cancel")
    assert Counter(row.state for row in load(spark, url, table="jobs").collect()) == {
        "ready": 15,
        "cancelled": 5,
    }


def test_a_token_is_in_no_plan_and_no_message(
    spark: SparkSession, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.errors import AnalysisException

    log = load(spark, url)
    log.explain("extended")
    plan: Any = log._jdf.queryExecution()
    shown = capsys.readouterr()
    assert "BatchScan taskharbor" in shown.out
    assert TOKEN not in shown.out + shown.err + plan.toString()
    nobody = load(spark, f"http://{TOKEN}@127.0.0.1:1")
    with pytest.raises(AnalysisException, match=r"127\.0\.0\.1:1") as error:
        nobody.count()
    assert TOKEN not in str(error.value) + "".join(capsys.readouterr())


def test_a_store_behind_a_broker_is_named_without_the_token() -> None:
    one = "https://token@a.example:7433,b.example:7433/jobs?timeout=3"
    assert "token" not in source_name(one)
    assert source_name(one) == source_name(one.replace("token", "other").replace("timeout=3", "timeout=4"))
    assert source_name(one) != source_name(one.replace("b.example", "c.example"))


def test_a_publisher_whose_clock_is_wrong_publishes_all_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker refuses calls from clocks that are far off, and Spark's machines have clocks of their own."""
    with open_store(url) as store:
        assert type(store) is BulkStore
        write = new_write()
        jobs = [JobRecord(id=str(n), type="t", run_at_us=1, created_at_us=1) for n in range(3)]
        store.stage(write, "0.1", [jobs])
        monkeypatch.setattr(publish, "wall_clock", lambda: 1)
        assert store.publish(write, ["0.1"]) == 3
    assert len(jobs_in(url)) == 3
