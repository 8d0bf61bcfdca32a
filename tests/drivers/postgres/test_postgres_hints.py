"""A claimer remembers where the waiting jobs begin. What comes to stand before that place is found all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import psycopg
import pytest

from drivers.postgres.pg_harness import NOW, Raw, enqueue_on, fold, is_waiting_for, until
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Enqueued,
    Fail,
    QueueSettings,
    Release,
    Retry,
    Settlement,
)
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import MAX_PRIORITY, SECOND, Failure, JobRecord, JobState, UpdateFlags
from taskharbor.requests import new_id
from taskharbor_testkit.servers import PostgresAt, drop_schema, with_fresh_schema

_ERROR = Failure("E", "no")
_LEASE = 3600 * SECOND


class Stage:
    """A queue of ten jobs, and a claimer that has taken jobs 0 to 4 and knows that 5 is next."""

    def __init__(self, claimer: PostgresDriver, other: PostgresDriver, raw: Raw) -> None:
        self.claimer = claimer
        self.other = other
        self.raw = raw
        self.queue = new_id()
        self.taken: list[JobRecord] = []
        self.now = NOW + 20

    def job(self, name: str, **fields: Any) -> JobRecord:
        """Ids are told apart by the queue they were made for."""
        defaults = {"type": "mail", "queue": self.queue, "run_at_us": NOW - 10, "created_at_us": NOW}
        return JobRecord(id=f"{self.queue} {name}", **(defaults | fields))

    async def set(self) -> None:
        await self.other.enqueue([self.job(f"{n}", run_at_us=NOW + n) for n in range(10)], now=NOW + 10)
        for _ in range(5):
            self.taken += await self.claim(self.claimer)

    async def claim(self, by: PostgresDriver, types: list[str] | None = None) -> list[JobRecord]:
        return await by.reserve(self.queue, limit=1, lease_for=_LEASE, now=self.now, worker="w", types=types)

    async def look(self) -> None:
        """The claimer sees what is there, and takes nothing."""
        assert await self.claim(self.claimer, types=["none such"]) == []

    async def next_ids(self, limit: int) -> list[str]:
        """What the claimer gets, one at a time."""
        return [named(job) for _ in range(limit) for job in await self.claim(self.claimer)]

    async def settle(self, *settlements: Settlement) -> None:
        assert await self.other.settle(settlements, now=NOW + 20) == [None] * len(settlements)


def named(job: JobRecord | Enqueued) -> str:
    return job.id.partition(" ")[2]


def held(job: JobRecord) -> tuple[str, str]:
    return job.id, job.token or ""


Scene = Callable[[Stage], Awaitable[None]]
_SCENES: dict[str, tuple[Scene, list[str]]] = {}


def scene(*expected: str) -> Callable[[Scene], Scene]:
    """Something that happens while the claimer stands between 4 and 5, and what it gets then."""

    def keep(happens: Scene) -> Scene:
        _SCENES[happens.__name__.removeprefix("_")] = (happens, list(expected))
        return happens

    return keep


@scene("5", "6", "7")
async def _nothing(stage: Stage) -> None:
    pass


@scene("first", "5", "6")
async def _a_higher_priority(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("first", run_at_us=NOW + 15, priority=1)], now=NOW + 20)


@scene("highest", "high", "5")
async def _priorities_never_seen_before(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("high", priority=7)], now=NOW + 20)
    await stage.other.enqueue([stage.job("highest", priority=MAX_PRIORITY)], now=NOW + 20)
    await stage.other.enqueue([stage.job("lowest", priority=-MAX_PRIORITY)], now=NOW + 20)


@scene("earlier", "5", "6")
async def _an_earlier_run_at(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("earlier", run_at_us=NOW + 2)], now=NOW + 20)


@scene("ancient", "5", "6")
async def _a_run_at_before_1970(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("ancient", run_at_us=-(10**15))], now=NOW + 20)


@scene("5", "same", "6")
async def _the_same_run_at_comes_after(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("same", run_at_us=NOW + 5)], now=NOW + 20)


@scene("2", "5", "6")
async def _a_release(stage: Stage) -> None:
    await stage.settle(Release(*held(stage.taken[2])))


@scene("3", "2", "5")
async def _releases_to_other_places(stage: Stage) -> None:
    await stage.settle(Release(*held(stage.taken[2]), NOW + 1), Release(*held(stage.taken[3]), NOW - 1))


@scene("4", "5", "6")
async def _a_retry(stage: Stage) -> None:
    await stage.settle(Retry(*held(stage.taken[4]), NOW - 5, 1, _ERROR))


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
    await stage.other.enqueue([stage.job("wanted", key="k", run_at_us=NOW + SECOND)], now=NOW + 20)
    await stage.look()
    again = stage.job("again", key="k", run_at_us=NOW, update=UpdateFlags(run_at="earlier"))
    (answer,) = await stage.other.enqueue([again], now=NOW + 20)
    assert named(answer) == "wanted"


@scene("blocked", "5", "6")
async def _a_blocked_job_that_is_freed(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("running", key="k", run_at_us=NOW + 3)], now=NOW + 20)
    (running,) = await stage.claim(stage.other)
    assert named(running) == "running"
    await stage.other.enqueue([stage.job("blocked", key="k", run_at_us=NOW + 1)], now=NOW + 20)
    await stage.look()
    await stage.settle(Ack(*held(running)))


@scene("due", "5", "6")
async def _a_scheduled_job_that_comes_due(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("due", run_at_us=NOW + 21, priority=3)], now=NOW + 20)
    await stage.look()
    stage.now = NOW + 30


@scene("late", "5", "6")
async def _a_transaction_begun_before_and_committed_after(stage: Stage) -> None:
    await stage.settle(*(Release(*held(job)) for job in stage.taken))
    with stage.raw.another() as late:
        late("BEGIN")
        enqueue_on(late, [stage.job("late", run_at_us=NOW - 5)], NOW)
        assert await stage.next_ids(5) == ["0", "1", "2", "3", "4"]
        late("COMMIT")


@scene("5", "6", "7")
async def _a_transaction_that_is_rolled_back(stage: Stage) -> None:
    with stage.raw.another() as late:
        late("BEGIN")
        enqueue_on(late, [stage.job("late")], NOW)
        await stage.look()
        late("ROLLBACK")


@scene("inner", "5", "6")
async def _a_savepoint_of_a_long_transaction(stage: Stage) -> None:
    with stage.raw.another() as late:
        late("BEGIN")
        late("SELECT pg_current_xact_id()")
        await stage.look()
        late("SAVEPOINT a")
        enqueue_on(late, [stage.job("undone")], NOW)
        late("ROLLBACK TO a")
        late("SAVEPOINT b")
        enqueue_on(late, [stage.job("inner", priority=2)], NOW)
        late("RELEASE b")
        await stage.look()
        late("COMMIT")


@scene("folded", "5", "6")
async def _a_fold_of_what_was_not_seen(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("folded", priority=9)], now=NOW + 20)
    fold(stage.raw)
    assert stage.raw.one("SELECT count(*) FROM moves WHERE folded IS NULL") == 0


@scene("after", "5", "6")
async def _a_fold_of_what_was_seen(stage: Stage) -> None:
    fold(stage.raw)
    await stage.other.enqueue([stage.job("after", priority=9)], now=NOW + 20)


@scene("before", "late", "5")
async def _a_fold_beside_a_transaction_that_commits_later(stage: Stage) -> None:
    with stage.raw.another() as late:
        late("BEGIN")
        enqueue_on(late, [stage.job("late", run_at_us=NOW + 1)], NOW)
        await stage.other.enqueue([stage.job("before", run_at_us=NOW)], now=NOW + 20)
        fold(stage.raw)
        await stage.look()
        fold(stage.raw)
        late("COMMIT")


@scene("typed", "5", "6")
async def _claims_by_type_that_pass_over_it(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("typed", type="rare")], now=NOW + 20)
    (job,) = await stage.claim(stage.claimer, types=["mail"])
    assert named(job) == "5"
    await stage.settle(Release(*held(job)))


@scene("paused", "5", "6")
async def _a_pause(stage: Stage) -> None:
    await stage.other.configure(stage.queue, QueueSettings(paused=True), now=NOW)
    await stage.other.enqueue([stage.job("paused")], now=NOW + 20)
    assert await stage.claim(stage.claimer) == []
    await stage.other.configure(stage.queue, QueueSettings(), now=NOW)


@scene("0", "1", "2")
async def _leases_that_expire(stage: Stage) -> None:
    stage.now = NOW + 20 + _LEASE


@scene("0", "1", "2")
async def _leases_that_another_reclaims(stage: Stage) -> None:
    assert await stage.other.reclaim(now=NOW + 20 + _LEASE, queue=stage.queue) == 5


@scene("theirs", "5", "6")
async def _a_lease_of_another_that_expires(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("theirs")], now=NOW + 20)
    (job,) = await stage.other.reserve(stage.queue, limit=1, lease_for=SECOND, now=NOW + 20, worker="w")
    assert named(job) == "theirs"
    stage.now = NOW + 2 * SECOND


@scene("failure", "5", "6")
async def _a_failure_queues_job(stage: Stage) -> None:
    await stage.other.configure("e" + stage.queue, QueueSettings(failure_queue=stage.queue), now=NOW)
    await stage.other.enqueue([stage.job("bad", queue="e" + stage.queue)], now=NOW)
    (bad,) = await stage.other.reserve("e" + stage.queue, limit=1, lease_for=SECOND, now=NOW, worker="w")
    assert await stage.other.settle([Fail(*held(bad), 1, _ERROR)], now=NOW) == [None]
    stage.raw("UPDATE jobs SET id = 'the failure' WHERE type = 'taskharbor.failure'")


@scene("5", "6", "7")
async def _a_cancel_of_what_is_next(stage: Stage) -> None:
    await stage.other.enqueue([stage.job("next", priority=1)], now=NOW + 20)
    await stage.look()
    assert await stage.other.cancel([stage.job("next").id], now=NOW + 20) == [JobState.CANCELLED]


@pytest.fixture(scope="module")
def shared_url(postgres_server: PostgresAt) -> Iterator[str]:
    """One store for all scenes, each of which has a queue of its own."""
    url = with_fresh_schema(postgres_server.url)
    asyncio.run(PostgresDriver.from_url(url).migrate())
    yield url
    drop_schema(url)


@pytest.fixture
def shared(shared_url: str) -> PostgresDriver:
    return PostgresDriver.from_url(shared_url)


@pytest.fixture
def shared_raw(shared: PostgresDriver) -> Iterator[Raw]:
    with Raw(psycopg.connect(shared.options.conninfo, autocommit=True), shared.options.schema) as raw:
        yield raw


@pytest.mark.parametrize("name", _SCENES)
async def test_what_comes_before_the_remembered_place_is_found(
    shared: PostgresDriver, shared_raw: Raw, name: str
) -> None:
    happens, expected = _SCENES[name]

    async with shared, shared.clone() as other:
        stage = Stage(shared, other, shared_raw)
        await stage.set()
        await happens(stage)
        assert await stage.next_ids(len(expected)) == expected


async def test_a_fold_in_the_middle_of_a_claim_hides_nothing(shared: PostgresDriver, shared_raw: Raw) -> None:
    """The claim is held up where it first looks at the moves, and these are folded before it goes on."""

    async with shared, shared.clone() as other:
        stage = Stage(shared, other, shared_raw)
        await stage.set()
        await other.enqueue([stage.job("hidden", priority=1)], now=NOW + 20)
        shared_raw("SELECT fold(0)")
        with shared_raw.another() as folding:
            folding("BEGIN")
            folding("LOCK TABLE moves IN ACCESS EXCLUSIVE MODE")
            claim = asyncio.ensure_future(stage.next_ids(1))
            await asyncio.to_thread(until, lambda: is_waiting_for(shared_raw, folding), "the claim waits")
            unfolded = "SELECT count(*) FROM moves WHERE folded IS NULL"
            before = folding.one(unfolded)
            folding("SELECT fold(0)")
            assert folding.one(unfolded) < before
            folding("COMMIT")
            assert await claim == ["hidden"]


@pytest.mark.parametrize("count", [3, 64, 65, 200])
async def test_any_number_of_priorities(shared: PostgresDriver, shared_raw: Raw, count: int) -> None:
    """Beyond some number of them a claimer remembers nothing."""

    async with shared, shared.clone() as other:
        stage = Stage(shared, other, shared_raw)
        levels = list(range(-count, count, 2))
        random.Random(count).shuffle(levels)
        jobs = [stage.job(f"{level}", priority=level) for level in levels]
        await other.enqueue(jobs, now=NOW)
        expected = [f"{level}" for level in sorted(levels, reverse=True)]
        assert await stage.next_ids(2) == expected[:2]
        await other.enqueue([stage.job("top", priority=1000)], now=NOW)
        assert await stage.next_ids(count) == ["top", *expected[2:]]
        await other.enqueue([stage.job("bottom", priority=-1000)], now=NOW)
        assert await stage.next_ids(2) == ["bottom"]


# -- a claimer with a memory and claimers without one, on two stores with the same history --------------------------


class Twin:
    """One of the two stores. Answers are given without what differs by nature: the tokens."""

    def __init__(self, url: str, stack: AsyncExitStack, *, has_memory: bool) -> None:
        self._first = PostgresDriver.from_url(f"{url}&notify=off&pool_size=1")
        self._handles = [self._first]
        self._stack = stack
        self._has_memory = has_memory
        self._tokens: dict[str, str] = {}
        self._late: list[Raw] = []

    async def open(self) -> None:
        for _ in range(2 if self._has_memory else 0):
            self._handles.append(self._first.clone())
        for handle in self._handles:
            await self._stack.enter_async_context(handle)
        self._raw = self._stack.enter_context(self._connect())
        for queue in ("a", "b"):
            await self._first.configure(queue, QueueSettings(), now=0)

    def _connect(self) -> Raw:
        options = self._first.options
        return Raw(psycopg.connect(options.conninfo, autocommit=True), options.schema)

    async def reserve(self, handle: int, queue: str, **fields: Any) -> list[tuple[Any, ...]]:
        if self._has_memory:
            jobs = await self._handles[handle].reserve(queue, worker="w", **fields)
        else:
            async with self._first.clone() as fresh:
                jobs = await fresh.reserve(queue, worker="w", **fields)
        self._tokens |= {job.id: job.token or "" for job in jobs}
        return [(job.id, job.fence, job.stalls, job.reserved_at_us, job.expires_at_us) for job in jobs]

    async def enqueue(self, records: list[JobRecord], now: int) -> Any:
        return await self._first.enqueue(records, now=now)

    async def settle(self, settlements: list[Settlement], now: int) -> list[str]:
        ours = [_with_token(one, self._tokens.get(one.job_id, "")) for one in settlements]
        return [repr(answer) for answer in await self._first.settle(ours, now=now)]

    async def reclaim(self, limit: int, now: int) -> int:
        return await self._first.reclaim(now=now, limit=limit)

    async def requeue(self, ids: list[str], now: int) -> list[str]:
        return [repr(answer) for answer in await self._first.requeue(ids, now=now)]

    async def cancel(self, ids: list[str], now: int) -> list[str]:
        return [repr(answer) for answer in await self._first.cancel(ids, now=now)]

    async def configure(self, queue: str, settings: QueueSettings, now: int) -> None:
        await self._first.configure(queue, settings, now=now)

    async def begin(self, records: list[JobRecord], now: int) -> None:
        """Of a transaction that stays open for a while."""
        late = self._stack.enter_context(self._connect())
        late("BEGIN")
        enqueue_on(late, records, now)
        self._late.append(late)

    async def end(self, which: int, how: str) -> None:
        if self._late:
            late = self._late.pop(which % len(self._late))
            late(how)
            late.connection.close()

    async def fold(self) -> None:
        fold(self._raw)

    async def stats(self, now: int) -> Any:
        return await self._first.stats(now=now)


def _with_token(settlement: Settlement, token: str) -> Settlement:
    return msgspec.structs.replace(settlement, token=token)


_KINDS = {
    "enqueue": 14,
    "keyed": 4,
    "reserve": 28,
    "settle": 18,
    "reclaim": 3,
    "requeue": 3,
    "cancel": 2,
    "configure": 2,
    "begin": 5,
    "end": 5,
    "fold": 8,
    "stats": 2,
}
"""What happens, and how often."""


class Story:
    """What happens, by a number that decides it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = NOW
        self._count = 0
        self._ids: list[str] = []

    def _record(self, **fields: Any) -> JobRecord:
        pick = self._random
        self._count += 1
        self._ids.append(f"job-{self._count}")
        return JobRecord(
            id=self._ids[-1],
            type=pick.choice("xy"),
            queue=pick.choice("ab"),
            priority=pick.choice((0, 0, 0, 1, 5, -3)),
            run_at_us=self._now + pick.randint(-20, 8) * SECOND,
            created_at_us=self._now,
            **fields,
        )

    def _keyed(self) -> JobRecord:
        pick = self._random
        flags = UpdateFlags(pick.random() < 0.5, pick.choice(("yes", "no", "later", "earlier")))  # type: ignore[arg-type]
        return self._record(key=pick.choice("uvw"), update=flags)

    def _settlement(self) -> Settlement:
        pick = self._random
        job, when = pick.choice(self._ids[-40:]), self._now + pick.randint(-20, 5) * SECOND
        return pick.choice(
            (Ack(job, ""), Retry(job, "", when, 1, _ERROR), Fail(job, "", 1, _ERROR), Release(job, ""), Release(job, "", when),
             Discard(job, ""))
        )  # fmt: skip

    def next(self) -> tuple[str, dict[str, Any]]:
        pick = self._random
        self._now += pick.choice((0, 0, 1, SECOND, 3 * SECOND))
        kind = pick.choices([*_KINDS], [*_KINDS.values()])[0]
        now = {"now": self._now}
        some = pick.sample(self._ids, min(3, len(self._ids)))
        match kind:
            case "enqueue":
                return kind, {"records": [self._record() for _ in range(pick.randint(1, 5))], **now}
            case "keyed":
                return "enqueue", {"records": [self._keyed()], **now}
            case "reserve":
                fields = {
                    "handle": pick.randrange(3),
                    "queue": pick.choice("ab"),
                    "limit": pick.randint(1, 4),
                }
                types = pick.choice((None, None, ["x"]))
                return kind, {**fields, "types": types, "lease_for": pick.randint(2, 20) * SECOND, **now}
            case "settle" if self._ids:
                return kind, {"settlements": [self._settlement() for _ in range(pick.randint(1, 6))], **now}
            case "reclaim":
                return kind, {"limit": pick.randint(1, 5), **now}
            case "requeue" | "cancel":
                return kind, {"ids": some, **now}
            case "configure":
                settings = QueueSettings(
                    paused=pick.random() < 0.2, max_inflight=pick.choice((None, None, 2, 5))
                )
                return kind, {"queue": pick.choice("ab"), "settings": settings, **now}
            case "begin":
                return kind, {"records": [self._record() for _ in range(pick.randint(1, 3))], **now}
            case "end":
                return kind, {
                    "which": pick.randrange(10),
                    "how": pick.choice(("COMMIT", "COMMIT", "ROLLBACK")),
                }
            case "fold":
                return kind, {}
            case _:
                return "stats", now


@pytest.mark.parametrize("seed", range(3))
def test_with_and_without_a_memory_claims_are_the_same(postgres_server: PostgresAt, seed: int) -> None:
    urls = [with_fresh_schema(postgres_server.url) for _ in range(2)]

    async def use() -> None:
        async with AsyncExitStack() as stack:
            twins = [Twin(url, stack, has_memory=n == 0) for n, url in enumerate(urls)]
            for twin in twins:
                await twin.open()
            story = Story(seed)
            claimed = 0
            for step in range(250):
                what, fields = story.next()
                ours, theirs = [await getattr(twin, what)(**fields) for twin in twins]
                assert ours == theirs, f"seed {seed}, step {step}: {what}({fields})"
                claimed += len(ours) if what == "reserve" else 0
            assert claimed > 50

    try:
        asyncio.run(use())
    finally:
        for url in urls:
            drop_schema(url)
