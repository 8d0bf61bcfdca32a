"""Accepting jobs: the stored record and its state, and repeated tries that change nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import LATEST, SECOND, JobState, UpdateFlags
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import START, Twin, ack, fail, release

EVERY_FIELD: dict[str, Any] = {
    "type": "ünïcode.type",
    "payload": bytes(range(256)),
    "codec": "msgpack",
    "headers": {"traceparent": "00-ab", "emoji": "🚢", "empty": ""},
    "priority": -32_767,
    "run_at_us": START - 1,
    "created_at_us": START - 123_457,
    "timeout_us": 1,
    "key": "k/1 'quoted\" %_",
    "idempotency_key": "i\\1",
    "max_attempts": 7,
    "max_stalls": 3,
    "backoff_min_us": 1,
    "backoff_max_us": 2,
}
"""Microseconds, bytes and unicode that must come back as they went in."""


@parametrised
async def _stored(t: Twin, /, state: str = "ready", **fields: Any) -> None:
    """A job of these fields is stored with them, and in this state."""
    job = t.job(**fields)
    await t.stores(job)
    await t.shows(job, state=state, **fields)


_stored("a_due_job_is_ready", run_at_us=START)
_stored("a_job_due_long_ago_is_ready", run_at_us=1)
_stored("a_job_due_later_is_scheduled", "scheduled", run_at_us=START + 1)
_stored("every_field_is_kept_exactly", **EVERY_FIELD)
_stored("the_first_instants_are_kept", run_at_us=-LATEST, created_at_us=-LATEST)
_stored("the_last_instants_are_kept", "scheduled", run_at_us=LATEST, created_at_us=LATEST)
_stored("an_empty_payload_is_kept", payload=b"")
_stored("a_payload_of_a_megabyte_is_kept", payload=b"\x00\xff" * 524_289)


async def names_are_compared_exactly(t: Twin) -> None:
    """Case, blanks and accents count, and no separator makes one name of a queue and a key."""
    names = [("q", name) for name in ("name", "NAME", "name ", " name", "n\u00e4me", "na\u0308me")]
    names += [("other", "name"), ("a:b", "c"), ("a", "b:c"), ("a/b", "c"), ("a", "b/c")]
    await t.stores(*[t.job(id=f"{queue}|{name}", queue=queue, key=name) for queue, name in names])
    await t.stores(*[t.job(queue=queue, idempotency_key=name) for queue, name in names])


async def lease_state_and_counters_of_the_record_are_ignored(t: Twin) -> None:
    lease = {"token": "stolen", "worker": "w9", "expires_at_us": t.now + SECOND, "reserved_at_us": t.now}
    job = await t.add(state=JobState.INFLIGHT, attempts=3, stalls=2, fence=9, **lease)
    await t.shows(job, state="ready", attempts=0, stalls=0, fence=0, **dict.fromkeys(lease))


async def the_given_record_stays_the_callers(t: Twin) -> None:
    """A caller that changes its record afterwards, or a record read back, changes nothing in the store."""
    job = await t.add(headers={"a": "1"})
    async with t.unchanged():
        job.payload = b"changed"
        job.headers["a"] = "changed"
        read = await t.get(job.id)
        read.priority = 99
        read.headers["b"] = "2"


async def a_known_id_changes_nothing(t: Twin) -> None:
    """In any queue, whatever its key and flags say, while it waits, runs and after it ended: the id alone counts."""
    job = await t.add(key="k")
    await t.recognises(t.job(id=job.id, payload=b"other", priority=5), job)
    await t.recognises(t.job(id=job.id, queue="elsewhere"), job)
    flags = UpdateFlags(run_at="yes", reset_counts=True)
    again = t.job(id=job.id, key="k", payload=b"other", update=flags)
    await t.recognises(again, job)
    held = await t.lease()
    await t.recognises(again, job)
    await t.settle(ack(held))
    await t.recognises(again, job)


async def an_id_given_twice_in_a_batch_is_stored_once(t: Twin) -> None:
    known, job = await t.add(), t.job()
    answers = await t.enqueue(job, known, t.job(id=job.id, payload=b"other"))
    assert answers == [Enqueued(job.id), Enqueued(known.id, True), Enqueued(job.id, True)]
    await t.shows(job, payload=job.payload)


async def a_repeated_batch_is_recognised_as_a_whole(t: Twin) -> None:
    """A client sends it after an unclear answer."""
    jobs = [t.job(), t.job(key="k"), t.job(idempotency_key="i"), t.job(run_at_us=t.now + SECOND)]
    await t.stores(*jobs)
    async with t.unchanged():
        assert await t.enqueue(*jobs) == [Enqueued(job.id, existed=True) for job in jobs]


async def an_empty_batch_changes_nothing(t: Twin) -> None:
    await t.lease(t.job())
    async with t.unchanged():
        for call in (t.enqueue, t.settle, t.extend, t.cancel, t.requeue):
            assert await call() == []


async def a_batch_may_span_queues(t: Twin) -> None:
    jobs = [t.job(queue=f"q{n % 3}") for n in range(9)]
    await t.enqueue(*jobs)
    for n in range(3):
        assert [job.id for job in await t.reserve(9, queue=f"q{n}")] == [job.id for job in jobs[n::3]]


# -- idempotency keys: a lookup within the queue, as long as the job they led to is kept -----------------------


async def a_known_idempotency_key_changes_nothing(t: Twin) -> None:
    job = await t.add(idempotency_key="i")
    await t.recognises(t.job(idempotency_key="i", payload=b"other", priority=3), job)


async def an_idempotency_key_is_known_within_a_batch(t: Twin) -> None:
    one, two = t.job(idempotency_key="i"), t.job(idempotency_key="i")
    assert await t.enqueue(one, two) == [Enqueued(one.id), Enqueued(one.id, existed=True)]


async def an_idempotency_key_is_known_after_the_end(t: Twin) -> None:
    """As long as the job is kept, dead and cancelled ones too."""
    jobs = [t.job(idempotency_key=name) for name in "abc"]
    await t.enqueue(*jobs)
    done, dead = await t.reserve(2)
    await t.settle(ack(done), fail(dead))
    await t.cancel(jobs[2].id)
    t.advance(3600)
    for job in jobs:
        await t.recognises(msgspec.structs.replace(job, id=t.job().id), job)


async def an_idempotency_key_is_forgotten_with_the_job(t: Twin) -> None:
    """An operator's purge and retention both remove the key."""
    await t.configure(keep_done_us=1)
    for remove in (t.purge, t.prune):
        job = await t.add(key="k", idempotency_key="i")
        await t.updates(t.job(key="k", idempotency_key="also"), job)
        await t.settle(ack(await t.lease()))
        t.advance(1)
        assert await remove() == 1
    await t.stores(t.job(idempotency_key="i"), t.job(idempotency_key="also"))


async def a_known_id_wins_over_the_idempotency_key(t: Twin) -> None:
    await t.add(idempotency_key="i")
    job = await t.add()
    await t.recognises(t.job(id=job.id, idempotency_key="i"), job)


async def an_idempotency_key_wins_over_the_key(t: Twin) -> None:
    """Lookup only: it neither updates a waiting job of the same key, nor blocks behind an inflight one."""
    job = await t.add(key="k", idempotency_key="i")
    again = t.job(key="k", idempotency_key="i", payload=b"other", update=UpdateFlags(run_at="yes"))
    await t.recognises(again, job)
    await t.lease()
    await t.recognises(again, job)


async def an_idempotency_key_that_led_to_an_update_is_known(t: Twin) -> None:
    """It led to the job that waits: the same record again is recognised and changes nothing."""
    job = await t.add(key="k")
    update = t.job(key="k", idempotency_key="i", payload=b"update")
    await t.updates(update, job)
    await t.lease()
    await t.recognises(update, job)


async def a_merged_job_is_still_the_one_its_idempotency_key_led_to(t: Twin) -> None:
    """Its id then reads as merged into the survivor."""
    held = await t.lease(t.job(key="k"))
    blocked = await t.add(key="k", idempotency_key="i")
    await t.settle(release(held))
    await t.recognises(t.job(key="k", idempotency_key="i"), blocked)
    await t.shows(blocked, merged_into=held.id)
