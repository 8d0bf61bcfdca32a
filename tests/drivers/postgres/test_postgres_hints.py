"""A claimer remembers where the waiting jobs begin. What comes to stand before that place is found all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from drivers.postgres.pg_harness import NOW, SECOND, Raw, enqueue_on, fold, held, make_record, present
from needing import Entered
from taskharbor.drivers.contract import Ack, Discard, Fail, QueueSettings, Release, RetryAt, Settlement
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import MAX_PRIORITY, Failure, JobRecord, JobState, UpdateFlags
from taskharbor_testkit.servers import PostgresAt, drop_schema, with_fresh_schema
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
        return await by.reserve("q", limit=1, lease_for=_LEASE, now=self.now, worker="w", types=types)

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
    "a retry": (
        lambda stage: stage.settle(RetryAt(*held(stage.taken[4]), NOW - 5, 1, _ERROR)),
        ["4", "5", "6"],
    ),
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


@scene("3", "2", "5")
async def _releases_to_other_places(stage: Stage) -> None:
    await stage.settle(Release(*held(stage.taken[2]), NOW + 1), Release(*held(stage.taken[3]), NOW - 1))


@scene("1", "5", "6")
async def _a_release_of_its_own(stage: Stage) -> None:
    await stage.claimer.settle([Release(*held(stage.taken[1]))], now=NOW + 20)


@scene("5", "6", "7", "8", "9", "0")
async def _a_requeue(stage: Stage) -> None:
    await stage.settle(Fail(*held(stage.taken[0]), 5, _ERROR))
    assert await stage.other.requeue([stage.taken[0].id], now=NOW + 20) == [JobState.READY]


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


@scene("blocked", "5", "6")
async def _a_blocked_job_that_is_freed(stage: Stage) -> None:
    await stage.add("running", key="k", run_at_us=NOW + 3)
    (running,) = await stage.claim(stage.other)
    assert running.id == "running"
    await stage.add("blocked", key="k", run_at_us=NOW + 1)
    await stage.look()
    await stage.settle(Ack(*held(running)))


@scene("due", "5", "6")
async def _a_scheduled_job_that_comes_due(stage: Stage) -> None:
    await stage.add("due", run_at_us=NOW + 21, priority=3)
    await stage.look()
    stage.now = NOW + 30


@scene("late", "5", "6")
async def _a_transaction_begun_before_and_committed_after(stage: Stage) -> None:
    await stage.settle(*(Release(*held(job)) for job in stage.taken))
    with stage.raw.another() as late:
        enqueue_on(late, job("late", run_at_us=NOW - 5))
        assert await stage.next_ids(5) == ["0", "1", "2", "3", "4"]
        late("COMMIT")


@scene("5", "6", "7")
async def _a_transaction_that_is_rolled_back(stage: Stage) -> None:
    with stage.raw.another() as late:
        enqueue_on(late, job("late"))
        await stage.look()


@scene("inner", "5", "6")
async def _a_savepoint_of_a_long_transaction(stage: Stage) -> None:
    with stage.raw.another() as late:
        late("SELECT pg_current_xact_id()")
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


@scene("after", "5", "6")
async def _a_fold_of_what_was_seen(stage: Stage) -> None:
    fold(stage.raw)
    await stage.add("after", priority=9)


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


@scene("0", "1", "2")
async def _leases_that_another_reclaims(stage: Stage) -> None:
    assert await stage.other.reclaim(now=NOW + 20 + _LEASE, queue="q") == 5


@scene("theirs", "5", "6")
async def _a_lease_of_another_that_expires(stage: Stage) -> None:
    await stage.add("theirs")
    (job,) = await stage.other.reserve("q", limit=1, lease_for=SECOND, now=NOW + 20, worker="w")
    assert job.id == "theirs"
    stage.now = NOW + 2 * SECOND


@scene("failure", "5", "6")
async def _a_failure_queues_job(stage: Stage) -> None:
    await stage.other.configure("failing", QueueSettings(failure_queue="q"), now=NOW)
    await stage.other.enqueue([job("bad", queue="failing")], now=NOW)
    (bad,) = await stage.other.reserve("failing", limit=1, lease_for=SECOND, now=NOW, worker="w")
    assert await stage.other.settle([Fail(*held(bad), 1, _ERROR)], now=NOW) == [None]
    stage.raw("UPDATE jobs SET id = 'failure' WHERE type = 'taskharbor.failure'")


@scene("5", "6", "7")
async def _a_cancel_of_what_is_next(stage: Stage) -> None:
    await stage.add("next", priority=1)
    await stage.look()
    assert await stage.other.cancel(["next"], now=NOW + 20) == [JobState.CANCELLED]


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
        claim = asyncio.ensure_future(stage.next_ids(1))
        await eventually(lambda: raw.locks_awaited() == 1)
        unfolded = "SELECT count(*) FROM moves WHERE folded IS NULL"
        before = folding.one(unfolded)
        folding("SELECT fold(0)")
        assert folding.one(unfolded) < before
        folding("COMMIT")
        assert await claim == ["hidden"]


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


# -- a claimer with a memory and claimers without one, on two stores with the same history --------------------------


class Twin:
    """One of the two stores."""

    def __init__(self, url: str, stack: AsyncExitStack, *, has_memory: bool) -> None:
        self._first = PostgresDriver.from_url(f"{url}&notify=off&pool_size=1")
        self._handles = [self._first, self._first.clone(), self._first.clone()]
        self._stack = stack
        self._has_memory = has_memory
        self._tokens: dict[str, str] = {}
        self._late: list[Raw] = []

    async def open(self) -> None:
        for handle in self._handles:
            await self._stack.enter_async_context(handle)
        self._raw = self._stack.enter_context(Raw(self._first.options))
        for queue in ("a", "b"):
            await self._first.configure(queue, QueueSettings(), now=0)

    async def run(self, call: str, fields: dict[str, Any]) -> Any:
        """The answer, without what differs by nature: the tokens."""
        own = getattr(self, f"_{call}", None)
        answer = await (own or getattr(self._first, call))(**fields)
        return list(map(repr, answer)) if isinstance(answer, list) else answer

    async def _reserve(self, handle: int, **fields: Any) -> list[tuple[Any, ...]]:
        driver = self._handles[handle]
        if not self._has_memory:
            driver._claimer._hints.clear()
        jobs = await driver.reserve(worker="w", **fields)
        self._tokens |= {job.id: present(job.token) for job in jobs}
        return [(job.id, job.fence, job.stalls, job.reserved_at_us, job.expires_at_us) for job in jobs]

    async def _settle(self, settlements: list[Settlement], now: int) -> Any:
        ours = [msgspec.structs.replace(one, token=self._tokens.get(one.job_id, "")) for one in settlements]
        return await self._first.settle(ours, now=now)

    async def _begin(self, records: list[JobRecord]) -> None:
        """A transaction that stays open for a while."""
        late = self._stack.enter_context(self._raw.another())
        enqueue_on(late, *records)
        self._late.append(late)

    async def _end(self, which: int, how: str) -> None:
        if self._late:
            self._late.pop(which % len(self._late))(how)

    async def _fold(self) -> None:
        fold(self._raw)


_KINDS = {"enqueue": 14, "keyed": 4, "reserve": 28, "settle": 18, "reclaim": 3, "requeue": 3, "cancel": 2, "configure": 2,
          "begin": 5, "end": 5, "fold": 8, "stats": 2}  # fmt: skip
"""How often each call comes."""


class Story:
    """What happens, by a number that decides it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = NOW
        self._ids: list[str] = ["none"]

    def _records(self, most: int, **fields: Any) -> list[JobRecord]:
        return [self._record(**fields) for _ in range(self._random.randint(1, most))]

    def _record(self, **fields: Any) -> JobRecord:
        pick = self._random
        self._ids.append(f"job-{len(self._ids)}")
        return make_record(
            self._ids[-1],
            now=self._now,
            type=pick.choice("xy"),
            queue=pick.choice("ab"),
            priority=pick.choice((0, 0, 0, 1, 5, -3)),
            run_at_us=self._now + pick.randint(-20, 8) * SECOND,
            **fields,
        )

    def _settlement(self) -> Settlement:
        pick = self._random
        job, when = pick.choice(self._ids[-40:]), self._now + pick.randint(-20, 5) * SECOND
        return pick.choice(
            (Ack(job, ""), RetryAt(job, "", when, 1, _ERROR), Fail(job, "", 1, _ERROR), Release(job, ""), Release(job, "", when),
             Discard(job, ""))
        )  # fmt: skip

    def next(self) -> tuple[str, dict[str, Any]]:
        pick = self._random
        self._now += pick.choice((0, 0, 1, SECOND, 3 * SECOND))
        kind = pick.choices([*_KINDS], [*_KINDS.values()])[0]
        now = {"now": self._now}
        match kind:
            case "enqueue":
                return kind, {"records": self._records(5), **now}
            case "keyed":
                flags = UpdateFlags(pick.random() < 0.5, pick.choice(("yes", "no", "later", "earlier")))
                return "enqueue", {"records": self._records(1, key=pick.choice("uvw"), update=flags), **now}
            case "reserve":
                place = {"handle": pick.randrange(3), "queue": pick.choice("ab"), "limit": pick.randint(1, 4)}
                types = pick.choice((None, None, ["x"]))
                return kind, {**place, "types": types, "lease_for": pick.randint(2, 20) * SECOND, **now}
            case "settle":
                return kind, {"settlements": [self._settlement() for _ in range(pick.randint(1, 6))], **now}
            case "reclaim":
                return kind, {"limit": pick.randint(1, 5), **now}
            case "requeue" | "cancel":
                return kind, {"job_ids": pick.sample(self._ids, min(3, len(self._ids))), **now}
            case "configure":
                limits = QueueSettings(
                    paused=pick.random() < 0.2, max_inflight=pick.choice((None, None, 2, 5))
                )
                return kind, {"queue": pick.choice("ab"), "settings": limits, **now}
            case "begin":
                return kind, {"records": self._records(3)}
            case "end":
                how = pick.choice(("COMMIT", "COMMIT", "ROLLBACK"))
                return kind, {"which": pick.randrange(10), "how": how}
        return kind, {} if kind == "fold" else now


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_with_and_without_a_memory_claims_are_the_same(postgres_server: PostgresAt, seed: int) -> None:
    urls = [with_fresh_schema(postgres_server.url) for _ in range(2)]
    try:
        async with AsyncExitStack() as stack:
            twins = [Twin(url, stack, has_memory=n == 0) for n, url in enumerate(urls)]
            for twin in twins:
                await twin.open()
            story = Story(seed)
            claimed = 0
            for step in range(250):
                call, fields = story.next()
                ours, theirs = [await twin.run(call, fields) for twin in twins]
                assert ours == theirs, f"seed {seed}, step {step}: {call}({fields})"
                claimed += len(ours) if call == "reserve" else 0
            assert claimed > 50
    finally:
        for url in urls:
            drop_schema(url)
