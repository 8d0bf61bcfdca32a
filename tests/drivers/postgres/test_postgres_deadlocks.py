"""Calls that meet at the same jobs.

Batches lock them in different orders, and nobody waits for PostgreSQL to find out that two wait for each other: it would look
only after a second, and undo one of the two calls. A claim passes over a lease that another call is changing at this moment,
and still reckons with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest

from drivers.postgres.harness import LEASE, NOW, SECOND, Raw, claim, counts, held, ids, make_record
from drivers.postgres.test_postgres_ambiguity import ENDS
from needing import Entered
from records import present
from taskharbor.drivers.contract import Extension, QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.errors import JobNotInflight
from taskharbor.jobs import JobRecord, JobState, Lease
from taskharbor_testkit.servers import PostgresAt, PostgresServer
from worker.stage import eventually, finish

KINDS = ("ack", "ack with a result", "retry", "release")
Keys = Sequence[str | None]
KEYED: Keys = ("a", "b", "c")
NONE: Keys = (None, None, None)


class Crossing:
    """Three running jobs, and calls on them that meet."""

    def __init__(self, driver: PostgresDriver, raw: Raw, server: PostgresAt) -> None:
        self._driver = driver
        self._raw = raw
        self._server = server
        self.jobs: list[JobRecord] = []

    async def begin(self, keys: Keys) -> None:
        await self.enqueue(keys)
        self.jobs = await claim(self._driver, 3)
        assert len(self.jobs) == 3

    async def settle(self, kind: str) -> Any:
        a, b, c = map(ENDS[kind][0], self.jobs)
        return await self._driver.settle([b, c, a], now=NOW)

    async def beat(self) -> Any:
        beats = [Extension(*held(job)) for job in self.jobs[:2]]
        return await self._driver.extend_lease(beats, lease_for=LEASE, now=NOW + 1)

    async def enqueue(self, keys: Keys) -> Any:
        return await self._driver.enqueue([make_record(key=key) for key in keys], now=NOW)

    async def cancel(self) -> Any:
        a, b, c = ids(self.jobs)
        return await self._driver.cancel([b, c, a], now=NOW)

    async def cancel_keys(self) -> Any:
        return await self._driver.cancel_keys(["b", "c", "a"], queue="q", now=NOW)

    async def meet(self, first: Awaitable[Any], second: Awaitable[Any]) -> tuple[Any, Any]:
        """The answers of two calls, of which the first is held up at the last job until the second has come to meet it."""
        deadlocks = self._deadlocks()
        with self._raw.another() as holder:
            holder("SELECT FROM jobs WHERE id = %s FOR UPDATE", self.jobs[2].id)
            one = asyncio.ensure_future(first)
            await eventually(lambda: self._raw.locks_awaited() == 1)
            two = asyncio.ensure_future(second)
            # One that does not wait for locks asks again until the first is over.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await eventually(lambda: two.done() or self._raw.locks_awaited() == 2)
        answers = await finish(one), await finish(two)
        assert self._deadlocks() == deadlocks
        return answers

    async def claim_under_a_new_limit(self) -> list[JobRecord]:
        """The jobs of three claims that were made before the limit, and come to it together."""
        deadlocks = self._deadlocks()
        with self._raw.another("""SELECT change_settings('q', '{"max_inflight": 1}', 0)""") as limiting:
            claims = [asyncio.ensure_future(claim(self._driver)) for _ in range(3)]
            await eventually(lambda: self._raw.locks_awaited() == 3)
            limiting("COMMIT")
            jobs = [job for one in claims for job in await finish(one)]
        assert self._deadlocks() == deadlocks
        return jobs

    def _deadlocks(self) -> int:
        # The log of a server that is given by its address cannot be read.
        if not isinstance(self._server, PostgresServer):
            return 0
        return self._server.log.read_text(errors="replace").count("deadlock detected")


@pytest.fixture
def crossing(driver: PostgresDriver, raw: Raw, postgres_server: PostgresAt) -> Entered:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Crossing]:
        async with driver:
            yield Crossing(driver, raw, postgres_server)

    return Entered(opened())


@pytest.mark.parametrize("keys", [KEYED, NONE, ("a", None, None), (None, "b", "c")])
@pytest.mark.parametrize("kind", KINDS)
async def test_settlements_and_heartbeats(crossing: Crossing, kind: str, keys: Keys) -> None:
    await crossing.begin(keys)
    settled, leases = await crossing.meet(crossing.settle(kind), crossing.beat())
    assert settled == [None] * 3
    # Whichever came first, job by job: a heartbeat that held, or one of what had ended.
    assert all(isinstance(lease, (Lease, JobNotInflight)) for lease in leases)


@pytest.mark.parametrize("kind", KINDS)
async def test_settlements_and_enqueues_onto_their_keys(crossing: Crossing, kind: str) -> None:
    await crossing.begin(KEYED)
    settled, answers = await crossing.meet(crossing.settle(kind), crossing.enqueue("ab"))
    assert settled == [None] * 3
    assert len(answers) == 2


async def test_enqueues_onto_keys_and_heartbeats(crossing: Crossing) -> None:
    await crossing.begin(KEYED)
    answers, leases = await crossing.meet(crossing.enqueue("bca"), crossing.beat())
    assert [one.existed for one in answers] == [False] * 3
    assert all(isinstance(lease, Lease) for lease in leases)


@pytest.mark.parametrize("keys", [KEYED, NONE, ("a", None, None)])
async def test_cancels_and_heartbeats(crossing: Crossing, keys: Keys) -> None:
    await crossing.begin(keys)
    states, leases = await crossing.meet(crossing.cancel(), crossing.beat())
    assert states == [JobState.INFLIGHT] * 3
    assert all(isinstance(lease, Lease) for lease in leases)


@pytest.mark.parametrize("kind", KINDS)
async def test_settlements_and_cancels_by_key(crossing: Crossing, kind: str) -> None:
    await crossing.begin(KEYED)
    settled, cancelled = await crossing.meet(crossing.settle(kind), crossing.cancel_keys())
    assert settled == [None] * 3
    # The jobs have ended, or wait again.
    assert cancelled == [0 if kind.startswith("ack") else 1] * 3


@pytest.mark.parametrize("other", ["beat", "settle", "cancel", "enqueue"])
async def test_cancels_by_key_and_others(crossing: Crossing, other: str) -> None:
    await crossing.begin(KEYED)
    await crossing.enqueue("ac")
    calls = {"beat": crossing.beat, "cancel": crossing.cancel}
    calls |= {"settle": lambda: crossing.settle("retry"), "enqueue": lambda: crossing.enqueue("cba")}
    cancelled, _ = await crossing.meet(crossing.cancel_keys(), calls[other]())
    assert cancelled == [1, 2, 2]


# -- claims -----------------------------------------------------------------------------------------------


async def test_claims_that_find_a_new_limit(crossing: Crossing) -> None:
    await crossing.enqueue(NONE)
    assert len(await crossing.claim_under_a_new_limit()) == 1


# A heartbeat reads its clock before it takes effect. Meanwhile the lease may be over by another's clock, which yet cannot end
# it; when the heartbeat is done it holds again.

LATER = NOW + LEASE + SECOND
BEAT = "UPDATE jobs SET expires_at = expires_at + %s WHERE id = %s"
"""The change that a heartbeat makes. In these tests it commits when others have looked."""


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_lease_that_is_being_extended_takes_room(
    store: PostgresDriver, other: PostgresDriver, raw: Raw, key: str | None
) -> None:
    await store.configure("q", QueueSettings(max_inflight=1), now=NOW)
    await store.enqueue([make_record(key=key), make_record()], now=NOW)
    (job,) = await claim(store, 5)
    with raw.another() as beat:
        beat(BEAT, LEASE, job.id)
        assert await claim(other, 5, now=LATER) == []
        beat("COMMIT")
    assert present((await store.get([job.id], now=LATER))[0]).expires_at_us == NOW + 2 * LEASE
    # A lease that is really over makes room at last.
    (following,) = await claim(other, 5, now=LATER + LEASE)
    assert following.expires_at_us == LATER + 2 * LEASE
    assert (await counts(store))[JobState.INFLIGHT] == 1


async def test_an_extended_lease_is_not_reclaimed(
    store: PostgresDriver, other: PostgresDriver, raw: Raw
) -> None:
    await store.enqueue([make_record() for _ in range(3)], now=NOW)
    job, *free = await claim(store, 3)
    with raw.another() as beat:
        beat(BEAT, LEASE, job.id)
        assert await other.reclaim(now=LATER, queue="q") == 2
        assert sorted(ids(await claim(other, 5, now=LATER))) == sorted(ids(free))
        beat("COMMIT")
    found = present((await store.get([job.id], now=LATER))[0])
    assert (found.state, found.fence, found.worker) == (JobState.INFLIGHT, 1, "w")
    # And its end is not forgotten.
    assert await other.reclaim(now=LATER + LEASE, queue="q") == 3
