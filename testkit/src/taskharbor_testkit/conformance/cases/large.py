"""Large batches: no call does a part of its batch, and no page or count ends early.

A few batches of 5,000 jobs go through many calls. The calls go to the driver alone, without the model, and another handle reads
what came of them. The last calls of each case remove what it stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.bulk.stage import pack
from taskharbor.drivers.contract import (
    Ack,
    Enqueued,
    Extension,
    Fail,
    FailurePayload,
    JobFilter,
    QueueSettings,
    RetryAt,
)
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease
from taskharbor_testkit.conformance.snapshot import list_all, read_log
from taskharbor_testkit.conformance.twin import BOOM, QUEUE, Twin

SIZE = 5000
TYPES = [f"type-{n}" for n in range(200)]
RARE = "rare"
"""The type of one job, which all others come before."""
QUEUES = 300
BLOBS = 1100
LEASES = 110


async def _counts(t: Twin, queue: str = QUEUE) -> dict[JobState, int]:
    """The states that have jobs."""
    (stats,) = await t.observer.stats(now=t.now, queue=queue)
    return {state: count for state, count in stats.counts.items() if count}


async def _read(t: Twin, ids: Sequence[str]) -> list[JobRecord]:
    found = await t.observer.get(ids, now=t.now)
    lost = [job_id for job_id, job in zip(ids, found, strict=True) if job is None or job.id != job_id]
    assert not lost, f"{len(lost)} of {len(ids)} jobs are not found, the first is {lost[0]}"
    return [job for job in found if job is not None]


def _all(answers: Sequence[Any], wanted: Any) -> None:
    assert len(answers) == SIZE, f"{len(answers)} answers for {SIZE} items"
    wrong = [n for n, answer in enumerate(answers) if answer != wanted]
    assert not wrong, f"item {wrong[0]} is answered with {answers[wrong[0]]!r}, should be {wanted!r}"


def _same(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Like `==` on long lists, with a short message."""
    assert len(got) == len(wanted), f"{len(got)} of {len(wanted)}"
    wrong = next((n for n, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), None)
    assert wrong is None, f"item {wrong} is {got[wrong]!r}, should be {wanted[wrong]!r}"


async def _reserve(t: Twin, limit: int = SIZE, **how: Any) -> list[JobRecord]:
    named: dict[str, Any] = {"lease_for": 10 * SECOND, "now": t.now, "worker": "w", "limit": limit}
    return await t.driver.reserve(QUEUE, **named | how)


async def _prune_everything(t: Twin, *queues: str) -> None:
    for queue in queues:
        settings = QueueSettings(keep_done_us=0, keep_dead_us=0, keep_attempts_us=0)
        await t.driver.configure(queue, settings, now=t.now)
    t.advance(1)
    while await t.driver.prune(now=t.now, limit=10 * SIZE):
        pass


async def a_large_batch_is_stored_updated_and_removed_whole(t: Twin) -> None:
    """Another handle sees all of it or nothing. Every id, key and idempotency key of it is known afterwards."""
    names = [f"n{n}" for n in range(SIZE)]
    jobs = [t.job(id=f"id-{name}", key=name, idempotency_key=name) for name in names]
    ids = [job.id for job in jobs]
    storing = asyncio.ensure_future(t.driver.enqueue(jobs, now=t.now))
    while not storing.done():
        seen = sum((await _counts(t)).values())
        assert seen in (0, SIZE), f"{seen} of {SIZE} jobs of a call were seen before its end"
        await asyncio.sleep(0)
    _same(await storing, [Enqueued(job_id) for job_id in ids])
    assert await _counts(t) == {"ready": SIZE}
    _same([job.key for job in await _read(t, ids)], names)
    for limit in (SIZE, 1999):
        listed = await list_all(t.observer, JobFilter(), t.now, limit)
        _same([job.id for job in listed], ids[::-1])
    known = [Enqueued(job_id, existed=True) for job_id in ids]
    _same(await t.driver.enqueue(jobs, now=t.now), known)
    again = [t.job(idempotency_key=name) for name in names]
    _same(await t.driver.enqueue(again, now=t.now), known)
    updates = [t.job(key=name, payload=name.encode()) for name in names]
    _same(await t.driver.enqueue(updates, now=t.now), known)
    _same([job.payload for job in await _read(t, ids)], [name.encode() for name in names])
    _all(await t.driver.cancel_keys(names, queue=QUEUE, now=t.now), 1)
    assert await _counts(t) == {"cancelled": SIZE}
    _all(await t.driver.remove(ids), JobState.CANCELLED)
    assert await _counts(t) == {}
    _all(await t.observer.get(ids, now=t.now), None)
    for limit in (SIZE, 1999):
        rows = (await read_log(t.observer, limit=limit)).attempts
        _same(sorted(row.job_id for row in rows), sorted(ids))
    streamed: list[str] = []
    for stream in (await t.observer.log_streams()).streams:
        place = 0
        while place < stream.last:
            page = await t.observer.read_log(stream.name, after=place, until=stream.last, limit=SIZE)
            streamed += [row.job_id for row in page.attempts]
            place = page.place
    _same(sorted(streamed), sorted(ids))
    await _prune_everything(t, QUEUE)


async def a_large_claim_is_held_and_ended_whole(t: Twin) -> None:
    """All of it is published from a blob, promoted, leased in order, extended, retried, reclaimed, failed, told of, requeued,
    done and pruned."""
    await t.driver.configure(QUEUE, QueueSettings(failure_queue="failed"), now=t.now)
    jobs = [
        t.job(
            id=f"j{n}",
            type=TYPES[n % len(TYPES)] if n else RARE,
            priority=n,
            run_at_us=t.now + 1,
            max_attempts=9,
        )
        for n in range(SIZE)
    ]
    ids = [job.id for job in jobs]
    await t.driver.put_blob("staging/w/1", pack(jobs))
    added = await t.driver.publish_blobs(["staging/w/1"], series="s", number=1, portion=1, now=t.now)
    assert sum(added.values()) == SIZE
    assert await _counts(t) == {"scheduled": SIZE}
    t.advance(1)
    rare = await _reserve(t, 1, types=[RARE, "nobody"])
    assert [job.id for job in rare] == ids[:1], "the job of a type is not found behind others"
    first = await _reserve(t, 1, types=TYPES)
    assert [job.id for job in first] == ids[-1:], "not the job of the highest priority"
    held = first + await _reserve(t, types=TYPES) + rare
    _same([job.id for job in held], ids[::-1])

    beats = [Extension(job.id, job.token or "", job.id.encode()) for job in held]
    leases = await t.driver.extend_lease(beats, lease_for=60 * SECOND, now=t.now)
    _all([isinstance(lease, Lease) for lease in leases], True)
    shown = await _read(t, [job.id for job in held])
    _same([(job.token, job.expires_at_us, job.progress) for job in shown], [
        (lease.token, t.now + 60 * SECOND, lease.job_id.encode()) for lease in leases if isinstance(lease, Lease)
    ])  # fmt: skip
    retries = [RetryAt(job.id, job.token or "", t.now, 1, BOOM) for job in shown]
    _all(await t.driver.settle(retries, now=t.now), None)
    _same([(job.state, job.attempts) for job in await _read(t, ids)], [("ready", 1)] * SIZE)

    assert len(await _reserve(t)) == SIZE
    t.advance(10)
    assert len(await _reserve(t)) == SIZE, "a claim did not end all leases that were over"
    t.advance(10)
    assert await t.driver.reclaim(now=t.now, limit=SIZE) == SIZE
    _same([(job.state, job.stalls) for job in await _read(t, ids)], [("ready", 2)] * SIZE)

    fails = [Fail(job.id, job.token or "", 2, BOOM) for job in await _reserve(t)]
    _all(await t.driver.settle(fails, now=t.now), None)
    assert await _counts(t) == {"dead": SIZE}
    told = await list_all(t.observer, JobFilter(queue="failed"), t.now, SIZE)
    dead = [msgspec.json.decode(job.payload, type=FailurePayload).job_id for job in told]
    _same(sorted(dead), sorted(ids))
    _all(await t.driver.cancel([job.id for job in told], now=t.now), JobState.CANCELLED)
    assert await _counts(t, "failed") == {"cancelled": SIZE}
    assert await t.driver.purge(JobFilter(queue="failed"), limit=SIZE) == SIZE
    assert await _counts(t, "failed") == {}

    _all(await t.driver.requeue(ids, now=t.now), JobState.READY)
    assert await _counts(t) == {"ready": SIZE}
    acks = [Ack(job.id, job.token or "", job.id.encode()) for job in await _reserve(t)]
    _all(await t.driver.settle(acks, now=t.now), None)
    _same([job.result for job in await _read(t, ids)], [job_id.encode() for job_id in ids])
    await t.driver.configure(QUEUE, QueueSettings(keep_done_us=0), now=t.now, fields=["keep_done_us"])
    t.advance(1)
    assert await t.driver.prune(now=t.now, limit=SIZE) == SIZE
    assert await _counts(t) == {}
    await _prune_everything(t, QUEUE, "failed")


async def many_queues_are_counted_pruned_and_watched(t: Twin) -> None:
    """Stats name all of them, retention holds in all, and a wait wakes for the last of the most that a call may name."""
    names = [f"q{n:04}" for n in range(QUEUES)]
    jobs = [t.job(queue=name) for name in names]
    # A broker bounds the queues of one request.
    for start in range(0, QUEUES, 100):
        await t.driver.enqueue(jobs[start : start + 100], now=t.now)
    _same([stats.queue for stats in await t.observer.stats(now=t.now)], names)
    await t.driver.cancel([job.id for job in jobs], now=t.now)
    t.advance(40 * 86_400)
    assert await t.driver.prune(now=t.now, limit=SIZE) == 2 * QUEUES
    watched = [f"watched-{n}" for n in range(256)]
    seen = (await t.observer.wait(watched, now=t.now, timeout=0)).seen
    for name in (watched[-1], watched[128]):
        waiting = asyncio.ensure_future(t.observer.wait(watched, now=t.now, timeout=20, seen=seen))
        await t.driver.enqueue([t.job(queue=name)], now=t.now)
        woken = await waiting
        assert woken.woken, f"nobody woke for {name}"
        seen = (await t.observer.wait(watched, now=t.now, timeout=0, seen=woken.seen)).seen


async def many_blobs_are_listed_read_and_dropped(t: Twin) -> None:
    names = [f"staging/w/{n:04}" for n in range(BLOBS)]
    for start in range(0, BLOBS, 50):
        some = names[start : start + 50]
        await asyncio.gather(*(t.driver.put_blob(name, name.encode()) for name in some))
    _same(await t.observer.list_blobs("staging"), names)
    _same(await t.observer.read_blobs(names), [name.encode() for name in names])
    await t.driver.drop_blobs(names)
    assert await t.observer.list_blobs("staging") == []


async def all_rows_of_a_job_are_read(t: Twin) -> None:
    await t.driver.enqueue([t.job(id="often", max_attempts=LEASES + 2)], now=t.now)
    for n in range(LEASES):
        (held,) = await _reserve(t)
        assert (held.attempts, held.fence) == (n, n + 1)
        again = RetryAt("often", held.token or "", t.now, n + 1, BOOM)
        assert await t.driver.settle([again], now=t.now) == [None]
    rows = await t.observer.job_attempts("often")
    _same([row.fence for row in rows], list(range(1, LEASES + 1)))
