"""Waking up: no wake-up is missed, whichever call made a job runnable. Order of events only; no wall-clock figures.

`wait` may wake for nothing, so a case never asserts that it slept. Upper bounds are far beyond what any backend
needs and only end a case that would otherwise hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

from taskharbor.bulk.stage import pack
from taskharbor.jobs import SECOND, UpdateFlags
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import SETTLEMENTS, End, Twin, ack, discard, fail, release
from taskharbor_testkit.waits import Waits

PATIENCE = 5.0
LEASE = 600 * SECOND
"""Far longer than a case takes: a lease that comes to its end would wake its waiters."""

Act: TypeAlias = Callable[[], Awaitable[Any]]
Cause: TypeAlias = Callable[[Twin], Awaitable[Act]]


async def _woken(waits: Waits, t: Twin, timeout: float = PATIENCE) -> bool:
    return await asyncio.wait_for(waits(["q"], now=t.now, timeout=timeout), PATIENCE * 2)


async def _quiet(waits: Waits, t: Twin) -> None:
    """Wait until the store has nothing more to say; a driver that never falls silent is polling."""
    for _ in range(50):
        if not await _woken(waits, t, timeout=0.02):
            return
    raise AssertionError("wait returned True fifty times in a row although nothing happened")


async def times_out_at_once_when_asked_to(t: Twin) -> None:
    """A time-out of nothing is a question, not a wait; the answer may even be a needless yes."""
    waits = Waits(t.driver)
    await _quiet(waits, t)
    assert isinstance(await _woken(waits, t, timeout=0), bool)


async def several_queues_are_watched_at_once(t: Twin) -> None:
    other, queues = Waits(await t.store.connect()), [*(f"x{n}" for n in range(255)), "q"]
    while await other(queues, now=t.now, timeout=0.02):
        pass
    waiter = asyncio.create_task(other(queues, now=t.now, timeout=PATIENCE))
    await t.add()
    assert await waiter


async def _waiting(waits: Waits, t: Twin) -> list[asyncio.Task[bool]]:
    """Waiters that have each come to another point of their wait: some have yet to look, some to listen, most sleep."""
    await _quiet(waits, t)
    waiters: list[asyncio.Task[bool]] = []
    for _ in range(8):
        waiters.append(asyncio.create_task(_woken(waits, t)))
        await asyncio.sleep(0)
    return waiters


async def _settle(
    t: Twin, end: End, *, key: str | None = None, then: int = 0, queue: str = "q", **settings: Any
) -> Act:
    """A job is leased, so many more wait, and the lease ends."""
    await t.configure(queue, **settings)
    held = await t.lease(t.job(queue=queue, key=key), queue=queue)
    await t.add_many(then, key=key)
    return lambda: t.settle(end(held))


async def _honoured_cancel(t: Twin) -> Act:
    act = await _settle(t, release, then=1, max_inflight=1)
    await t.cancel(next(iter(t.model.jobs)))
    return act


async def _configure(t: Twin, before: dict[str, Any], after: dict[str, Any]) -> Act:
    await t.add_many(2)
    await t.lease()
    await t.configure(**before)
    return lambda: t.configure(**after)


async def _enqueue(t: Twin) -> Act:
    return t.add


async def _requeue(t: Twin) -> Act:
    held = await t.lease(t.job())
    await t.settle(fail(held))
    return lambda: t.requeue(held.id)


async def _reclaim(t: Twin, max_attempts: int = 5, then: int = 0, **settings: Any) -> Act:
    await t.configure(**settings)
    await t.lease(t.job(max_attempts=max_attempts), lease=600)
    await t.add_many(then)

    async def reclaim() -> None:
        t.advance(600)
        await t.reclaim()

    return reclaim


async def _publish(t: Twin) -> Act:
    await t.driver.put_blob("staging/w/1", pack([t.job()]))
    return lambda: t.driver.publish_blobs(["staging/w/1"], series="s", number=1, portion=1, now=t.now)


async def _an_update_to_now(t: Twin) -> Act:
    await t.add(key="k", run_at_us=t.now + 3600 * SECOND)
    return lambda: t.add(key="k", update=UpdateFlags(run_at="yes"))


CAUSES: dict[str, Cause] = {
    "enqueue": _enqueue,
    "publish": _publish,
    "release": partial(_settle, end=release),
    "retry": partial(_settle, end=SETTLEMENTS["retry"]),
    "unblocking": partial(_settle, end=ack, key="k", then=1),
    "unblocking_by_discard": partial(_settle, end=discard, key="k", then=1),
    "room_under_w": partial(_settle, end=ack, then=1, max_inflight=1),
    "room_by_discard": partial(_settle, end=discard, then=1, max_inflight=1),
    "room_by_an_honoured_cancel": _honoured_cancel,
    "a_failure_job": partial(_settle, end=fail, queue="source", failure_queue="q"),
    "a_higher_w": partial(_configure, before={"max_inflight": 1}, after={"max_inflight": 2}),
    "the_end_of_a_pause": partial(_configure, before={"paused": True}, after={}),
    "requeue": _requeue,
    "reclaim": _reclaim,
    "room_by_a_death": partial(_reclaim, max_attempts=1, then=1, max_inflight=1),
    "an_update_to_now": _an_update_to_now,
}


@parametrised
async def _wakes(t: Twin, cause: str) -> None:
    """A waiter on another handle wakes, and so does one that only begins to wait afterwards."""
    act = await CAUSES[cause](t)
    later = Waits(await t.store.connect())
    await _quiet(later, t)
    waiters = await _waiting(Waits(await t.store.connect()), t)
    await act()
    assert all(await asyncio.gather(*waiters)), f"{cause} on one handle did not wake another that waited"
    assert await _woken(later, t), f"{cause} before the wait began was missed"


for _cause in CAUSES:
    _wakes(f"{_cause}_wakes", _cause)


async def a_job_coming_due_wakes(t: Twin) -> None:
    """No event happens: time alone makes the scheduled job runnable."""
    await t.add(run_at_us=t.now + SECOND // 5)
    waits = Waits(t.driver)
    await _quiet(waits, t)
    assert await _woken(waits, t)


async def a_lease_coming_to_its_end_wakes(t: Twin) -> None:
    await t.lease(t.job(), lease=0.2)
    other = Waits(await t.store.connect())
    await _quiet(other, t)
    assert await _woken(other, t)


async def every_waiter_is_woken(t: Twin) -> None:
    """A waiter on the handle that enqueues, too."""
    handles = [Waits(t.driver), *[Waits(await t.store.connect()) for _ in range(3)]]
    waiters = [waiter for handle in handles for waiter in await _waiting(handle, t)]
    await t.add()
    assert all(await asyncio.gather(*waiters))


async def a_cancelled_wait_harms_nothing(t: Twin) -> None:
    """Cancellable at any moment; the handle works on, and what happened meanwhile is not missed."""
    other = Waits(await t.store.connect())
    await _quiet(other, t)
    for yields in range(5):
        waiter = asyncio.create_task(other(["q"], now=t.now, timeout=PATIENCE))
        for _ in range(yields):
            await asyncio.sleep(0)
        waiter.cancel()
        results = await asyncio.gather(waiter, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
    await t.add()
    waiter = asyncio.create_task(other(["q"], now=t.now, timeout=PATIENCE))
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert await _woken(other, t), "the wake-up went to a wait that was cancelled and never returned"
    assert len(await t.reserve(by=other.driver)) == 1


async def no_wake_up_is_missed_in_a_long_run(t: Twin) -> None:
    """A consumer that reserves only after wait said so still gets every job, once."""
    consumer = await t.store.connect()
    waits, total = Waits(consumer), 40
    got: list[str] = []

    async def consume() -> None:
        while len(got) < total:
            is_woken = await waits(["q"], now=t.now, timeout=PATIENCE)
            assert is_woken, f"wait timed out with {total - len(got)} jobs still to come or ready"
            while found := await consumer.reserve("q", limit=3, lease_for=LEASE, now=t.now, worker="c"):
                got.extend(job.id for job in found)
                assert len(set(got)) == len(got), "a job was handed out twice"

    task = asyncio.create_task(consume())
    for n in range(total):
        await t.driver.enqueue([t.job()], now=t.now)
        if n % 7 == 0:
            await asyncio.sleep(0.002)
    await asyncio.wait_for(task, PATIENCE * 3)
    assert len(got) == total


async def what_another_made_ready_and_left_is_not_missed(t: Twin) -> None:
    """A job came due, somebody else's reserve saw that and took another: it is as good as newly enqueued."""
    other = Waits(await t.store.connect())
    await t.add_many(2, run_at_us=t.now + 5 * SECOND)
    for _ in range(2):
        await other(["q"], now=t.now, timeout=0)
    t.advance(5)
    await t.driver.reserve("q", limit=1, lease_for=60 * SECOND, now=t.now, worker="w1")
    assert await _woken(other, t)


async def callers_of_one_handle_miss_nothing_that_another_was_told(t: Twin) -> None:
    """The text of a caller's last wait holds all that the caller has seen, not the handle."""
    first, second = Waits(t.driver), Waits(t.driver)
    await _quiet(first, t)
    await _quiet(second, t)
    await t.enqueue(t.job())
    assert await _woken(first, t)
    assert await _woken(second, t)


async def without_seen_the_answer_comes_at_once(t: Twin) -> None:
    for seen in (None, "", "of another store", "17/nonsense"):
        told = await asyncio.wait_for(t.driver.wait(["q"], now=t.now, timeout=600, seen=seen), PATIENCE * 2)
        assert told.woken, seen


async def a_due_job_that_cannot_run_does_not_spin(t: Twin) -> None:
    """A due job of a paused queue wakes its waiter once, not again and again."""
    await t.enqueue(t.job(run_at_us=t.now + SECOND))
    await t.configure(paused=True)
    t.advance(2)
    waits = Waits(t.driver)
    for _ in range(3):
        await _woken(waits, t, timeout=0)
        assert await t.reserve() == []
    await _quiet(waits, t)
