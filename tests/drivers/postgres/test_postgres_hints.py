"""A claimer remembers where the waiting jobs begin. What comes to stand before that place is found all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from drivers.postgres.harness import NOW, SECOND, Raw, claim, enqueue_on, fold, held, ids, make_record
from needing import Entered
from taskharbor.drivers.contract import Ack, Discard, Fail, QueueSettings, Release, RetryAt, Settlement
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import MAX_PRIORITY, Failure, JobRecord, JobState, UpdateFlags
from taskharbor.requests import new_id
from worker.stage import eventually

_ERROR = Failure("E", "no")
_LEASE = 3600 * SECOND


class Stage:
    """A queue of ten jobs, and a claimer that has taken jobs 0 to 4 and knows that 5 is next."""

    def __init__(self, claimer: PostgresDriver, other: PostgresDriver, raw: Raw) -> None:
        self.claimer = claimer
        self.other = other
        self.raw = raw
        self.taken: list[JobRecord] = []
        self.now = NOW + 20

    async def set(self) -> None:
        jobs = [make_record(f"{n}", run_at_us=NOW + n) for n in range(10)]
        await self.other.enqueue(jobs, now=NOW + 10)
        for _ in range(5):
            self.taken += await self.claim(self.claimer)

    async def add(self, name: str, **fields: Any) -> None:
        await self.other.enqueue([job(name, **fields)], now=NOW + 20)

    async def claim(self, by: PostgresDriver, types: list[str] | None = None) -> list[JobRecord]:
        return await claim(by, lease=_LEASE, now=self.now, types=types)

    async def look(self) -> None:
        """The claimer sees what is there, and takes nothing."""
        assert await self.claim(self.claimer, types=["none such"]) == []

    async def next_ids(self, limit: int) -> list[str]:
        """What the claimer gets, one at a time."""
        return [job.id for _ in range(limit) for job in await self.claim(self.claimer)]

    async def settle(self, *settlements: Settlement) -> None:
        assert await self.other.settle(settlements, now=NOW + 20) == [None] * len(settlements)


def job(name: str, **fields: Any) -> JobRecord:
    """One that comes before all others, unless the fields say otherwise."""
    return make_record(name, **({"run_at_us": NOW - 10} | fields))


Scene = Callable[[Stage], Awaitable[None]]
_SCENES: dict[str, tuple[Scene, list[str]]] = {
    "nothing": (lambda stage: stage.look(), ["5", "6", "7"]),
    "a higher priority": (lambda stage: stage.add("x", run_at_us=NOW + 15, priority=1), ["x", "5", "6"]),
    "an earlier run_at": (lambda stage: stage.add("x", run_at_us=NOW + 2), ["x", "5", "6"]),
    "a run_at before 1970": (lambda stage: stage.add("x", run_at_us=-(10**15)), ["x", "5", "6"]),
    "the same run_at comes after": (lambda stage: stage.add("x", run_at_us=NOW + 5), ["5", "x", "6"]),
    "a release": (lambda stage: stage.settle(Release(*held(stage.taken[2]))), ["2", "5", "6"]),
    "a retry": (lambda stage: stage.settle(RetryAt(*held(stage.taken[4]), 0, 1, _ERROR)), ["4", "5", "6"]),
}
"""Something that happens while the claimer stands between 4 and 5, and what it gets then."""


def scene(*expected: str) -> Callable[[Scene], Scene]:
    def keep(happens: Scene) -> Scene:
        _SCENES[happens.__name__.removeprefix("_").replace("_", " ")] = (happens, list(expected))
        return happens

    return keep


@scene("highest", "high", "5")
async def _priorities_never_seen_before(stage: Stage) -> None:
    await stage.add("high", priority=7)
    await stage.add("highest", priority=MAX_PRIORITY)
    await stage.add("lowest", priority=-MAX_PRIORITY)


@scene("0", "5", "6")
async def _a_requeue_by_a_slow_clock(stage: Stage) -> None:
    await stage.settle(Fail(*held(stage.taken[0]), 5, _ERROR))
    assert await stage.other.requeue([stage.taken[0].id], now=NOW) == [JobState.READY]


@scene("wanted", "5", "6")
async def _a_key_that_waits_and_is_wanted_earlier(stage: Stage) -> None:
    await stage.add("wanted", key="k", run_at_us=NOW + SECOND)
    await stage.look()
    again = job("again", key="k", run_at_us=NOW, update=UpdateFlags(run_at="earlier"))
    (answer,) = await stage.other.enqueue([again], now=NOW + 20)
    assert answer.id == "wanted"


@scene("wanted", "5", "6")
async def _a_key_that_waits_and_gets_a_higher_priority(stage: Stage) -> None:
    await stage.add("wanted", key="k", run_at_us=NOW + 15)
    await stage.look()
    await stage.add("again", key="k", priority=3, update=UpdateFlags(priority=True))


@scene("running", "5", "6")
async def _a_retry_that_absorbs_a_higher_priority(stage: Stage) -> None:
    await stage.add("running", key="k", run_at_us=NOW + 3)
    (running,) = await stage.claim(stage.other)
    assert running.id == "running"
    await stage.add("blocked", key="k", priority=3, update=UpdateFlags(priority=True))
    await stage.look()
    await stage.settle(RetryAt(*held(running), NOW + 15, 1, _ERROR))


@scene("blocked", "5", "6")
async def _a_blocked_job_that_is_freed(stage: Stage) -> None:
    await stage.add("running", key="k", run_at_us=NOW + 3)
    (running,) = await stage.claim(stage.other)
    assert running.id == "running"
    await stage.add("blocked", key="k", run_at_us=NOW + 1)
    await stage.look()
    await stage.settle(Ack(*held(running)))


@scene("late", "5", "6")
async def _a_transaction_begun_before_and_committed_after(stage: Stage) -> None:
    await stage.settle(*(Release(*held(job)) for job in stage.taken))
    with stage.raw.another() as late:
        enqueue_on(late, job("late", run_at_us=NOW - 5))
        assert await stage.next_ids(5) == ["0", "1", "2", "3", "4"]
        late("COMMIT")


@scene("inner", "5", "6")
async def _a_savepoint_of_a_long_transaction(stage: Stage) -> None:
    with stage.raw.another("SELECT pg_current_xact_id()") as late:
        await stage.look()
        late("SAVEPOINT a")
        enqueue_on(late, job("undone"))
        late("ROLLBACK TO a")
        late("SAVEPOINT b")
        enqueue_on(late, job("inner", priority=2))
        late("RELEASE b")
        await stage.look()
        late("COMMIT")


@scene("folded", "5", "6")
async def _a_fold_of_what_was_not_seen(stage: Stage) -> None:
    await stage.add("folded", priority=9)
    fold(stage.raw)
    assert stage.raw.one("SELECT count(*) FROM moves WHERE folded IS NULL") == 0


@scene("before", "late", "5")
async def _a_fold_beside_a_transaction_that_commits_later(stage: Stage) -> None:
    with stage.raw.another() as late:
        enqueue_on(late, job("late", run_at_us=NOW + 1))
        await stage.add("before", run_at_us=NOW)
        fold(stage.raw)
        await stage.look()
        fold(stage.raw)
        late("COMMIT")


@scene("typed", "5", "6")
async def _claims_by_type_that_pass_over_it(stage: Stage) -> None:
    await stage.add("typed", type="rare")
    (job,) = await stage.claim(stage.claimer, types=["mail"])
    assert job.id == "5"
    await stage.settle(Release(*held(job)))


@scene("paused", "5", "6")
async def _a_pause(stage: Stage) -> None:
    await stage.other.configure("q", QueueSettings(paused=True), now=NOW)
    await stage.add("paused")
    assert await stage.claim(stage.claimer) == []
    await stage.other.configure("q", QueueSettings(), now=NOW)


@scene("0", "1", "2")
async def _leases_that_expire(stage: Stage) -> None:
    stage.now = NOW + 20 + _LEASE


@scene("failure", "5", "6")
async def _a_failure_queues_job(stage: Stage) -> None:
    await stage.other.configure("failing", QueueSettings(failure_queue="q"), now=NOW)
    await stage.other.enqueue([job("bad", queue="failing")], now=NOW)
    (bad,) = await claim(stage.other, queue="failing")
    assert await stage.other.settle([Fail(*held(bad), 1, _ERROR)], now=NOW) == [None]
    stage.raw("UPDATE jobs SET id = 'failure' WHERE type = 'taskharbor.failure'")


@pytest.fixture
def stage(driver: PostgresDriver, raw: Raw) -> Entered:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Stage]:
        async with driver, driver.clone() as other:
            yield Stage(driver, other, raw)

    return Entered(opened())


@pytest.mark.parametrize("name", _SCENES)
async def test_what_comes_before_the_remembered_place_is_found(stage: Stage, name: str) -> None:
    happens, expected = _SCENES[name]
    await stage.set()
    await happens(stage)
    assert await stage.next_ids(len(expected)) == expected


async def test_a_fold_in_the_middle_of_a_claim_hides_nothing(stage: Stage, raw: Raw) -> None:
    """The claim is held up where it first looks at the moves, and these are folded before it goes on."""
    await stage.set()
    await stage.add("hidden", priority=1)
    raw("SELECT fold(0)")
    with raw.another("LOCK TABLE moves IN ACCESS EXCLUSIVE MODE") as folding:
        claimed = asyncio.ensure_future(stage.next_ids(1))
        await eventually(lambda: raw.locks_awaited() == 1)
        unfolded = "SELECT count(*) FROM moves WHERE folded IS NULL"
        before = folding.one(unfolded)
        folding("SELECT fold(0)")
        assert folding.one(unfolded) < before
        folding("COMMIT")
        assert await claimed == ["hidden"]


@pytest.mark.parametrize("count", [3, 64, 65])
async def test_any_number_of_priorities(stage: Stage, count: int) -> None:
    """Beyond some number of them a claimer remembers nothing."""
    levels = list(range(-count, count, 2))
    random.Random(count).shuffle(levels)
    await stage.other.enqueue([job(f"{level}", priority=level) for level in levels], now=NOW)
    expected = [f"{level}" for level in sorted(levels, reverse=True)]
    assert await stage.next_ids(2) == expected[:2]
    await stage.add("top", priority=1000)
    assert await stage.next_ids(count) == ["top", *expected[2:]]
    await stage.add("bottom", priority=-1000)
    assert await stage.next_ids(2) == ["bottom"]


# -- a long history, by chance ---------------------------------------------------------------------------------

_NEXT = """
SELECT id FROM jobs
WHERE (state <= 1 OR state = 3 AND expires_at <= %s AND NOT cancel_requested) AND run_at <= %s
    AND (%s::text[] IS NULL OR type = ANY (%s))
ORDER BY rank, run_at, seq LIMIT %s
"""
"""The jobs that a claim has to get, by a look at all jobs. No two have a key in common, none has a last attempt, and nothing
limits the queue."""

_KINDS = {"enqueue": 14, "claim": 28, "settle": 18, "reclaim": 3, "requeue": 3, "cancel": 2, "begin": 5}
_KINDS |= {"end": 5, "fold": 8, "change": 8}
"""How often each thing happens."""


def some_jobs(pick: random.Random, now: int) -> list[JobRecord]:
    return [
        make_record(
            now=now,
            type=pick.choice("xy"),
            priority=pick.choice((0, 0, 0, 1, 5, -3)),
            run_at_us=now + pick.randint(-20, 8) * SECOND,
            max_attempts=1000,
            key=new_id() if pick.random() < 0.5 else None,
        )
        for _ in range(pick.randint(1, 5))
    ]


def some_end(pick: random.Random, job: JobRecord, now: int) -> Settlement:
    lease, when = held(job), now + pick.randint(-20, 5) * SECOND
    retry, fail = RetryAt(*lease, when, 1, _ERROR), Fail(*lease, 1, _ERROR)
    return pick.choice((Ack(*lease), Discard(*lease), fail, retry, Release(*lease), Release(*lease, when)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_a_claim_gets_what_a_look_at_all_jobs_finds(stage: Stage, raw: Raw, seed: int) -> None:
    pick = random.Random(seed)
    now = NOW
    known: list[str] = []
    leased: list[JobRecord] = []
    late: list[Raw] = []
    # A transaction that makes the queue would hold up all others.
    await stage.other.configure("q", QueueSettings(), now=now)
    with ExitStack() as stack:
        for step in range(400):
            now += pick.choice((0, 0, 1, SECOND, 3 * SECOND))
            handle = pick.choice((stage.claimer, stage.other))
            match pick.choices([*_KINDS], [*_KINDS.values()])[0]:
                case "enqueue":
                    known += ids(await handle.enqueue(some_jobs(pick, now), now=now))
                case "claim":
                    types, limit = pick.choice((None, None, ["x"])), pick.randint(1, 4)
                    expected = [job_id for (job_id,) in raw(_NEXT, now, now, types, types, limit)]
                    lease = pick.randint(2, 20) * SECOND
                    jobs = await claim(handle, limit, lease=lease, now=now, types=types)
                    assert ids(jobs) == expected, f"step {step}"
                    leased += jobs
                case "settle" if leased:
                    some = pick.choices(leased[-10:], k=3)
                    await handle.settle([some_end(pick, job, now) for job in some], now=now)
                case "reclaim":
                    await handle.reclaim(now=now, limit=pick.randint(1, 5))
                case "requeue" if known:
                    await handle.requeue([pick.choice(known)], now=now)
                case "cancel" if known:
                    await handle.cancel([pick.choice(known)], now=now)
                case "change" if keys := raw(
                    "SELECT key FROM jobs WHERE state <= 1 AND key IS NOT NULL ORDER BY seq"
                ):
                    (by,) = some_jobs(pick, now)[:1]
                    by.key, by.update = pick.choice(keys)[0], UpdateFlags(priority=True)
                    assert (await handle.enqueue([by], now=now))[0].existed
                case "begin":
                    late.append(stack.enter_context(raw.another()))
                    enqueue_on(late[-1], *some_jobs(pick, now))
                case "end" if late:
                    late.pop(pick.randrange(len(late)))(pick.choice(("COMMIT", "COMMIT", "ROLLBACK")))
                case "fold":
                    fold(raw)
    assert len(leased) > 50
