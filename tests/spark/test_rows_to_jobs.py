"""Rows of a DataFrame, as Arrow, become records: which column is what, and what cannot be a job."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from records import NOW
from taskharbor.jobs import JobRecord, UpdateFlags, to_micros
from taskharbor.requests import RecordBuilder
from taskharbor.spark.source.requests import RowRefused, RowsToJobs


def made(columns: dict[str, Any], **options: str) -> list[JobRecord]:
    batch = pa.record_batch(columns)
    return list(RowsToJobs(batch.schema.names, options).records(batch, RecordBuilder(), NOW))


def test_columns_that_are_no_fields_become_an_object() -> None:
    jobs = made({"user": pa.array([1, 2]), "day": pa.array([date(2026, 1, 2), None])}, type="mail", queue="q")
    assert [job.payload for job in jobs] == [b'{"user":1,"day":"2026-01-02"}', b'{"user":2,"day":null}']
    assert {(job.type, job.queue, job.run_at_us) for job in jobs} == {("mail", "q", NOW)}
    assert len({job.id for job in jobs}) == 2
    assert [job.payload for job in made({"type": pa.array(["a", "b"])})] == [b"{}", b"{}"]
    assert made({"type": pa.array([], pa.string()), "n": pa.array([], pa.int64())}) == []


@pytest.mark.parametrize(
    "names", [["n"], ["a b", "ü", ""], ['quo"te', "back\\slash", "line\nend"], ["class", "n"]]
)
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_an_object_has_the_names_and_values_of_its_columns(names: list[str], codec: str) -> None:
    values = [None, 1.5, "x\ny", {"inner": [1, None]}]
    batch = {name: pa.array([values[n % 4]] * 2) for n, name in enumerate(names)}
    decode = msgspec.json.decode if codec == "json" else msgspec.msgpack.decode
    wanted = {name: values[n % 4] for n, name in enumerate(names)}
    assert [decode(job.payload) for job in made(batch, type="t", codec=codec)] == [wanted, wanted]


def test_every_field_of_a_request_is_a_column() -> None:
    when = datetime(2030, 1, 1, tzinfo=UTC)
    flags = {"payload": False, "run_at": "later", "retry": None, "reset_counts": None}
    (first, second) = made(
        {
            "type": pa.array(["mail", "sms"]),
            "queue": pa.array(["a", None]),
            "run_at": pa.array([when, None], pa.timestamp("us", "UTC")),
            "delay": pa.array([None, timedelta(seconds=3)], pa.duration("us")),
            "timeout": pa.array([Decimal("1.5"), None]),
            "priority": pa.array([4, None], pa.int32()),
            "key": pa.array([None, "k"]),
            "update": pa.array([None, flags]),
            "idempotency_key": pa.array(["i", None]),
            "max_attempts": pa.array([9, None]),
            "max_stalls": pa.array([None, 2]),
            "backoff": pa.array([[1.0, 2.0], None]),
            "headers": pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string())),
            "codec": pa.array(["msgpack", None]),
            "n": pa.array([1, 2]),
        },
        queue="fallback",
        priority="-1",
    )
    assert (first.type, first.queue, first.run_at_us) == ("mail", "a", to_micros(when))
    assert (first.timeout_us, first.priority, first.idempotency_key) == (1_500_000, 4, "i")
    assert (first.max_attempts, first.backoff_min_us, first.headers) == (9, 1_000_000, {"a": "b"})
    assert (first.codec, msgspec.msgpack.decode(first.payload)) == ("msgpack", {"n": 1})
    assert (second.queue, second.run_at_us, second.priority) == ("fallback", NOW + 3_000_000, -1)
    assert (second.key, second.max_stalls, second.codec) == ("k", 2, "json")
    assert second.update == UpdateFlags(payload=False, run_at="later")
    assert second.payload == b'{"n":2}'


def test_a_payload_column_is_json_text_bytes_or_something_to_encode() -> None:
    assert [job.payload for job in made({"payload": pa.array(['{"a": 1}', None])}, type="t")] == [
        b'{"a": 1}',
        b"null",
    ]
    (job,) = made({"payload": pa.array([b"\x81\xa1a\x01"])}, type="t", codec="msgpack")
    assert (job.payload, job.codec) == (b"\x81\xa1a\x01", "msgpack")
    maps = pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64()))
    assert [job.payload for job in made({"payload": maps}, type="t")] == [b'{"x":1}']
    struct = pa.array([{"a": [1, 2], "b": {"c": "line\nend"}}])
    assert [job.payload for job in made({"payload": struct}, type="t")] == [
        b'{"a":[1,2],"b":{"c":"line\\nend"}}'
    ]


def test_a_row_with_its_own_time_does_not_mind_the_delay_of_all() -> None:
    when = datetime(2030, 1, 1, tzinfo=UTC)
    jobs = made(
        {"run_at": pa.array([when, None], pa.timestamp("us", "UTC")), "n": pa.array([1, 2])},
        type="t",
        delay="60",
    )
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
        ({"delay": pa.array([1.0, -1.0]), "n": pa.array([1, 2])}, "lies in the past"),
        ({"run_at": pa.array([datetime(2030, 1, 1)] * 2), "n": pa.array([1, 2])}, "has no time zone"),
        ({"codec": pa.array(["json", "pickle"]), "n": pa.array([1, 2])}, "unknown codec 'pickle'"),
        ({"headers": pa.array(["{}", '{"a": 1}']), "n": pa.array([1, 2])}, "Expected `str`"),
    ],
)
def test_a_row_that_cannot_be_a_job_is_named_with_the_reason(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match="The row: ") as caught:
        made(columns, type="t") if "type" not in columns else made(columns)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        (["n"], {}, "of what type"),
        (["payload", "n"], {"type": "t"}, "the columns n are no fields"),
        (["n"], {"type": "t", "priority": "high"}, "option priority='high'"),
        (["n"], {"type": "t", "priority": "99999"}, "priority 99999"),
        (["n"], {"type": "t", "headers": "[]"}, "option headers"),
        (["n"], {"type": "t", "codec": "pickle"}, "unknown codec"),
        (
            ["n"],
            {"type": "t", "delay": "1", "run_at": "2030-01-01T00:00:00+00:00"},
            "either run_at or delay",
        ),
    ],
)
def test_what_is_wrong_with_all_rows_is_said_before_any_is_read(
    columns: list[str], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RowsToJobs(columns, options)


def test_rows_that_have_their_fields_in_common_stay_in_order() -> None:
    jobs = made({"type": pa.array([f"t{n % 3}" for n in range(90)]), "n": pa.array(range(90))})
    assert [job.type for job in jobs] == [f"t{n % 3}" for n in range(90)]
    assert [json.loads(job.payload) for job in jobs] == [{"n": n} for n in range(90)]
    assert len({job.id for job in jobs}) == 90
