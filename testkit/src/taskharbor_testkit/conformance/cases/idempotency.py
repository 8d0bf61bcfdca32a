"""Idempotency keys: a lookup within the queue, never a change, for as long as the job they led to is kept."""

from __future__ import annotations

from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import UpdateFlags
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import Twin, ack, fail, release


@case()
async def a_known_key_changes_nothing(t: Twin) -> None:
    job = t.job(idempotency_key="i")
    await t.enqueue(job)
    async with t.unchanged():
        again = t.job(idempotency_key="i", payload=b"other", priority=3)
        assert await t.enqueue(again) == [Enqueued(job.id, existed=True)]


@case()
async def known_within_a_batch(t: Twin) -> None:
    one, two = t.job(idempotency_key="i"), t.job(idempotency_key="i")
    assert await t.enqueue(one, two) == [Enqueued(one.id), Enqueued(one.id, existed=True)]


@case()
async def known_per_queue(t: Twin) -> None:
    one, two = t.job(idempotency_key="i"), t.job(idempotency_key="i", queue="other")
    assert await t.enqueue(one, two) == [Enqueued(one.id), Enqueued(two.id)]


@case()
async def known_while_inflight(t: Twin) -> None:
    job = t.job(idempotency_key="i")
    await t.lease(job)
    async with t.unchanged():
        assert await t.enqueue(t.job(idempotency_key="i")) == [Enqueued(job.id, existed=True)]


@case()
async def known_after_the_end(t: Twin) -> None:
    """As long as the job is kept, dead and cancelled ones too."""
    done, dead, cancelled = (t.job(idempotency_key=name) for name in "abc")
    await t.enqueue(done, dead, cancelled)
    held = await t.reserve(2)
    await t.settle(ack(held[0]), fail(held[1]))
    await t.cancel(cancelled.id)
    t.advance(3600)
    async with t.unchanged():
        again = [t.job(idempotency_key=name) for name in "abc"]
        answers = await t.enqueue(*again)
    assert answers == [Enqueued(job.id, existed=True) for job in (done, dead, cancelled)]


@case()
async def forgotten_with_the_job(t: Twin) -> None:
    job = t.job(idempotency_key="i")
    await t.settle(ack(await t.lease(job)))
    assert await t.purge() == 1
    again = t.job(idempotency_key="i")
    assert await t.enqueue(again) == [Enqueued(again.id)]


@case()
async def forgotten_when_retention_removes_the_job(t: Twin) -> None:
    await t.configure(keep_done_us=1)
    await t.settle(ack(await t.lease(t.job(idempotency_key="i"))))
    t.advance(1)
    await t.prune()
    again = t.job(idempotency_key="i")
    assert await t.enqueue(again) == [Enqueued(again.id)]


@case()
async def a_known_id_wins_over_the_key(t: Twin) -> None:
    one, two = t.job(idempotency_key="i"), t.job()
    await t.enqueue(one, two)
    async with t.unchanged():
        mixed = t.job(id=two.id, idempotency_key="i")
        assert await t.enqueue(mixed) == [Enqueued(two.id, existed=True)]


@case()
async def wins_over_the_keyed_update(t: Twin) -> None:
    """Lookup only: a known idempotency key does not update a waiting job of the same key."""
    job = t.job(key="k", idempotency_key="i")
    await t.enqueue(job)
    async with t.unchanged():
        again = t.job(key="k", idempotency_key="i", payload=b"other", update=UpdateFlags(run_at="yes"))
        assert await t.enqueue(again) == [Enqueued(job.id, existed=True)]


@case()
async def wins_over_blocking(t: Twin) -> None:
    job = t.job(key="k", idempotency_key="i")
    await t.lease(job)
    async with t.unchanged():
        assert await t.enqueue(t.job(key="k", idempotency_key="i")) == [Enqueued(job.id, existed=True)]


@case()
async def a_key_that_led_to_an_update_is_known(t: Twin) -> None:
    """It led to the job that waits: the same wish again is recognised and changes nothing."""
    job = t.job(key="k")
    await t.enqueue(job)
    wish = t.job(key="k", idempotency_key="i", payload=b"wish")
    assert await t.enqueue(wish) == [Enqueued(job.id, existed=True)]
    await t.lease()
    async with t.unchanged():
        assert await t.enqueue(wish) == [Enqueued(job.id, existed=True)]


@case()
async def a_merged_job_is_still_the_one_its_key_led_to(t: Twin) -> None:
    """Its id then reads as merged into the survivor."""
    held = await t.lease(t.job(key="k"))
    blocked = t.job(key="k", idempotency_key="i")
    await t.enqueue(blocked)
    await t.settle(release(held))
    async with t.unchanged():
        assert await t.enqueue(t.job(key="k", idempotency_key="i")) == [Enqueued(blocked.id, existed=True)]
    assert (await t.get(blocked.id)).merged_into == held.id


@case()
async def an_unkeyed_job_never_dedupes(t: Twin) -> None:
    one, two = t.job(), t.job()
    assert [item.existed for item in await t.enqueue(one, two)] == [False, False]
