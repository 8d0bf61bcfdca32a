import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from taskharbor.errors import CodecError, InvalidRequest
from taskharbor.jobs import SECOND, JobRecord, JobRequest, UpdateFlags
from taskharbor.requests import AlikeJobs, Defaults, RecordBuilder, new_id, new_id_head, new_ids, new_token

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


def test_run_at_may_lie_in_the_past() -> None:
    assert build(run_at=datetime(2020, 1, 1, tzinfo=UTC)).run_at == datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"type": ""}, "type '': expected `str` of length >= 1"),
        ({"type": "a\nb"}, "cannot be printed"),
        ({"delay": -1}, "lies in the past"),
        *(
            ({"delay": wrong}, "give seconds or a timedelta")
            for wrong in ("soon", float("inf"), float("nan"))
        ),
        ({"delay": 1, "run_at": datetime(2026, 1, 1, tzinfo=UTC)}, "give one of them, not both"),
        ({"run_at": datetime(2026, 1, 1)}, "no time zone"),
        ({"timeout": -1}, "longer than 0 seconds"),
        ({"run_at": datetime(2300, 1, 1, tzinfo=UTC)}, "run_at_us 1\\d+: expected `int` <= 9007199254740991"),
        *(({"max_attempts": wrong}, f"max_attempts {wrong}: at least 1") for wrong in (-1, 0)),
        ({"backoff": (5, 1)}, "shortest first"),
        ({"headers": {"a": 1}}, "headers.*: expected `str`, got `int`"),
        ({"headers": {"a": "x" * 9000}}, "at most 8192"),
        ({"payload": "x" * 1_100_000}, "store the data elsewhere"),
        ({"update": UpdateFlags()}, "give a key too"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], complaint: str) -> None:
    """The bounds of every field: the conformance kit, and tests/drivers/test_operations.py."""
    with pytest.raises(InvalidRequest, match=complaint):
        build(**fields)


def test_unknown_codecs_and_unencodable_payloads_are_refused() -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        build(codec="pickle")
    with pytest.raises(CodecError, match="cannot encode"):
        build(payload=object())


def test_a_clients_defaults_apply() -> None:
    defaults = Defaults(queue="q", max_attempts=9, timeout=2, backoff=(1, 2), max_payload_bytes=4)
    builder = RecordBuilder(defaults)
    (record,) = builder.build([JobRequest(type="t", payload=1)], NOW)
    assert (record.queue, record.max_attempts, record.timeout_us) == ("q", 9, 2 * SECOND)
    with pytest.raises(InvalidRequest, match="at most 4"):
        builder.build([JobRequest(type="t", payload="12345")], NOW)


@pytest.mark.parametrize("requests", [[None], ["send"], [{"type": "send"}]])
def test_what_is_no_request_is_refused(requests: Any) -> None:
    with pytest.raises(InvalidRequest, match="give a JobRequest"):
        RecordBuilder().build(requests, 0)


def test_a_record_of_alike_jobs_is_made_once_and_only_when_somebody_looks() -> None:
    def alike() -> AlikeJobs:
        return RecordBuilder().alike(JobRequest(type="mail", priority=3), [b"1", b"22", b"3"], NOW)

    jobs = alike()
    for number, job in enumerate(jobs):
        job.id = f"id-{number}"
    assert [job.id for job in jobs] == ["id-0", "id-1", "id-2"]
    assert jobs[-1] is jobs[2]
    assert [job.id for job in jobs[1:]] == ["id-1", "id-2"]
    part = alike()[1:]
    assert isinstance(part, AlikeJobs)
    assert [job.payload for job in part] == part.payloads == [b"22", b"3"]
    assert {(job.type, job.priority, job.run_at_us, job.created_at_us) for job in part} == {
        ("mail", 3, NOW, NOW)
    }


def test_ids_are_uuid7_strictly_increasing_and_do_not_tell_the_next_one() -> None:
    """A broker makes ids for many producers, and none of them may take another's first."""
    head = new_id_head()
    by_head = [f"{head}{number:08x}" for number in (0, 9, 10, 2**31)]
    for ids in (new_ids(5000) + [new_id()] + new_ids(10), by_head):
        assert ids == sorted(set(ids))
        assert {(uuid.UUID(one).version, uuid.UUID(one).variant) for one in ids} == {(7, uuid.RFC_4122)}
    ends = {one.rpartition("-")[2] for one in (new_id(), new_id(), *new_ids(1), *new_ids(1))}
    assert len(ends) == 4
    for make in (new_token, new_id_head):
        assert len({make() for _ in range(1000)}) == 1000


def test_ids_of_one_call_count_up_by_one_across_milliseconds() -> None:
    assert new_ids(0) == []
    for count in (1, 2, 4095, 4096, 4097, 10_000):
        numbers = [int(one.replace("-", "")[:16], 16) for one in new_ids(count)]
        # The digit after the time says the version, which is no part of the number.
        counted = [(number >> 16 << 12) | (number & 0xFFF) for number in numbers]
        assert counted == list(range(counted[0], counted[0] + count))
