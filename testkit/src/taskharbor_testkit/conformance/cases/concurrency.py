"""Many clients at once: whatever races, nothing is lost, nothing leased twice, no limit exceeded.

A logical clock that moves on every call stamps each lease, so overlaps can be read off the attempt log afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, QueueSettings, QueueStats, Settlement
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros
from taskharbor_testkit.conformance.invariants import InvariantBroken, check_no_overlap, most_at_once, spans
from taskharbor_testkit.conformance.snapshot import Snapshot, take
from taskharbor_testkit.conformance.twin import Twin, ack, fail, release, retry

JOBS = 200
WORKERS = 8
LEASE: Micros = 3600 * SECOND
PATIENCE = 30.0
"""Seconds until a run that cannot end counts as failed."""


def _ticking(t: Twin) -> Callable[[], Micros]:
    def tick() -> Micros:
        t.now += 1
        return t.now

    return tick


async def _produce(driver: Driver, jobs: list[JobRecord], tick: Callable[[], Micros]) -> None:
    for start in range(0, len(jobs), 5):
        await driver.enqueue(jobs[start : start + 5], now=tick())
        await asyncio.sleep(0)


async def _work(
    driver: Driver, worker: str, tick: Callable[[], Micros], is_over: Callable[[], bool], dice: random.Random
) -> list[JobRecord]:
    """Reserve, hold for a moment, settle one way or another, until all jobs have ended."""
    held: list[JobRecord] = []
    while not is_over():
        batch = await driver.reserve(
            "q", limit=dice.randint(1, 6), lease_for=LEASE, now=tick(), worker=worker
        )
        held += batch
        await asyncio.sleep(0)
        settlements = [_some_end(job, dice, tick()) for job in batch]
        for error in await driver.settle(settlements, now=tick()):
            assert error is None, f"a valid lease was refused: {error!r}"
    return held


def _some_end(job: JobRecord, dice: random.Random, now: Micros) -> Settlement:
    roll = dice.random()
    if roll < 0.7 or job.fence > 3:
        return ack(job)
    return release(job) if roll < 0.85 else retry(job, now)


async def _run(t: Twin, jobs: list[JobRecord], settings: QueueSettings | None = None) -> Snapshot:
    """All producers and workers at once, until every job has ended; then everything visible."""
    tick = _ticking(t)
    if settings is not None:
        await t.driver.configure("q", settings, now=tick())
    handles = [await t.store.connect() for _ in range(4)]
    ended = False

    async def produce_and_watch() -> None:
        nonlocal ended
        await asyncio.gather(*(_produce(handles[n], jobs[n::4], tick) for n in range(4)))
        while not ended:
            (stats,) = await t.driver.stats(now=tick(), queue="q")
            ended = _all_ended(stats)
            await asyncio.sleep(0.005)

    workers = [_work(handles[n % 4], f"w{n}", tick, lambda: ended, random.Random(n)) for n in range(WORKERS)]
    async with asyncio.timeout(PATIENCE):
        _, held = await asyncio.gather(produce_and_watch(), asyncio.gather(*workers))
    shown = await take(t.driver, tick())
    check_no_overlap(spans(shown.rows, shown.jobs))
    granted = [(job.id, job.fence) for worker in held for job in worker]
    if len(set(granted)) != len(granted):
        raise InvariantBroken("noDoubleLease", "two workers were granted the same lease")
    logged = {(row.job_id, row.fence) for row in shown.rows if row.reserved_at_us is not None}
    if set(granted) != logged:
        raise InvariantBroken("everyLeaseLogged", f"{set(granted) ^ logged}")
    return shown


def _all_ended(stats: QueueStats) -> bool:
    living = sum(count for state, count in stats.counts.items() if not state.is_terminal)
    return not living and stats.done_total + stats.cancelled_total == sum(stats.counts.values())


async def nothing_is_lost_and_nothing_runs_twice(t: Twin) -> None:
    jobs = [t.job(priority=n % 3) for n in range(JOBS)]
    shown = await _run(t, jobs)
    assert {job.id for job in shown.jobs} == {job.id for job in jobs}
    assert {job.state for job in shown.jobs} == {JobState.DONE}
    assert shown.stats[0].done_total == JOBS


async def w_is_never_exceeded(t: Twin) -> None:
    shown = await _run(t, [t.job() for _ in range(JOBS)], QueueSettings(max_inflight=3))
    most = most_at_once(spans(shown.rows, shown.jobs))
    if most > 3:
        raise InvariantBroken("wNeverExceeded", f"{most} valid leases at one instant, W is 3")


async def a_key_is_never_inflight_twice(t: Twin) -> None:
    """The leases of each key are judged one after the other, as those of each job are."""
    await _run(t, [t.job(key=f"k{n % 5}") for n in range(JOBS)])


async def a_large_batch_is_seen_whole_or_not_at_all(t: Twin) -> None:
    """Enqueued or settled: another client never sees a part of it."""
    watcher, jobs = await t.store.connect(), [t.job() for _ in range(300)]

    async def watched(call: Awaitable[object], *seen: tuple[int, int]) -> None:
        task = asyncio.ensure_future(call)
        while not task.done():
            (stats,) = await watcher.stats(now=t.now, queue="q")
            assert (stats.counts[JobState.READY], stats.counts[JobState.DONE]) in seen, stats
            await asyncio.sleep(0)
        await task

    await watched(t.driver.enqueue(jobs, now=t.now), (0, 0), (300, 0))
    held = await t.driver.reserve("q", limit=300, lease_for=LEASE, now=t.now, worker="w")
    await watched(t.driver.settle([ack(job) for job in held], now=t.now), (0, 0), (0, 300))


async def the_same_batch_from_many_clients_is_stored_once(t: Twin) -> None:
    jobs = [t.job(idempotency_key=f"i{n}") for n in range(20)]
    handles = [await t.store.connect() for _ in range(4)]
    answers = await asyncio.gather(*(handle.enqueue(jobs, now=t.now) for handle in handles for _ in range(2)))
    assert sum(not one.existed for answer in answers for one in answer) == 20
    shown = await take(t.driver, t.now)
    assert len(shown.jobs) == 20


async def one_key_from_many_clients_is_one_waiting_job(t: Twin) -> None:
    handles = [await t.store.connect() for _ in range(4)] * 3
    for number, fields in enumerate(({"key": "k"}, {"idempotency_key": "i"}), 1):
        answers = await asyncio.gather(*(one.enqueue([t.job(**fields)], now=t.now) for one in handles))
        assert len({one.id for (one,) in answers}) == 1
        assert sum(not one.existed for (one,) in answers) == 1
        assert len((await take(t.driver, t.now)).jobs) == number


async def one_job_many_claimers_one_lease(t: Twin) -> None:
    handles = [await t.store.connect() for _ in range(4)] * 2
    for n in range(10):
        await t.driver.enqueue([t.job()], now=t.now)
        granted = sum(await asyncio.gather(*(_claim(handle, t.now) for handle in handles)))
        if granted != 1:
            raise InvariantBroken("noDoubleLease", f"round {n}: one job, granted {granted} times")


async def one_expired_lease_many_sweepers_one_stall(t: Twin) -> None:
    """Reclaiming is safe under concurrency, by sweepers and by claimers alike."""
    await t.enqueue(*[t.job() for _ in range(5)])
    await t.reserve(5, lease=5)
    t.advance(5)
    handles = [await t.store.connect() for _ in range(4)]
    counts = await asyncio.gather(
        *(handle.reclaim(now=t.now) for handle in handles),
        *(_claim(handle, t.now) for handle in handles),
    )
    assert sum(counts[:4]) <= 5
    if t.driver.capabilities.passes_over_busy:
        counts.append(await _claim(t.driver, t.now))
    shown = await take(t.driver, t.now)
    assert [job.stalls for job in shown.jobs] == [1] * 5
    assert sum(counts[4:]) == 5 == len(shown.rows)


async def _claim(driver: Driver, now: Micros) -> int:
    return len(await driver.reserve("q", limit=5, lease_for=LEASE, now=now, worker="w"))


async def one_lease_settled_from_many_sides_ends_once(t: Twin) -> None:
    held = await t.lease(t.job())
    ends: list[Settlement] = [release(held), retry(held, t.now), release(held)]
    handles = [await t.store.connect() for _ in ends]
    calls = (handle.settle([end], now=t.now) for handle, end in zip(handles, ends, strict=True))
    kinds = [type(answer).__name__ for (answer,) in await asyncio.gather(*calls)]
    assert sorted(kinds) == ["JobNotInflight", "JobNotInflight", "NoneType"]
    assert len(await t.rows(held.id)) == 1


async def settle_and_enqueue_of_one_key_leave_no_orphan(t: Twin) -> None:
    """If the enqueue comes first, the new job is blocked and then freed; else it simply waits. It is never stuck."""
    handles = [await t.store.connect() for _ in range(2)]
    for settlement in (ack, fail, release, lambda job: retry(job, t.now)) * 2:
        held = await t.lease(t.job(key="k"))
        await t.together(
            (handles[0], op.Settle([settlement(held)], t.now)),
            (handles[1], op.Enqueue([t.job(key="k", payload=b"new")], t.now)),
        )
        (waiting,) = await t.reserve(9)
        await t.settle(ack(waiting))
        assert await t.reserve(9) == []


async def racing_calls_have_some_serial_order(t: Twin) -> None:
    """Several kinds of calls at once: some order of them explains every answer and all that is visible."""
    handles = [await t.store.connect() for _ in range(4)]
    await t.configure(max_inflight=4, failure_queue="failed")
    for n in range(8):
        await t.enqueue(*[t.job(key=f"k{n % 2}"), t.job(max_attempts=1), t.job()])
        held = await t.reserve(2, lease=2)
        settlements: list[Settlement] = [fail(job) if n % 2 else retry(job, t.now) for job in held]
        # A reserve that sees a part of the batch is seen to do so: these go before all others.
        new = [t.job(priority=9) for _ in range(2)]
        await t.together(
            (handles[0], op.Reserve("q", 3, SECOND, t.now, "w")),
            (handles[1], op.Settle(settlements, t.now)),
            (handles[2], op.Enqueue([t.job(key=f"k{n % 2}", payload=b"%d" % n), *new], t.now)),
            (handles[3], op.CancelJobs([job.id for job in held], t.now)),
        )
        t.advance(1)


async def a_log_reader_misses_no_row_of_concurrent_writers(t: Twin) -> None:
    """Never skips a row that commits late, even where numbers are drawn before the commit."""
    handles = [await t.store.connect() for _ in range(4)]
    await t.driver.enqueue([t.job() for _ in range(120)], now=t.now)
    seen: list[int] = []
    cursor: str | None = None
    writing = True

    async def write(driver: Driver) -> None:
        while batch := await driver.reserve("q", limit=2, lease_for=LEASE, now=t.now, worker="w"):
            await driver.settle([ack(job) for job in batch], now=t.now)

    async def read() -> None:
        nonlocal cursor
        while True:
            was_writing = writing
            page = await t.driver.read_attempts(after=cursor, limit=7)
            seen.extend(row.seq for row in page.attempts)
            cursor = page.cursor
            if not page.attempts and not was_writing:
                return
            await asyncio.sleep(0)

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(handle) for handle in handles))
    writing = False
    await asyncio.wait_for(reader, 60)
    assert len(seen) == len(set(seen)) == 120
    again = await t.driver.read_attempts(limit=1000)
    assert seen == [row.seq for row in again.attempts], "the log has another order when it is read again"
