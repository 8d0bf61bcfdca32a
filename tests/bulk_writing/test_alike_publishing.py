"""Jobs that differ in nothing but their payloads, staged without a record for each: they become what others become."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bulk_writing.bulk_harness import NOW, ask, jobs_in, record, stats_of, write_jobs
from taskharbor.bulk.stage import BLOB_BYTES, BLOB_JOBS, chunked, new_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, JobState
from taskharbor.requests import AlikeJobs

_UUID7 = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

_EVERYTHING: dict[str, Any] = {
    "type": 'o\'dd "type" \\',
    "queue": "other",
    "codec": "msgpack",
    "headers": {"a": '"\\{}', "b": "ü"},
    "priority": -7,
    "run_at_us": NOW + 5_000_000,
    "timeout_us": 9,
    "max_attempts": 2,
    "max_stalls": 3,
    "backoff_min_us": 5,
    "backoff_max_us": 6,
}


def claimed_payloads(url: str, count: int) -> list[bytes]:
    jobs = ask(
        url, lambda driver: driver.reserve("q", limit=count, lease_for=10_000_000, now=NOW, worker="w")
    )
    return [job.payload for job in jobs]


@pytest.mark.parametrize("fields", [{}, _EVERYTHING], ids=["defaults", "everything"])
def test_published_jobs_have_every_field_of_the_template_and_a_payload_each(
    store: BulkStore, url: str, fields: dict[str, Any]
) -> None:
    template = record(id="", **fields)
    payloads = [b"", bytes(range(256)), b'{"n":1}', b"x" * 70_000]
    write = new_write()
    assert store.stage(write, "0.1", [AlikeJobs(template, payloads)]) == 4
    assert jobs_in(url) == {}
    assert store.publish(write, ["0.1"], now=NOW) == 4
    found = jobs_in(url)
    assert sorted(job.payload for job in found.values()) == sorted(payloads)
    state = JobState.SCHEDULED if fields else JobState.READY
    for job_id, job in found.items():
        assert _UUID7.fullmatch(job_id)
        template.id, template.payload, template.state = job_id, job.payload, state
        assert job == template
    assert stats_of(url, template.queue).counts[state] == 4


def test_alike_and_other_jobs_are_claimed_in_the_order_they_were_written(store: BulkStore, url: str) -> None:
    payloads = iter([b"%d" % number for number in range(40_000)])

    def some(count: int) -> list[bytes]:
        return [next(payloads) for _ in range(count)]

    def others(count: int) -> list[JobRecord]:
        return [record(payload=payload, type=f"t{number % 3}") for number, payload in enumerate(some(count))]

    template = record(id="")
    first: list[Sequence[JobRecord]] = [
        others(10),
        AlikeJobs(template, some(12_345)),
        others(1500),
        AlikeJobs(template, some(1)),
    ]
    second: list[Sequence[JobRecord]] = [AlikeJobs(template, some(2000)), others(3)]
    total = 10 + 12_345 + 1500 + 1 + 2000 + 3
    write = new_write()
    store.stage(write, "1.7", second)
    store.stage(write, "0.9", first)
    assert store.publish(write, ["0.9", "1.7"], now=NOW) == total
    assert claimed_payloads(url, total + 1) == [b"%d" % number for number in range(total)]
    assert stats_of(url, "q").counts[JobState.INFLIGHT] == total


def test_two_writes_never_share_an_id(store: BulkStore, url: str) -> None:
    for _ in range(2):
        write = new_write()
        for task in ("0.1", "1.2"):
            store.stage(write, task, [AlikeJobs(record(id=""), [b"{}"] * 20)])
        assert store.publish(write, ["0.1", "1.2"], now=NOW) == 40
        assert store.publish(write, ["0.1", "1.2"], now=NOW) == 40
    assert len(jobs_in(url)) == 80


def test_counts_tell_what_is_due_from_what_is_not(store: BulkStore, url: str) -> None:
    write = new_write()
    batches: list[Sequence[JobRecord]] = [
        AlikeJobs(record(id="", priority=2), [b"{}"] * 30),
        AlikeJobs(record(id="", run_at_us=NOW + 1), [b"{}"] * 20),
        [record(), record(run_at_us=NOW + 1)],
        AlikeJobs(record(id="", queue="other"), [b"{}"] * 7),
    ]
    store.stage(write, "0.1", batches)
    assert store.publish(write, ["0.1"], now=NOW) == 59
    counts = stats_of(url, "q").counts
    assert (counts[JobState.READY], counts[JobState.SCHEDULED]) == (31, 21)
    assert stats_of(url, "other").counts[JobState.READY] == 7


def test_alike_jobs_with_a_key_go_by_the_rules(store: BulkStore, url: str) -> None:
    assert write_jobs(store, AlikeJobs(record(id="", key="k"), [b"1", b"2", b"3"])) == 1
    assert [job.payload for job in jobs_in(url).values()] == [b"3"]


@pytest.mark.parametrize("field", ["type", "queue", "codec", "key"])
def test_what_postgres_cannot_hold_is_refused_when_it_is_staged(postgres_url: str, field: str) -> None:
    template = msgspec.structs.replace(record(id=""), **{field: "a\0b"})
    jobs = AlikeJobs(template, [b"{}", b"{}"])
    with open_store(postgres_url) as store, pytest.raises(InvalidRequest, match=f"{field} .*NUL"):
        store.stage(new_write(), "0.1", [jobs])


def test_chunks_of_alike_jobs_stay_alike_and_hold_not_too_many_bytes() -> None:
    payloads = [b"%d" % n for n in range(2 * BLOB_JOBS + 5)] + [b"x" * (BLOB_BYTES // 3)] * 10
    for most in (BLOB_JOBS, 3 * BLOB_JOBS):
        chunks = list(chunked([AlikeJobs(record(id=""), payloads)], most))
        assert all(isinstance(chunk, AlikeJobs) and len(chunk) <= most for chunk in chunks)
        found = [chunk.payloads for chunk in chunks if isinstance(chunk, AlikeJobs)]
        assert all(sum(map(len, some)) <= BLOB_BYTES for some in found)
        assert [payload for some in found for payload in some] == payloads
