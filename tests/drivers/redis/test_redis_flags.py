"""Keyed jobs line by line: one waiting and one active per key, flags in every combination, and the structures behind them."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from drivers.redis.redis_shelf import BOOM, LEASE, NOW, Shelf, ack, fail, shelf, token
from taskharbor.drivers.contract import Extension, JobFilter, QueueSettings, Release, Retry
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros, UpdateFlags, UpdateRunAt

COMBINATIONS = [
    UpdateFlags(payload, run_at, retry, reset)
    for payload, run_at, retry, reset in itertools.product(
        (True, False), get_args(UpdateRunAt), (True, False), (True, False)
    )
]
INSTANTS = {"later": NOW + 500 * SECOND, "earlier": NOW - 500 * SECOND}

each_combination = pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
each_instant = pytest.mark.parametrize("instant", INSTANTS)

WHAT = {
    "type": "sms",
    "payload": b"\xff new",
    "codec": "raw",
    "headers": {"trace": "2"},
    "timeout_us": 7 * SECOND,
}
LIMITS = {"max_attempts": 9, "max_stalls": 4, "backoff_min_us": 2 * SECOND, "backoff_max_us": 3 * SECOND}
FIRST: dict[str, Any] = {
    "type": "mail", "payload": b"old", "codec": "json", "headers": {"trace": "1"}, "timeout_us": 0,
    "max_attempts": 5, "max_stalls": 3, "backoff_min_us": SECOND, "backoff_max_us": 60 * SECOND,
}  # fmt: skip


def _first(on: Shelf, **fields: Any) -> JobRecord:
    return on.job(key="k", **(FIRST | fields))


def _newer(on: Shelf, flags: UpdateFlags | None, run_at: Micros) -> JobRecord:
    return on.job(key="k", update=flags, run_at_us=run_at, **WHAT, **LIMITS)


def _is_as_the_flags_say(
    job: JobRecord, flags: UpdateFlags, was_due: Micros, asked: Micros, counts: tuple[int, int]
) -> None:
    """Said once more in plain words, without the driver's or the model's help."""
    for field, value in WHAT.items():
        assert getattr(job, field) == (value if flags.payload else FIRST[field]), field
    for field, value in LIMITS.items():
        assert getattr(job, field) == (value if flags.retry else FIRST[field]), field
    due = {"yes": asked, "no": was_due, "later": max(was_due, asked), "earlier": min(was_due, asked)}
    assert job.run_at_us == due[flags.run_at]
    assert (job.attempts, job.stalls) == ((0, 0) if flags.reset_counts else counts)


async def _waiting_with_counts(on: Shelf) -> JobRecord:
    """A job that waits for its next try, after one failure and one expired lease."""
    held = await on.lease(_first(on))
    await on.settle(Retry(held.id, token(held), on.now, 1, BOOM))
    await on.reserve()
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now) == 1
    job = await on.get(held.id)
    assert (job.attempts, job.stalls, job.state) == (1, 1, JobState.READY)
    return job


# -- dispatch onto a job that waits -----------------------------------------------------------------------


@each_combination
@each_instant
async def test_an_enqueue_changes_the_waiting_job_as_its_flags_say(flags: UpdateFlags, instant: str) -> None:
    async with shelf() as on:
        job = await _waiting_with_counts(on)
        newer = _newer(on, flags, INSTANTS[instant])
        assert await on.enqueue(newer) == [job.id]
        changed = await on.get(job.id)
        _is_as_the_flags_say(changed, flags, job.run_at_us, newer.run_at_us, (1, 1))
        assert on.ask("ZRANGE", "waiting", 0, -1, "WITHSCORES") == [
            job.id.encode(),
            str(changed.run_at_us).encode(),
        ]
        is_due = changed.run_at_us <= on.now
        assert on.ask("ZCARD", "ready") == is_due
        assert on.ask("ZCARD", "scheduled") == (not is_due)
        claimed = await on.reserve(types=[changed.type])
        assert [one.id for one in claimed] == ([job.id] if is_due else [])


# -- dispatch onto a job that is blocked ------------------------------------------------------------------


@each_combination
@each_instant
async def test_an_enqueue_changes_the_blocked_job_as_its_flags_say(flags: UpdateFlags, instant: str) -> None:
    async with shelf() as on:
        await on.lease(on.job(key="k"))
        blocked = _first(on)
        newer = _newer(on, flags, INSTANTS[instant])
        await on.enqueue(blocked)
        assert await on.enqueue(newer) == [blocked.id]
        changed = await on.get(blocked.id)
        assert changed.state is JobState.BLOCKED
        _is_as_the_flags_say(changed, flags, blocked.run_at_us, newer.run_at_us, (0, 0))
        assert on.ask("ZSCORE", "waiting", blocked.id) == str(-changed.run_at_us).encode()


@each_combination
async def test_a_blocked_job_gathers_the_flags_of_all_who_came(flags: UpdateFlags) -> None:
    """Booleans by "or", run_at the newer unless that is "no": no wish is dropped."""

    async with shelf() as on:
        keys = [f"k{n}" for n in range(len(COMBINATIONS))]
        await on.enqueue(*[on.job(key=key) for key in keys])
        assert len(await on.reserve(len(keys))) == len(keys)
        blocked = await on.enqueue(*[on.job(key=key, update=flags) for key in keys])
        await on.enqueue(
            *[on.job(key=key, update=newer) for key, newer in zip(keys, COMBINATIONS, strict=True)]
        )
        stored = await on.driver.get(blocked, now=on.now)
        for job, newer in zip(stored, COMBINATIONS, strict=True):
            assert job is not None
            assert job.update is not None
            assert job.update.payload == (flags.payload or newer.payload)
            assert job.update.retry == (flags.retry or newer.retry)
            assert job.update.reset_counts == (flags.reset_counts or newer.reset_counts)
            assert job.update.run_at == (flags.run_at if newer.run_at == "no" else newer.run_at)


async def test_without_flags_the_default_ones_hold() -> None:
    async with shelf() as on:
        job = await _waiting_with_counts(on)
        await on.enqueue(_newer(on, None, INSTANTS["later"]))
        _is_as_the_flags_say(await on.get(job.id), UpdateFlags(), job.run_at_us, 0, (1, 1))
        await on.reserve()
        await on.enqueue(blocked := on.job(key="k"))
        assert (await on.get(blocked.id)).update == UpdateFlags()


# -- do_retry: the blocked job is merged into the one that goes back --------------------------------------


async def _held_with_counts(on: Shelf) -> JobRecord:
    job = await _waiting_with_counts(on)
    (held,) = await on.reserve()
    assert (held.id, held.fence) == (job.id, 3)
    return held


async def _has_absorbed(on: Shelf, survivor: JobRecord, blocked: JobRecord) -> None:
    merged = await on.get(blocked.id)
    assert (merged.state, merged.merged_into) == (JobState.CANCELLED, survivor.id)
    assert on.ask("HGETALL", "waiting_key") == [b"k", survivor.id.encode()]
    assert on.ask("HLEN", "active_key") == 0
    assert on.ask("HKEYS", "waiting_job") == [survivor.id.encode()]
    assert on.ask("ZCARD", "waiting") == 1
    assert [row.outcome.value for row in await on.driver.job_attempts(blocked.id)] == ["merged"]


@each_combination
@each_instant
async def test_a_retry_absorbs_the_blocked_job_by_its_flags(flags: UpdateFlags, instant: str) -> None:
    async with shelf() as on:
        held = await _held_with_counts(on)
        blocked = _newer(on, flags, INSTANTS[instant])
        await on.enqueue(blocked)
        next_run_at = on.now + 60 * SECOND
        await on.settle(Retry(held.id, token(held), next_run_at, 2, BOOM))
        survivor = await on.get(held.id)
        # Its own change first, then the blocked one's wishes.
        _is_as_the_flags_say(survivor, flags, next_run_at, blocked.run_at_us, (2, 1))
        await _has_absorbed(on, survivor, blocked)


@each_combination
@each_instant
async def test_a_stall_absorbs_the_blocked_job_by_its_flags(flags: UpdateFlags, instant: str) -> None:
    async with shelf() as on:
        held = await _held_with_counts(on)
        blocked = _newer(on, flags, INSTANTS[instant])
        await on.enqueue(blocked)
        on.now += LEASE
        assert await on.driver.reclaim(now=on.now) == 1
        survivor = await on.get(held.id)
        _is_as_the_flags_say(survivor, flags, held.run_at_us, blocked.run_at_us, (1, 2))
        await _has_absorbed(on, survivor, blocked)


@each_combination
@each_instant
async def test_a_release_absorbs_the_blocked_job_by_its_flags(flags: UpdateFlags, instant: str) -> None:
    async with shelf() as on:
        held = await _held_with_counts(on)
        blocked = _newer(on, flags, INSTANTS[instant])
        await on.enqueue(blocked)
        await on.settle(Release(held.id, token(held)))
        survivor = await on.get(held.id)
        _is_as_the_flags_say(survivor, flags, held.run_at_us, blocked.run_at_us, (1, 1))
        await _has_absorbed(on, survivor, blocked)


# -- the structures ---------------------------------------------------------------------------------------


async def test_the_score_of_a_waiting_job_is_its_run_at() -> None:
    async with shelf() as on:
        job = on.job(run_at_us=on.now + 12_345)
        await on.enqueue(job)
        assert on.ask("ZSCORE", "waiting", job.id) == str(on.now + 12_345).encode()
        assert on.ask("HEXISTS", "waiting_job", job.id)


async def test_dequeuing_moves_the_hash_and_names_the_worker() -> None:
    """ZREM from waiting, waiting_job becomes active_job, id:worker in active until the deadline."""

    async with shelf() as on:
        held = await on.lease(on.job(key="k"))
        assert on.ask("ZCARD", "waiting") == on.ask("HLEN", "waiting_job") == on.ask("ZCARD", "ready") == 0
        assert on.ask("HKEYS", "active_job") == [held.id.encode()]
        assert on.ask("ZRANGE", "active", 0, -1, "WITHSCORES") == [
            f"{held.id}:w1".encode(),
            str(on.now + LEASE).encode(),
        ]
        assert on.ask("HGETALL", "active_key") == [b"k", held.id.encode()]


@pytest.mark.parametrize("job_id", ["a:b", "a%3Ab", "%", ":", "a:b:c%25"])
async def test_a_colon_in_an_id_is_not_taken_for_the_one_behind_it(job_id: str) -> None:
    async with shelf() as on:
        others = ["a", "a:b", "a%3Ab", "a%253Ab"]
        jobs = [on.job(id=one) for one in dict.fromkeys([job_id, *others])]
        await on.enqueue(*jobs)
        held = [*await on.reserve(2), *await on.reserve(10)]
        assert on.ask("ZCARD", "active") == len(jobs)
        await on.settle(ack(held[0]))
        on.now += LEASE
        assert await on.driver.reclaim(now=on.now) == len(jobs) - 1
        again = await on.reserve(10)
        assert [job.id for job in again] == [job.id for job in held[1:]]
        assert {job.stalls for job in again} == {1}


async def test_a_heartbeat_moves_the_deadline_of_what_exists_and_adds_nothing() -> None:
    async with shelf() as on:
        held = await on.lease(on.job())
        beat = Extension(held.id, token(held))
        await on.driver.extend_lease([beat], lease_for=2 * LEASE, now=on.now)
        assert on.ask("ZSCORE", "active", f"{held.id}:w1") == str(on.now + 2 * LEASE).encode()
        await on.settle(ack(held))
        await on.driver.extend_lease([beat], lease_for=2 * LEASE, now=on.now)
        assert on.ask("ZCARD", "active") == 0


@pytest.mark.parametrize("run_at", [NOW, NOW + SECOND, 1, 0, -5])
async def test_a_blocked_job_has_a_negative_score_that_flips_when_the_other_ends(run_at: Micros) -> None:
    async with shelf() as on:
        held = await on.lease(on.job(key="k"))
        blocked = on.job(key="k", run_at_us=run_at)
        await on.enqueue(blocked)
        score = max(run_at, 1)
        assert on.ask("ZSCORE", "waiting", blocked.id) == str(-score).encode()
        assert (await on.get(blocked.id)).state is JobState.BLOCKED
        (stats,) = await on.driver.stats(now=on.now, queue="q")
        assert stats.counts[JobState.BLOCKED] == 1
        assert await on.reserve(10) == []
        await on.settle(ack(held))
        assert on.ask("ZSCORE", "waiting", blocked.id) == str(score).encode()
        freed = await on.get(blocked.id)
        assert freed.run_at_us == run_at
        assert freed.state is (JobState.SCHEDULED if run_at > on.now else JobState.READY)


async def test_cancelling_a_waiting_job_takes_it_out_of_set_and_hash() -> None:
    async with shelf() as on:
        jobs = [on.job(key="k"), on.job(), on.job(run_at_us=on.now + SECOND)]
        await on.enqueue(*jobs)
        await on.driver.cancel([job.id for job in jobs], now=on.now)
        for family in ("waiting", "waiting_job", "waiting_key", "ready", "scheduled"):
            assert on.server.execute("EXISTS", f"{on.prefix}{{q}}:{family}") == 0, family


async def test_a_failure_at_the_last_attempt_goes_to_the_fail_queue() -> None:
    """Original id, data and error, by failure and by stall."""

    async with shelf() as on:
        await on.driver.configure("q", QueueSettings(failure_queue="q-fail"), now=on.now)
        await on.enqueue(on.job(payload=b"\x00one"), on.job(payload=b"two", max_stalls=1))
        failing, _ = await on.reserve(2)
        await on.settle(fail(failing))
        on.now += LEASE
        await on.driver.reclaim(now=on.now)
        page = await on.driver.list_jobs(JobFilter(queue="q-fail"), now=on.now)
        assert len(page.jobs) == 2
        assert on.ask("LLEN", "outbox") == 0


async def test_a_sweep_takes_as_many_as_it_may_in_portions() -> None:
    async with shelf() as on:
        await on.enqueue(*[on.job() for _ in range(350)])
        assert len(await on.reserve(350)) == 350
        on.now += LEASE
        assert await on.driver.reclaim(now=on.now, limit=120) == 120
        assert on.ask("ZCARD", "active") == 230
        assert await on.driver.reclaim(now=on.now, limit=1000) == 230
        assert on.ask("ZCARD", "ready") == 350
