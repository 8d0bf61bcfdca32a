"""Leases that run out: when, what it costs the job, and when it is one too many."""

from __future__ import annotations

from typing import Any

from taskharbor.drivers.contract import EXPIRED_ERROR
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import BOOM, Twin, retry


async def _stalled(t: Twin, times: int = 1, **fields: Any) -> JobRecord:
    """A job that ran out of its lease so often."""
    job = await t.add(**fields)
    for _ in range(times):
        await t.reserve(lease=5, worker="w3")
        t.advance(5)
        assert await t.reclaim() == 1
    return job


async def a_valid_lease_is_left_alone(t: Twin) -> None:
    """So are jobs that wait, due or not."""
    await t.lease(t.job(), lease=30)
    await t.enqueue(t.job(run_at_us=t.now + SECOND), t.job())
    t.now += 30 * SECOND - 1
    async with t.unchanged():
        assert await t.reclaim() == 0


async def over_at_expires_at_exactly(t: Twin) -> None:
    held = await t.keep(await t.lease(t.job(), lease=5), b"50%", lease=10)
    t.advance(10)
    assert [await t.reclaim(), await t.reclaim()] == [1, 0]
    await t.shows(held, state="ready", stalls=1, attempts=0, run_at_us=held.run_at_us)
    unset = "lease", "worker", "reserved_at_us", "last_error", "failed_at_us", "finished_at_us", "progress"
    await t.shows(held, **dict.fromkeys(unset))


async def the_row_tells_of_the_lost_lease(t: Twin) -> None:
    held = await t.lease(t.job(), lease=30, worker="w3")
    t.advance(45)
    await t.reclaim()
    await t.logged(held, outcome="expired", state="ready", worker="w3", fence=1, ended_at_us=t.now)
    await t.logged(held, reserved_at_us=held.reserved_at_us, lease_expires_at_us=held.expires_at_us)
    await t.logged(held, error_type=EXPIRED_ERROR.type, error_message=EXPIRED_ERROR.message)


async def a_stall_spends_an_execution(t: Twin) -> None:
    """Dead when attempts + stalls reach max_attempts, with last_error."""
    held = await t.lease(t.job(max_attempts=3), lease=5)
    await t.settle(retry(held, t.now))
    for _ in range(2):
        await t.reserve(lease=5)
        t.advance(5)
        await t.reclaim()
    await t.shows(held, state="dead", attempts=1, stalls=2)
    await t.shows(held, last_error=EXPIRED_ERROR.text, finished_at_us=t.now)
    await t.logged(held, outcome="expired", state="dead")
    assert (await t.stats()).dead_total == 1


@parametrised
async def _after_stalls(t: Twin, /, times: int, wanted: str, **limits: int) -> None:
    await t.shows(await _stalled(t, times, **limits), state=wanted, stalls=times)


_after_stalls("one_execution_allowed_means_the_first_stall_kills", 1, "dead", max_attempts=1)
_after_stalls("one_execution_left_after_the_last_but_one", 2, "ready", max_attempts=3)
_after_stalls("one_stall_left_under_max_stalls", 1, "ready", max_attempts=99, max_stalls=2)
_after_stalls("max_stalls_bounds_apart_from_attempts", 2, "dead", max_attempts=99, max_stalls=2)
_after_stalls("max_stalls_zero_is_no_bound", 5, "ready", max_attempts=99, max_stalls=0)
_after_stalls("stalls_spend_no_attempt_under_max_stalls", 3, "ready", max_attempts=2, max_stalls=4)


async def failures_do_not_count_as_stalls(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=99, max_stalls=2), lease=5)
    for _ in range(3):
        await t.settle(retry(held, t.now))
        (held,) = await t.reserve(lease=5)
    t.advance(5)
    await t.reclaim()
    await t.shows(held, state="ready", attempts=3, stalls=1, last_error=BOOM.text)


async def attempts_bound_apart_from_stalls(t: Twin) -> None:
    """A stall ends a job whose attempts are spent already."""
    held = await t.lease(t.job(max_attempts=2, max_stalls=3), lease=5)
    for spent in (1, 2):
        await t.settle(retry(held, t.now, attempts=spent))
        (held,) = await t.reserve(lease=5)
    t.advance(5)
    await t.reclaim()
    await t.shows(held, state="dead", attempts=2, stalls=1)


async def only_the_queue_asked_for(t: Twin) -> None:
    """Every queue where none is named."""
    held = [await t.lease(t.job(queue=queue), queue=queue, lease=5) for queue in "abc"]
    t.advance(5)
    assert await t.reclaim(queue="a") == 1
    assert await t.states(*held) == "ready inflight inflight"
    assert await t.reclaim() == 2


async def at_most_limit_leases(t: Twin) -> None:
    await t.hold(5, lease=5)
    t.advance(5)
    assert [await t.reclaim(limit=limit) for limit in (0, 2, 2, 2)] == [0, 2, 2, 1]


async def mixed_fates_in_one_call(t: Twin) -> None:
    jobs = lives, dies, cancelled, valid = t.job(), t.job(max_attempts=1), t.job(), t.job(priority=-1)
    await t.enqueue(lives, dies, cancelled, valid)
    await t.reserve(3, lease=5)
    await t.reserve(1, lease=60)
    await t.cancel(cancelled.id)
    t.advance(5)
    assert await t.reclaim() == 3
    assert await t.states(*jobs) == "ready dead cancelled inflight"
