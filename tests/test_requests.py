from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskharbor.errors import CodecError, InvalidRequest
from taskharbor.jobs import SECOND, JobRecord, JobRequest, UpdateFlags
from taskharbor.requests import Defaults, RecordBuilder

NOW = 1_700_000_000 * SECOND


def build(**fields: Any) -> JobRecord:
    (record,) = RecordBuilder().build([JobRequest(**{"type": "t", **fields})], NOW)
    return record


def test_what_is_left_open_is_filled_in() -> None:
    record = build()
    assert (record.queue, record.codec, record.payload) == ("default", "json", b"null")
    assert record.run_at_us == record.created_at_us == NOW
    assert (record.max_attempts, record.max_stalls, record.timeout_us, record.priority) == (5, 0, 0, 0)
    assert (record.backoff_min_us, record.backoff_max_us) == (SECOND, 3600 * SECOND)


def test_what_is_given_is_kept() -> None:
    record = build(
        payload={"n": 1},
        queue="mail",
        delay=timedelta(seconds=3),
        timeout=1.5,
        priority=-7,
        key="k",
        update=UpdateFlags(run_at="later"),
        idempotency_key="once",
        max_attempts=2,
        max_stalls=1,
        backoff=(0.5, 60),
        headers={"traceparent": "00-ab"},
        codec="msgpack",
    )
    assert record.payload == b"\x81\xa1n\x01"
    assert record.run_at_us == NOW + 3 * SECOND
    assert record.timeout_us == 1_500_000
    assert (record.queue, record.priority, record.key, record.idempotency_key) == ("mail", -7, "k", "once")
    assert record.update == UpdateFlags(run_at="later")
    assert (record.max_attempts, record.max_stalls) == (2, 1)
    assert (record.backoff_min_us, record.backoff_max_us) == (500_000, 60 * SECOND)
    assert record.headers == {"traceparent": "00-ab"}


def test_run_at_may_lie_in_the_past_and_zero_attempts_mean_the_default() -> None:
    record = build(run_at=datetime(2020, 1, 1, tzinfo=UTC), max_attempts=0)
    assert record.run_at == datetime(2020, 1, 1, tzinfo=UTC)
    assert record.max_attempts == 5


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"type": ""}, "type '': expected `str` of length >= 1"),
        ({"type": "x" * 201}, "type of 201 characters: expected `str` of length <= 200"),
        ({"type": 5}, "type 5: expected `str`"),
        ({"type": "a\nb"}, "cannot be printed"),
        ({"queue": ""}, "queue '': expected"),
        ({"key": ""}, "key '': expected"),
        ({"key": "a\0"}, "cannot be printed"),
        ({"idempotency_key": ""}, "idempotency_key '': expected"),
        ({"priority": 40_000}, "priority 40000"),
        ({"priority": 1.5}, "priority 1.5"),
        ({"delay": -1}, "lies in the past"),
        ({"delay": "soon"}, "give seconds or a timedelta"),
        ({"delay": float("inf")}, "give seconds or a timedelta"),
        ({"delay": float("nan")}, "give seconds or a timedelta"),
        ({"delay": 1, "run_at": datetime(2026, 1, 1, tzinfo=UTC)}, "either run_at or delay"),
        ({"run_at": datetime(2026, 1, 1)}, "no time zone"),
        ({"timeout": 0}, "longer than nothing"),
        ({"run_at": datetime(2300, 1, 1, tzinfo=UTC)}, "run_at_us 1\\d+: expected `int` <= 9007199254740991"),
        ({"max_attempts": -1}, "max_attempts -1"),
        ({"max_attempts": 1_000_001}, "max_attempts 1000001"),
        ({"max_stalls": -1}, "max_stalls -1"),
        ({"backoff": (5, 1)}, "shortest first"),
        ({"headers": {"a": 1}}, "headers.*: expected `str`, got `int`"),
        ({"headers": {"a": "x" * 9000}}, "at most 8192"),
        ({"payload": "x" * 1_100_000}, "store the data elsewhere"),
        ({"update": UpdateFlags()}, "give a key too"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        build(**fields)


def test_unknown_codecs_and_unencodable_payloads_are_refused() -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        build(codec="pickle")
    with pytest.raises(CodecError, match="cannot encode"):
        build(payload=object())


def test_a_clients_defaults_apply() -> None:
    builder = RecordBuilder(
        Defaults(queue="q", max_attempts=9, timeout=2, backoff=(1, 2), max_payload_bytes=4)
    )
    (record,) = builder.build([JobRequest(type="t", payload=1)], NOW)
    assert (record.queue, record.max_attempts, record.timeout_us) == ("q", 9, 2 * SECOND)
    with pytest.raises(InvalidRequest, match="at most 4"):
        builder.build([JobRequest(type="t", payload="12345")], NOW)


@pytest.mark.parametrize("requests", [[None], ["send"], [{"type": "send"}]])
def test_what_is_no_request_is_refused(requests: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a JobRequest"):
        RecordBuilder().build(requests, 0)
