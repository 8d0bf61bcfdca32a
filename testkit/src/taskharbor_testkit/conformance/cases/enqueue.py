"""Accepting jobs: what is stored, in which state, and that a repeated try changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import SECOND, JobState, UpdateFlags
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import QUEUE, Twin, ack

GIVEN_FIELDS = (
    "type",
    "payload",
    "codec",
    "headers",
    "priority",
    "run_at_us",
    "created_at_us",
    "timeout_us",
    "key",
    "idempotency_key",
    "max_attempts",
    "max_stalls",
    "backoff_min_us",
    "backoff_max_us",
)


@case()
async def a_due_job_is_ready(t: Twin) -> None:
    job = t.job()
    assert await t.enqueue(job) == [Enqueued(job.id, existed=False)]
    assert await t.state(job.id) is JobState.READY


@case()
async def a_job_due_long_ago_is_ready(t: Twin) -> None:
    job = t.job(run_at_us=1)
    await t.enqueue(job)
    assert await t.state(job.id) is JobState.READY


@case()
async def a_job_due_later_is_scheduled(t: Twin) -> None:
    job = t.job(run_at_us=t.now + 1)
    await t.enqueue(job)
    assert await t.state(job.id) is JobState.SCHEDULED


@case()
async def every_field_is_kept_exactly(t: Twin) -> None:
    """Microseconds, bytes, unicode and empty values come back as they went in."""
    job = t.job(
        type="ünïcode.type",
        payload=bytes(range(256)),
        codec="msgpack",
        headers={"traceparent": "00-ab", "emoji": "🚢", "empty": ""},
        priority=-32_767,
        run_at_us=t.now - 1,
        created_at_us=t.now - 123_457,
        timeout_us=1,
        key="k/1 'quoted\" %_",
        idempotency_key="i\\1",
        max_attempts=7,
        max_stalls=3,
        backoff_min_us=1,
        backoff_max_us=2,
    )
    await t.enqueue(job)
    stored = await t.get(job.id)
    shown, given = msgspec.structs.asdict(stored), msgspec.structs.asdict(job)
    assert {field: shown[field] for field in GIVEN_FIELDS} == {field: given[field] for field in GIVEN_FIELDS}


@case()
async def an_empty_payload_is_kept(t: Twin) -> None:
    job = t.job(payload=b"")
    await t.enqueue(job)
    assert (await t.get(job.id)).payload == b""


@case()
async def a_payload_of_a_megabyte_is_kept(t: Twin) -> None:
    job = t.job(payload=b"\x00\xff" * 524_288)
    await t.enqueue(job)
    assert (await t.get(job.id)).payload == job.payload


@case()
async def lease_state_and_counters_of_the_record_are_ignored(t: Twin) -> None:
    job = t.job(
        state=JobState.INFLIGHT,
        attempts=3,
        stalls=2,
        fence=9,
        token="stolen",
        worker="w9",
        expires_at_us=t.now + SECOND,
        reserved_at_us=t.now,
    )
    await t.enqueue(job)
    stored = await t.get(job.id)
    assert stored.state is JobState.READY
    assert (stored.attempts, stored.stalls, stored.fence) == (0, 0, 0)
    assert (stored.token, stored.worker, stored.expires_at_us, stored.reserved_at_us) == (None,) * 4


@case()
async def the_given_record_stays_the_callers(t: Twin) -> None:
    """A caller that changes its record afterwards, or a record read back, changes nothing in the store."""
    job = t.job(headers={"a": "1"})
    await t.enqueue(job)
    async with t.unchanged():
        job.payload = b"changed"
        job.headers["a"] = "changed"
        read = await t.get(job.id)
        read.priority = 99
        read.headers["b"] = "2"


@case()
async def a_known_id_changes_nothing(t: Twin) -> None:
    job = t.job()
    await t.enqueue(job)
    async with t.unchanged():
        again = t.job(id=job.id, payload=b"other", priority=5, queue=QUEUE)
        assert await t.enqueue(again) == [Enqueued(job.id, existed=True)]


@case()
async def a_known_id_is_known_in_every_queue(t: Twin) -> None:
    """Rule 1 speaks of the id alone."""
    job = t.job()
    await t.enqueue(job)
    async with t.unchanged():
        assert await t.enqueue(t.job(id=job.id, queue="elsewhere")) == [Enqueued(job.id, existed=True)]


@case()
async def a_known_id_wins_over_its_key(t: Twin) -> None:
    """First match wins: a repeated try of a keyed job does not update it, whatever its flags."""
    job = t.job(key="k")
    await t.enqueue(job)
    async with t.unchanged():
        again = t.job(
            id=job.id, key="k", payload=b"other", update=UpdateFlags(run_at="yes", reset_counts=True)
        )
        assert await t.enqueue(again) == [Enqueued(job.id, existed=True)]


@case()
async def a_known_id_is_known_while_inflight(t: Twin) -> None:
    job = t.job()
    await t.lease(job)
    async with t.unchanged():
        assert await t.enqueue(job) == [Enqueued(job.id, existed=True)]


@case()
async def a_known_id_is_known_after_the_end(t: Twin) -> None:
    """A repeated try that comes late does not run the job twice."""
    job = t.job()
    await t.settle(ack(await t.lease(job)))
    async with t.unchanged():
        assert await t.enqueue(job) == [Enqueued(job.id, existed=True)]
    assert await t.reserve() == []


@case()
async def an_id_given_twice_in_a_batch_is_stored_once(t: Twin) -> None:
    job = t.job()
    assert await t.enqueue(job, t.job(id=job.id, payload=b"other")) == [
        Enqueued(job.id),
        Enqueued(job.id, True),
    ]
    assert (await t.get(job.id)).payload == job.payload


@case()
async def a_repeated_batch_is_recognised_as_a_whole(t: Twin) -> None:
    """What a client does after an unclear answer."""
    jobs = [t.job(), t.job(key="k"), t.job(idempotency_key="i"), t.job(run_at_us=t.now + SECOND)]
    assert [one.existed for one in await t.enqueue(*jobs)] == [False] * 4
    async with t.unchanged():
        assert await t.enqueue(*jobs) == [Enqueued(job.id, existed=True) for job in jobs]


@case()
async def a_half_known_batch_stores_the_rest(t: Twin) -> None:
    known, new = t.job(), t.job()
    await t.enqueue(known)
    assert await t.enqueue(new, known) == [Enqueued(new.id), Enqueued(known.id, True)]


@case()
async def an_empty_batch_changes_nothing(t: Twin) -> None:
    async with t.unchanged():
        assert await t.enqueue() == []


@case()
async def a_batch_is_stored_in_its_order(t: Twin) -> None:
    jobs = [t.job() for _ in range(50)]
    await t.enqueue(*jobs)
    assert [job.id for job in await t.reserve(50)] == [job.id for job in jobs]


@case()
async def a_batch_may_span_queues(t: Twin) -> None:
    jobs = [t.job(queue=f"q{n % 3}") for n in range(9)]
    await t.enqueue(*jobs)
    for n in range(3):
        assert [job.id for job in await t.reserve(9, queue=f"q{n}")] == [job.id for job in jobs[n::3]]


@case()
async def what_one_handle_stored_every_handle_sees(t: Twin) -> None:
    other = await t.store.connect()
    job = t.job()
    await t.enqueue(job)
    (held,) = await t.reserve(by=other)
    assert held.id == job.id


@case()
async def a_batch_with_bad_input_stores_nothing(t: Twin) -> None:
    """All or nothing: what concerns the whole call is raised, and the good records before it are not stored."""
    await t.enqueue(t.job(key="k"))
    bad: Any = None
    async with t.unchanged():
        try:
            await t.driver.enqueue([t.job(), t.job(key="k", payload=b"new"), bad, t.job()], now=t.now)
        except Exception:
            return
        raise AssertionError("None in a batch of records was accepted")
