"""Jobs that differ in nothing but their payloads are a sequence of records, made when somebody looks at one."""

from __future__ import annotations

import pytest

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import MAX_PAYLOAD_BYTES, JobRequest
from taskharbor.requests import AlikeJobs, RecordBuilder

NOW = 1_800_000_000_000_000


def alike(payloads: list[bytes]) -> AlikeJobs:
    return RecordBuilder().alike(JobRequest(type="mail", queue="q", priority=3), payloads, NOW)


def test_records_have_their_own_ids_and_payloads_and_all_else_in_common() -> None:
    jobs = alike([b"1", b"22", b"3"])
    assert len(jobs) == 3
    assert [job.payload for job in jobs] == [b"1", b"22", b"3"]
    assert len({job.id for job in jobs}) == 3
    assert {(job.type, job.queue, job.priority, job.run_at_us, job.created_at_us) for job in jobs} == {
        ("mail", "q", 3, NOW, NOW)
    }


def test_a_record_is_the_same_whenever_somebody_looks_at_it() -> None:
    jobs = alike([b"1", b"2", b"3"])
    for number, job in enumerate(jobs):
        job.id = f"id-{number}"
    assert [job.id for job in jobs] == ["id-0", "id-1", "id-2"]
    assert jobs[-1] is jobs[2]
    assert [job.id for job in jobs[1:]] == ["id-1", "id-2"]
    # A part makes no records before somebody looks.
    part = alike([b"1", b"2", b"3"])[1:]
    assert isinstance(part, AlikeJobs)
    assert part.payloads == [b"2", b"3"]
    assert [job.payload for job in part] == [b"2", b"3"]


def test_one_payload_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="store the data elsewhere"):
        alike([b"1", b"x" * (MAX_PAYLOAD_BYTES + 1), b"3"])
