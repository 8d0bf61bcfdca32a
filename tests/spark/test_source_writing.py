"""`df.write` and `df.writeStream`: exactly the DataFrame's rows become jobs, whatever happens to the tasks; triage; and which
column is what."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from bulk.stores import within
from records import NOW
from spark.stores import add, dying, jobs_in, payloads, save, staged_rows, work_off
from taskharbor.bulk.stage import wall_clock
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobRecord, JobState, UpdateFlags, to_micros
from taskharbor.requests import RecordBuilder
from taskharbor.spark.source import TaskHarborDataSource
from taskharbor.spark.source.requests import RowRefused, RowsToJobs
from taskharbor.spark.source.writing import TriageIncomplete, check_answers, triage

ROWS, PARTITIONS = 1_600, 4


@pytest.fixture(params=["sqlite", "postgres"])
def either_url(request: pytest.FixtureRequest) -> str:
    """PostgreSQL has staging and publishing of its own."""
    found: str = request.getfixturevalue("url" if request.param == "sqlite" else "postgres_url")
    return found


def numbers(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    return spark.range(0, rows, 1, PARTITIONS).selectExpr("id AS n")


def test_every_row_becomes_a_job_and_every_field_is_a_column(spark: SparkSession, url: str) -> None:
    rows = spark.sql(
        "SELECT * FROM VALUES ('mail', 'a', timestamp'2030-01-01 00:00:00', NULL, 1.5, 4, NULL, NULL, 'i', 9, NULL, "
        "array(1.0D, 2.0D), map('h', 'x'), 'msgpack', named_struct('to', array('b', 'c'))), "
        "('sms', NULL, NULL, interval '3' second, NULL, NULL, 'k', "
        "named_struct('payload', false, 'run_at', 'later', 'retry', NULL::boolean), NULL, NULL, 2, "
        "NULL, NULL, NULL, named_struct('to', array('d'))) "
        "AS t(type, queue, run_at, delay, timeout, priority, key, update, idempotency_key, max_attempts, max_stalls, "
        "backoff, headers, codec, payload)"
    )
    save(rows, url, queue="fallback", priority="-1")
    mail, sms = sorted(jobs_in(url), key=lambda job: job.type)
    assert (mail.queue, mail.priority, mail.headers, mail.idempotency_key) == ("a", 4, {"h": "x"}, "i")
    assert mail.run_at_us == to_micros(datetime(2030, 1, 1, tzinfo=UTC))
    assert (mail.timeout_us, mail.max_attempts, mail.backoff_max_us) == (1_500_000, 9, 2_000_000)
    assert (mail.codec, msgspec.msgpack.decode(mail.payload)) == ("msgpack", {"to": ["b", "c"]})
    assert (sms.queue, sms.priority, sms.key, sms.max_stalls) == ("fallback", -1, "k", 2)
    assert sms.run_at_us - sms.created_at_us == 3_000_000
    assert sms.update == UpdateFlags(payload=False, run_at="later")
    assert (sms.codec, json.loads(sms.payload)) == ("json", {"to": ["d"]})


def test_jobs_run_in_the_order_of_the_dataframe(spark: SparkSession, url: str) -> None:
    save(numbers(spark, 300).coalesce(3), url, type="t")
    hold: dict[str, Any] = {"limit": 300, "lease_for": SECOND, "worker": "w"}
    claimed = within(url, lambda driver: driver.reserve("default", now=wall_clock(), **hold))
    assert [json.loads(job.payload)["n"] for job in claimed] == list(range(300))


def test_an_aborted_write_leaves_nothing(small_batches: SparkSession, either_url: str) -> None:
    """No job, and nothing staged."""
    frame = numbers(small_batches).mapInArrow(dying(partition=1, tries=9), "n long")
    with pytest.raises(PySparkException, match="does not survive"):
        save(frame, either_url, type="t")
    assert jobs_in(either_url) == []
    assert staged_rows(either_url) == 0


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ("n", {}, "of what type"),
        ("n", {"type": "t", "prioritty": "1"}, "unknown option prioritty"),
        ("n", {"type": "t", "mode": "delete"}, "choose enqueue"),
        ("n", {"type": "t", "url": "memory://"}, "memory of one process"),
        ("n", {"mode": "cancel"}, "takes a column `id`"),
        ("payload n", {"type": "t"}, "the columns n are no fields"),
        ("n", {"type": "t", "priority": "high"}, "option priority='high'"),
        ("n", {"type": "t", "priority": "99999"}, "priority 99999"),
        ("n", {"type": "t", "headers": "[]"}, "option headers"),
        ("n", {"type": "t", "codec": "pickle"}, "unknown codec"),
        (
            "n",
            {"type": "t", "delay": "1", "run_at": "2030-01-01T00:00:00+00:00"},
            "give one of them, not both",
        ),
    ],
)
def test_a_wrong_write_is_refused(
    url: str, tmp_path: Path, columns: str, options: dict[str, str], reason: str
) -> None:
    """Before a task runs."""
    schema = StructType([StructField(name, StringType()) for name in columns.split()])
    with pytest.raises(ValueError, match=reason):
        TaskHarborDataSource({"url": url} | options).writer(schema, overwrite=False)
    with pytest.raises(InvalidRequest, match="only ever added"):
        TaskHarborDataSource({"url": url, "type": "t"}).writer(schema, overwrite=True)
    assert not (tmp_path / "jobs.db").exists()


def test_a_batch_that_is_done_over_counts_once(spark: SparkSession, either_url: str, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()

    def run(*numbers: int) -> None:
        """Make jobs of the lines of JSON files, in one batch each time."""
        if numbers:
            (source / f"{numbers[0]}.json").write_text("\n".join(f'{{"n": {n}}}' for n in numbers))
        rows = spark.readStream.schema("n long").json(str(source))
        sink = rows.writeStream.format("taskharbor").options(url=either_url, type="t", queue="q")
        sink = sink.option("checkpointLocation", str(checkpoint))
        sink.trigger(availableNow=True).start().awaitTermination()

    run(*range(30))
    run(*range(30, 50))
    # As if Spark had died after the jobs were published and before it took note of it.
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=name != "1")
    run()
    assert payloads(either_url) == list(range(50))
    run(*range(50, 55))
    assert payloads(either_url) == list(range(55))
    assert staged_rows(either_url) == 0


# -- triage -------------------------------------------------------------------------------------------------------


def triage_frame(spark: SparkSession, ids: list[str], url: str, mode: str) -> None:
    save(spark.createDataFrame([(one,) for one in ids], "id string").repartition(2), url, mode=mode)


def states(url: str) -> dict[str, JobState]:
    return {job.id: job.state for job in jobs_in(url)}


def test_jobs_are_requeued_cancelled_and_purged_by_id(spark: SparkSession, url: str) -> None:
    """Items that could not be done are counted."""
    dead = add(url, 7)
    assert work_off(url, dies=lambda job: True) == 7
    triage_frame(spark, dead[:3], url, "requeue")
    triage_frame(spark, dead[:1], url, "cancel")
    triage_frame(spark, [dead[0], *dead[5:]], url, "purge")
    ready, died = JobState.READY, JobState.DEAD
    assert states(url) == {dead[1]: ready, dead[2]: ready, dead[3]: died, dead[4]: died}

    with pytest.raises(PySparkException) as caught:
        triage_frame(spark, [*dead[2:4], "nobody"], url, "requeue")
    text = str(caught.value)
    assert "requeue: 1 done (ready 1)" in text
    assert f"1 not, only a dead job can be requeued (e.g. {dead[2]})" in text
    assert "1 not, no job with this id (never accepted, or removed by retention) (e.g. nobody)" in text
    assert states(url)[dead[3]] is ready
    with pytest.raises(PySparkException, match="not text"):
        save(spark.range(1), url, mode="cancel")


def test_more_ids_than_fit_in_one_batch_are_all_answered(url: str) -> None:
    ids = add(url, 2500)
    answers = triage(url, "cancel", [*ids, "nobody"])
    assert answers[:-1] == [JobState.CANCELLED] * 2500
    with pytest.raises(TriageIncomplete, match=r"2500 done \(cancelled 2500\); 1 not"):
        check_answers("cancel", answers)
    assert len(triage(url, "purge", ids)) == 2500
    assert states(url) == {}


# -- rows, as Arrow, become records ----------------------------------------------------------------------------------


def made(columns: dict[str, Any], **options: str) -> list[JobRecord]:
    batch = pa.record_batch(columns)
    return list(RowsToJobs(batch.schema.names, options).records(batch, RecordBuilder(), NOW))


@pytest.mark.parametrize(
    ("columns", "codec", "payloads"),
    [
        ({"payload": pa.array(['{"a": 1}', None])}, "json", [b'{"a": 1}', b"null"]),
        ({"payload": pa.array([b"\x81\xa1a\x01"])}, "msgpack", [b"\x81\xa1a\x01"]),
        ({"payload": pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64()))}, "json", [b'{"x":1}']),
        ({"payload": pa.array([{"a": [1], "b": {"c": "a\nb"}}])}, "json", [b'{"a":[1],"b":{"c":"a\\nb"}}']),
        ({"n": pa.array([1]), "day": pa.array([date(2026, 1, 2)])}, "json", [b'{"n":1,"day":"2026-01-02"}']),
        ({"queue": pa.array(["a", "b"])}, "json", [b"{}", b"{}"]),
        ({"queue": pa.array([], pa.string()), "n": pa.array([], pa.int64())}, "json", []),
    ],
)
def test_payloads_of_rows(columns: dict[str, Any], codec: str, payloads: list[bytes]) -> None:
    """A payload is JSON text, bytes, something to encode, or the columns that are no fields."""
    jobs = made(columns, type="t", codec=codec)
    assert [job.payload for job in jobs] == payloads
    assert {(job.type, job.codec, job.run_at_us) for job in jobs} <= {("t", codec, NOW)}
    assert len({job.id for job in jobs}) == len(jobs)


NAMES = [["n"], ["a b", "ü", ""], ['quo"te', "back\\slash", "line\nend"], ["class", "n"]]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_an_object_has_the_names_and_values_of_its_columns(names: list[str], codec: str) -> None:
    values = [None, 1.5, "x\ny", {"inner": [1, None]}]
    batch = {name: pa.array([values[n % 4]] * 2) for n, name in enumerate(names)}
    decode = msgspec.json.decode if codec == "json" else msgspec.msgpack.decode
    wanted = {name: values[n % 4] for n, name in enumerate(names)}
    assert [decode(job.payload) for job in made(batch, type="t", codec=codec)] == [wanted, wanted]


def test_a_row_with_its_own_time_does_not_mind_the_delay_of_all() -> None:
    when = datetime(2030, 1, 1, tzinfo=UTC)
    times = pa.array([when, None], pa.timestamp("us", "UTC"))
    jobs = made({"run_at": times, "n": pa.array([1, 2])}, type="t", delay="60")
    assert [job.run_at_us for job in jobs] == [to_micros(when), NOW + 60_000_000]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"payload": pa.array(["{}", "{broken"])}, "is no JSON"),
        ({"type": pa.array(["t", None]), "n": pa.array([1, 2])}, "the column `type` is null"),
        ({"type": pa.array(["ok", ""]), "n": pa.array([1, 2])}, "type '': expected `str` of length >= 1"),
        ({"priority": pa.array([1, 99_999]), "n": pa.array([1, 2])}, "priority 99999"),
        ({"priority": pa.array(["1", "2"]), "n": pa.array([1, 2])}, "priority '1'"),
        ({"payload": pa.array([b"{}", b"1" * 2_000_000])}, "store the data elsewhere"),
        *(
            ({name: pa.array(values), "type": pa.array(["t", "t"])}, "JSON has no NaN and no infinity")
            for name, values in (
                ("n", [1.0, math.nan]),
                ("payload", [{"a": [1.0]}, {"a": [-math.inf]}]),
                ("n", [None, {"a": {"b": math.inf}}]),
            )
        ),
        ({"delay": pa.array([1.0, -1.0]), "n": pa.array([1, 2])}, "lies in the past"),
        ({"run_at": pa.array([datetime(2030, 1, 1)] * 2), "n": pa.array([1, 2])}, "has no time zone"),
        (
            {"run_at": pa.array(["soon"] * 2), "n": pa.array([1, 2])},
            "column run_at holds 'soon': give a timestamp, such as to_timestamp(run_at)",
        ),
        (
            {"update": pa.array(["yes"] * 2), "n": pa.array([1, 2])},
            "column update holds 'yes': give a struct",
        ),
        ({"codec": pa.array(["json", "pickle"]), "n": pa.array([1, 2])}, "unknown codec 'pickle'"),
        ({"headers": pa.array(["{}", '{"a": 1}']), "n": pa.array([1, 2])}, "Expected `str`"),
    ],
)
def test_a_row_that_cannot_be_a_job_is_named_with_the_reason(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match="The row: ") as caught:
        made(columns, type="t") if "type" not in columns else made(columns)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_rows_that_have_their_fields_in_common_stay_in_order() -> None:
    jobs = made({"type": pa.array([f"t{n % 3}" for n in range(90)]), "n": pa.array(range(90))})
    assert [job.type for job in jobs] == [f"t{n % 3}" for n in range(90)]
    assert [json.loads(job.payload) for job in jobs] == [{"n": n} for n in range(90)]
    assert len({job.id for job in jobs}) == 90
