"""Redis, object stores and a broker through the data source: written, read, streamed and triaged by Spark."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from records import make_record
from spark.stores import LogStream, below, dying, jobs_in, load, payloads, save, work_off
from taskharbor.broker.tokens import parse_token
from taskharbor.bulk import publish_staged
from taskharbor.bulk.stage import new_write
from taskharbor.bulk.store import open_store
from taskharbor.spark.lake.run import source_name
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.servers.s3 import fresh_s3_url

TOKEN = "hidden-from-everybody-0123456789"
ROWS = 1_200


@pytest.fixture
def broker_url(tmp_path: Path) -> Iterator[str]:
    """Of a broker that wants a token and takes small batches, in front of an SQLite file."""
    store, tokens = f"sqlite:///{tmp_path}/jobs.db?durability=normal", (parse_token(f"spark:admin:{TOKEN}"),)
    with running_broker(store, tokens=tokens, max_batch=1000) as address:
        yield address.replace("://", f"://{TOKEN}@")


@pytest.fixture(params=["redis", "files", "broker", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that has yet to be made. Segments are small, so that there are several."""
    if request.param == "files":
        return f"file://{tmp_path}/store?sync=off&segment_rows=150"
    if request.param == "s3":
        return f"{fresh_s3_url()}&segment_rows=150"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def test_a_dataframe_becomes_jobs_that_are_read_streamed_and_requeued(
    small_batches: SparkSession, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "taskharbor")
    spark = small_batches
    frame = spark.range(0, ROWS, 1, 2).selectExpr("id AS n")
    save(frame.mapInArrow(dying(partition=1, tries=1), "n long"), url, type="t", queue="q")
    assert payloads(url) == list(range(ROWS))
    assert work_off(url, dies=lambda job: json.loads(job.payload)["n"] % 3 == 0) == ROWS
    stream = LogStream(spark, url, tmp_path / "stream", maxRowsPerBatch="1000")
    assert stream.catch_up() == [1000, ROWS - 1000]

    save(below(load(spark, url, table="jobs", state="dead", queue="q"), 90), url, mode="requeue")
    # Of those that are done, an object store has most in segments.
    save(below(load(spark, url, table="jobs", state="done", parallelism="4"), 900), url, mode="purge")
    (queue,) = load(spark, url, table="queues").collect()
    assert (queue.queue, queue.ready, queue.dead, queue.done, queue.done_total) == ("q", 30, 370, 200, 800)

    # A requeue and an end for each that was requeued.
    assert work_off(url) == 30
    assert stream.catch_up() == [60]
    read = Counter(one.seq for one in load(spark, url).collect())
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
