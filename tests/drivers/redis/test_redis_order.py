"""Who comes next: priority, then run_at, then acceptance, in one line per type, whatever the types are called."""

from __future__ import annotations

import itertools
import random

import pytest

from drivers.redis.redis_shelf import Shelf, ack, fail, shelf
from records import NOW
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.redis.library import TEXT, Library
from taskharbor.drivers.redis.store import Store
from taskharbor.jobs import LATEST, MAX_PRIORITY, SECOND, JobState

TRAPS = ["a", "a\x01", "a\x01b", "ab", "b", "\x01", "\x01\x02", "\xff\xff", "ÿ", "aa", "A", "x" * 200]
"""Types that begin like each other, or like what stands between a type and a place in line."""


@pytest.mark.parametrize("seed", range(3))
async def test_jobs_are_claimed_by_priority_run_at_and_acceptance(on: Shelf, seed: int) -> None:
    dice = random.Random(seed)
    jobs = [
        on.job(
            type=dice.choice(TRAPS[:6]),
            priority=dice.choice((0, 0, 1, -1, MAX_PRIORITY, -MAX_PRIORITY)),
            run_at_us=NOW - dice.choice((0, 0, 1, 2, NOW - 1)),
        )
        for _ in range(200)
    ]
    for start in range(0, 200, 40):
        await on.enqueue(*jobs[start : start + 40], new_ids=dice.random() < 0.5)
    claimed: list[str] = []
    while held := await on.reserve(dice.randint(1, 30)):
        claimed += [job.id for job in held]
    assert claimed == [job.id for job in sorted(jobs, key=lambda job: (-job.priority, job.run_at_us))]


@pytest.mark.parametrize("seed", range(3))
async def test_a_claim_by_type_takes_those_types_and_no_others(on: Shelf, seed: int) -> None:
    dice = random.Random(seed)
    jobs = [on.job(type=name, priority=dice.randint(-1, 1)) for name in dice.choices(TRAPS, k=150)]
    await on.enqueue(*jobs, new_ids=True)
    left = sorted(jobs, key=lambda job: -job.priority)
    while left:
        types = dice.sample(TRAPS, dice.randint(1, 4))
        limit = dice.randint(1, 20)
        wanted = [job for job in left if job.type in types][:limit]
        held = await on.reserve(limit, types=[*types, types[0], "nobody"])
        assert [job.id for job in held] == [job.id for job in wanted]
        left = [job for job in left if job not in wanted]
    assert on.ask("EXISTS", "ready") == 0


async def test_what_is_not_due_to_this_caller_is_passed_over_in_every_rank(on: Shelf) -> None:
    """A producer whose clock is ahead put it in line."""
    on.now = NOW + 10
    early = [on.job(priority=n % 5, run_at_us=NOW + 10) for n in range(50)]
    due = [on.job(priority=n % 5, run_at_us=NOW, type=f"t{n % 2}") for n in range(50)]
    await on.enqueue(*early, *due, new_ids=True)
    on.now = NOW
    wanted = [job.id for job in sorted(due, key=lambda job: -job.priority)]
    assert [job.id for job in await on.reserve(7)] == wanted[:7]
    assert [job.id for job in await on.reserve(100)] == wanted[7:]
    assert await on.reserve(100, types=["mail"]) == []
    on.now += 10
    assert len(await on.reserve(100)) == 50


async def test_more_jobs_come_due_at_one_instant_than_a_claim_promotes(on: Shelf) -> None:
    jobs = on.jobs(11_000, run_at_us=NOW + SECOND)
    await on.enqueue(*jobs, new_ids=True)
    on.now += SECOND
    assert await on.counts() == {JobState.READY: len(jobs)}
    claimed: set[str] = set()
    while held := await on.reserve(6_000):
        claimed |= {job.id for job in held}
    assert claimed == {job.id for job in jobs}
    assert on.ask("EXISTS", "scheduled") == 0


@pytest.mark.parametrize("run_at", [-LATEST, -1, 0, 1, LATEST - 60 * SECOND, LATEST])
async def test_an_instant_far_away_is_kept_exactly(on: Shelf, run_at: int) -> None:
    job = on.job(run_at_us=run_at, created_at_us=run_at)
    await on.enqueue(job)
    assert (await on.get(job.id)).run_at_us == run_at
    (stats,) = await on.driver.stats(now=on.now, queue="q")
    assert stats.head_run_at_us == (run_at if run_at <= on.now else None)
    on.now = max(on.now, run_at)
    if on.now < LATEST:  # At the last instant no lease can begin.
        (held,) = await on.reserve()
        assert (held.run_at_us, held.created_at_us) == (run_at, run_at)


async def test_jobs_of_several_queues_are_listed_in_the_order_they_were_given_in(on: Shelf) -> None:
    jobs = [on.job(queue=f"q{n % 3}") for n in range(30)]
    for start in range(0, 30, 10):
        await on.enqueue(*jobs[start : start + 10])
    page = await on.driver.list_jobs(JobFilter(), now=on.now, limit=1000)
    assert [job.id for job in page.jobs] == [job.id for job in reversed(jobs)]


@pytest.mark.parametrize("few", [3, 10_000], ids=lambda few: f"few is {few}")
async def test_a_listing_by_state_tells_the_same_however_it_finds_them(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are few of a kind they are put in order, else all jobs are looked through, a portion at a time."""
    text = TEXT.replace("local FEW = 10000", f"local FEW = {few}").replace(
        "local LOOK_AT = 5000", "local LOOK_AT = 5"
    )
    assert text != TEXT
    monkeypatch.setattr(Store.__init__, "__defaults__", (Library(text),))

    async with shelf() as on:
        dice = random.Random(few)
        await on.enqueue(*[on.job(queue=f"q{n % 2}", key=f"k{n}" if n % 3 == 0 else None) for n in range(60)])
        held = [job for n in range(2) for job in await on.reserve(20, queue=f"q{n}")]
        await on.enqueue(*[on.job(queue=job.queue, key=job.key) for job in held if job.key])
        await on.enqueue(*on.jobs(7, queue="q0", run_at_us=NOW + SECOND))
        dice.shuffle(held)
        await on.settle(*map(ack, held[:15]), *map(fail, held[15:25]))
        await on.driver.cancel([job.id for job in held[25:30]], now=on.now)
        everything = (await on.driver.list_jobs(JobFilter(), now=on.now, limit=1000)).jobs
        assert {job.state for job in everything} >= set(JobState) - {JobState.CANCELLED}
        for states, queue in itertools.product(itertools.combinations(JobState, 2), (None, "q0")):
            wanted = [job.id for job in everything if job.state in states and queue in (None, job.queue)]
            chosen = JobFilter(states=frozenset(states), queue=queue)
            listed: list[str] = []
            cursor: str | None = None
            while True:
                page = await on.driver.list_jobs(chosen, now=on.now, limit=4, cursor=cursor)
                listed += [job.id for job in page.jobs]
                cursor = page.cursor
                if cursor is None:
                    break
            assert listed == wanted, states
