"""Numbers: exact at the ends of their ranges, ordered as numbers, negative and zero like any other.

A float, a text, a smaller column or an `or` in place of `is None` shows here.
"""

from __future__ import annotations

import random
from typing import Any

from taskharbor.drivers.contract import JobFilter, Settlement
from taskharbor.jobs import LATEST, MAX_PRIORITY, MAX_TRIES, SECOND, JobRecord
from taskharbor_testkit.conformance.twin import START, Twin, ack, fail, release, retry

_SIZES = (1, 9, 10, 999, 1000, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**40 + 1, 2**50 + 1, 2**52 + 1)
INSTANTS = (-LATEST, 1 - LATEST, *(-n for n in _SIZES[::-1]), 0, *_SIZES, LATEST - 1, LATEST)
DURATIONS = tuple(one for one in INSTANTS if one >= 0)
PRIORITIES = (MAX_PRIORITY, 1000, 100, 20, 10, 9, 2, 1, 0, -1, -2, -9, -10, -20, -100, -MAX_PRIORITY)
TRIES = (1, 255, 256, 2**15, 2**16, MAX_TRIES - 1, MAX_TRIES)


def _shuffled(jobs: list[JobRecord]) -> list[JobRecord]:
    return random.Random(7).sample(jobs, len(jobs))


async def every_instant_is_kept_exactly(t: Twin) -> None:
    """Of a job, a retry and a snooze; and every duration of a job."""
    spans = [DURATIONS[n % len(DURATIONS)] for n in range(len(INSTANTS))]
    await t.enqueue(
        *(
            t.job(run_at_us=at, created_at_us=-at, timeout_us=span, backoff_min_us=span, backoff_max_us=span)
            for at, span in zip(INSTANTS, spans, strict=True)
        )
    )
    held = await t.hold(2 * len(INSTANTS), queue="other")
    ends: list[Settlement] = [retry(job, at) for job, at in zip(held, INSTANTS, strict=False)]
    ends += [release(job, at) for job, at in zip(held[len(INSTANTS) :], INSTANTS, strict=True)]
    assert await t.settle(*ends) == [None] * len(held)


async def instants_are_ordered_as_numbers(t: Twin) -> None:
    """To the microsecond, before 1970 and after."""
    instants = sorted(
        {*INSTANTS, *(START - n for n in _SIZES[:6])} - {one for one in INSTANTS if one > START}
    )
    await t.enqueue(*_shuffled([t.job(run_at_us=at) for at in instants]))
    assert [job.run_at_us for job in await t.reserve(len(instants))] == instants


async def priorities_are_ordered_as_numbers(t: Twin) -> None:
    await t.enqueue(*_shuffled([t.job(priority=priority) for priority in PRIORITIES]))
    assert [job.priority for job in await t.reserve(len(PRIORITIES))] == list(PRIORITIES)


async def every_count_is_kept_exactly(t: Twin) -> None:
    """Bounds of tries and stalls, counted failures, and a limit of leases."""
    jobs = [t.job(max_attempts=tries, max_stalls=tries) for tries in TRIES]
    await t.enqueue(*jobs)
    held = await t.reserve(len(TRIES))
    ends = [retry(job, t.now, attempts=tries) for job, tries in zip(held, TRIES, strict=True)]
    assert await t.settle(*ends) == [None] * len(TRIES)
    for limit in (2**15, 2**31 - 1):
        await t.change(max_inflight=limit)
        assert len(await t.reserve(2)) == 2


async def every_length_of_a_lease_is_kept_exactly(t: Twin) -> None:
    """From a microsecond to most of a day, granted and extended, and over at its very end."""
    for length in (1, 999, 1001, 86_399 * SECOND + 1):
        held = await t.lease(t.job(), lease=length / SECOND)
        assert held.expires_at_us == t.now + length
        held = await t.keep(held, lease=(length + 1) / SECOND)
        assert held.expires_at_us == t.now + length + 1
        t.now += length
        assert await t.reclaim() == 0
        t.now += 1
        assert await t.reclaim() == 1
        await t.cancel(held.id)


async def retention_counts_in_microseconds(t: Twin) -> None:
    for field, end in (("keep_done_us", ack), ("keep_dead_us", fail)):
        kept: dict[str, Any] = {field: 1500, "keep_attempts_us": None}
        await t.configure(**kept)
        await t.settle(end(await t.lease(t.job())))
        t.now += 1499
        assert await t.prune() == 0
        t.now += 1
        assert await t.prune() == 1
    await t.configure(keep_attempts_us=1500)
    assert await t.prune() == 2


async def a_clock_may_start_at_one(t: Twin) -> None:
    """The first instant of a clock: leased, ended and kept from then on."""
    t.now = 1
    await t.configure(max_inflight=1, keep_done_us=SECOND, keep_dead_us=SECOND, keep_attempts_us=SECOND)
    jobs = [t.job(run_at_us=at) for at in (1, 0, 2, -1)]
    await t.enqueue(*jobs)
    for job, end in ((jobs[3], ack), (jobs[1], fail), (jobs[0], ack)):
        held = await t.lease()
        assert (held.id, held.reserved_at_us) == (job.id, 1)
        await t.settle(end(held))
        await t.shows(held, finished_at_us=1)
    assert await t.reserve() == []
    t.now = SECOND
    assert await t.prune() == 0
    t.now = SECOND + 1
    assert await t.prune() == 6


async def zero_is_a_time_like_any_other(t: Twin) -> None:
    """Of a retry, a snooze, a requeue, a head and a filter."""
    t.now = 5
    held = await t.lease(t.job(max_attempts=9))
    await t.settle(retry(held, 0))
    assert (await t.stats()).head_run_at_us == 0
    for at in (0, -5):
        await t.settle(release(await t.lease(), at))
        await t.shows(held, state="ready", run_at_us=at)
        await t.settle(fail(await t.lease()))
        await t.requeue(held.id, run_at=at)
        await t.shows(held, state="ready", run_at_us=at)
    await t.settle(fail(await t.lease()))
    page = await t.observer.list_jobs(JobFilter(finished_before_us=0), now=t.now)
    assert page.jobs == []
    assert await t.purge(finished_before_us=0) == 0
    assert await t.purge(finished_before_us=6) == 1
