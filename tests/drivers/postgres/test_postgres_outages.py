"""A PostgreSQL server, or the way to it, goes away under a worker: it comes through by itself, and every job ends once.

What a single lost answer does to a single call is told in `test_postgres_ambiguity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
import pytest

from drivers.postgres.outage_stage import (
    LEASE,
    NOW,
    Line,
    crash_proof_server,
    line,
    nothing_unhandled,
    records,
    table_locked,
    waiting_for_locks,
)
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.contract import Ack, Extension, JobFilter
from taskharbor.drivers.postgres import PostgresDriver, notifications
from taskharbor.errors import BackendUnavailable
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.servers import FaultProxy, PostgresServer, with_fresh_schema
from taskharbor_testkit.waits import waits_of
from worker.stage import Stage, eventually, finish, running, stage

SEED = "TASKHARBOR_POSTGRES_CUT_SEED"
LISTENERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with crash_proof_server() as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> str:
    return with_fresh_schema(server.url)


# -- a worker and its server ------------------------------------------------------------------------------


class Shift:
    """A worker with jobs before, in the middle of and behind an outage, and what became of each of them."""

    MIDST = 8
    """As many run when it begins; they end while it lasts."""

    def __init__(self, here: Stage) -> None:
        self._here = here
        self._executions: Counter[str] = Counter()
        self._go_on = asyncio.Event()
        self._is_held = False
        self._held: set[str] = set()
        self.ids: list[str] = []

    async def handle(self, job: Job) -> None:
        self._executions[job.id] += 1
        if self._is_held:
            self._held.add(job.id)
            await self._go_on.wait()

    @contextlib.asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """The outage is the block: it ends when the block does."""
        worker = self._here.worker(self.handle, concurrency=self.MIDST, lease=60.0, poll_interval=0.2)
        async with running(worker):
            self.ids += await self._here.enqueue_many(50)
            await self.ended()
            self._is_held = True
            self.ids += await self._here.enqueue_many(50)
            await eventually(lambda: len(self._held) == self.MIDST)
            yield
            self._is_held = False
            self.let_go()
            self.ids += await self._here.enqueue_many(50)
            await self.ended()

    def let_go(self) -> None:
        """The jobs in the middle of which the outage began may end now."""
        self._go_on.set()

    async def ended(self) -> None:
        for job_id in self.ids:
            assert (await self._here.ended(job_id)).state is JobState.DONE

    async def check(self) -> None:
        assert self._executions == dict.fromkeys(self.ids, 1)
        (stats,) = await self._here.client.stats("default")
        assert stats.counts[JobState.DONE] == stats.done_total == len(self.ids)
        attempts = (await self._here.client.read_attempts(limit=1000)).attempts
        assert sorted(row.job_id for row in attempts) == sorted(self.ids)
        assert {row.outcome for row in attempts} == {Outcome.DONE}
        check_no_overlap(spans(attempts, ()))


def connected(url: str) -> PostgresDriver:
    return PostgresDriver.from_url(url)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_worker_comes_through_a_restart(
    server: PostgresServer, url: str, mode: Literal["fast", "immediate"]
) -> None:
    async with stage(connected(url)) as here:
        shift = Shift(here)
        async with shift.interrupted():
            await asyncio.to_thread(server.restart, mode)
        await shift.check()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_what_ends_while_the_server_is_away_is_written_when_it_is_back(
    server: PostgresServer, url: str, mode: Literal["fast", "immediate"]
) -> None:
    async with stage(connected(url)) as here:
        shift = Shift(here)
        async with shift.interrupted():
            await asyncio.to_thread(server.stop, mode)
            shift.let_go()
            with pytest.raises(BackendUnavailable):
                await here.enqueue()
            await asyncio.to_thread(server.restart)
        await shift.check()


async def test_a_worker_comes_through_a_server_that_is_killed_again_and_again(
    server: PostgresServer, url: str
) -> None:
    async with stage(connected(url)) as here:
        shift = Shift(here)
        async with shift.interrupted():
            for _ in range(3):
                await asyncio.to_thread(server.kill)
                shift.let_go()
                await asyncio.to_thread(server.restart)
        await shift.check()


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(server: PostgresServer, url: str) -> None:
    async with stage(connected(url)) as here:
        job_id = await here.enqueue()
        await asyncio.to_thread(server.stop)

        async def handler(job: Job) -> None:
            pass

        async with running(here.worker(handler, poll_interval=0.2)):
            await asyncio.to_thread(server.restart)
            assert (await here.ended(job_id)).state is JobState.DONE


# -- failing over -----------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary that answers a commit only when its standby has it too."""
    with crash_proof_server() as primary, primary.standby() as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names TO 'standby'")
        primary.execute("SELECT pg_reload_conf()")
        yield primary, standby


async def test_a_worker_finds_the_new_primary_among_its_hosts(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    address = urlsplit(with_fresh_schema(primary.url))
    hosts = ",".join(urlsplit(one.url).netloc.rpartition("@")[2] for one in pair)
    url = f"postgresql://{address.username}@{hosts}{address.path}?{address.query}&target_session_attrs=read-write"

    async with stage(connected(url)) as here:
        shift = Shift(here)
        async with shift.interrupted():
            await asyncio.to_thread(primary.kill)
            shift.let_go()
            await asyncio.to_thread(standby.promote)
        await shift.check()


async def test_a_worker_goes_on_when_its_address_leads_to_another_server(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    """As behind a name or an address that moves: for a while it leads to a server that takes no writes."""
    primary, standby = pair

    with FaultProxy.to(primary.url) as proxy:
        async with stage(connected(proxy.url_for(with_fresh_schema(primary.url)))) as here:
            shift = Shift(here)
            async with shift.interrupted():
                proxy.reroute("127.0.0.1", standby.port)
                proxy.cut()
                with pytest.raises(BackendUnavailable, match="target_session_attrs"):
                    await here.client.driver.enqueue(records(1), now=NOW)
                await asyncio.to_thread(standby.catch_up)
                await asyncio.to_thread(primary.kill)
                shift.let_go()
                await asyncio.to_thread(standby.promote)
            await shift.check()


# -- a handle and its connections -------------------------------------------------------------------------


async def opened_and_closed(driver: PostgresDriver) -> None:
    async with driver:
        pass


async def test_every_call_says_that_the_server_is_away_and_works_when_it_is_back(
    server: PostgresServer, url: str
) -> None:
    async def main() -> None:
        async with connected(url) as driver:
            (known,) = await driver.enqueue(records(1), now=NOW)
            (job,) = await driver.reserve("q", limit=1, lease_for=LEASE, now=NOW, worker="w")
            token = job.token or ""
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: driver.time(),
                lambda: driver.enqueue(records(1, queue="other"), now=NOW),
                lambda: driver.enqueue(records(1, queue="other", key="k"), now=NOW),
                lambda: driver.reserve("q", limit=1, lease_for=LEASE, now=NOW, worker="w"),
                lambda: driver.extend_lease([Extension(job.id, token)], lease_for=LEASE, now=NOW),
                lambda: driver.reclaim(now=NOW),
                lambda: driver.cancel(["nobody"], now=NOW),
                lambda: driver.requeue(["nobody"], now=NOW),
                lambda: driver.purge(JobFilter(queue="nothing")),
                lambda: driver.prune(now=NOW),
                lambda: driver.get([known.id], now=NOW),
                lambda: driver.list_jobs(JobFilter(), now=NOW),
                lambda: driver.stats(now=NOW),
                lambda: driver.settings("q"),
                lambda: driver.read_attempts(),
                lambda: driver.job_attempts(known.id),
                lambda: waits_of(driver)(["q"], now=NOW, timeout=0.001),
                lambda: opened_and_closed(driver.clone()),
                lambda: driver.migrate(dry_run=True),
                lambda: driver.settle([Ack(job.id, token)], now=NOW),
            ]
            await asyncio.to_thread(server.stop, "immediate")
            for call in calls:
                with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1"):
                    await call()
            await asyncio.to_thread(server.restart)
            for call in calls:
                await call()
            assert [row.outcome for row in await driver.job_attempts(job.id)] == [Outcome.DONE]

    with nothing_unhandled():
        await main()


class Traffic:
    """Producers and consumers on one handle, whose line is cut again and again in the middle of what they do."""

    def __init__(self, here: Line) -> None:
        self._here = here
        self.tries = 0
        self.accepted: set[str] = set()
        self.done: Counter[str] = Counter()

    async def insist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """As a caller does: the same again until it is answered."""
        while True:
            self.tries += 1
            with contextlib.suppress(BackendUnavailable):
                return await call()

    async def produce(self, name: str, batches: int) -> None:
        for n in range(batches):
            batch = records(3) if n % 2 else records(1, idempotency_key=f"{name} {n}")
            answers = await self.insist(lambda batch=batch: self._here.near.enqueue(batch, now=NOW))
            assert [one.id for one in answers] == [record.id for record in batch]
            self.accepted |= {record.id for record in batch}

    async def consume(self, name: str, is_over: Callable[[], bool]) -> None:
        while not is_over():
            jobs = await self.insist(lambda: self._here.claim(4, worker=name))
            acks = [Ack(job.id, job.token or "") for job in jobs]
            answers = await self.insist(lambda acks=acks: self._here.near.settle(acks, now=NOW))
            assert answers == [None] * len(jobs)
            self.done.update(job.id for job in jobs)


async def test_calls_on_a_line_that_is_cut_at_any_moment_happen_once(server: PostgresServer) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    rng = random.Random(seed)
    producers, batches = 3, 40

    async def cut_and_work() -> None:
        async with line(server, "&pool_size=5") as here:
            traffic = Traffic(here)

            async def cut() -> None:
                while True:
                    more = traffic.tries + rng.randrange(12)
                    await eventually(lambda more=more: traffic.tries >= more)
                    here.proxy.cut()

            cutting = asyncio.ensure_future(cut())
            producing = [asyncio.ensure_future(traffic.produce(f"p{n}", batches)) for n in range(producers)]

            def is_over() -> bool:
                return all(one.done() for one in producing) and len(traffic.done) == len(traffic.accepted)

            consuming = [traffic.consume(f"w{n}", is_over) for n in range(2)]
            try:
                await finish(asyncio.gather(*producing, *consuming))
            finally:
                cutting.cancel()
                await asyncio.gather(cutting, return_exceptions=True)
            assert len(traffic.accepted) == producers * batches * 2
            assert traffic.done == dict.fromkeys(traffic.accepted, 1)
            assert await here.counts() == {JobState.DONE: len(traffic.accepted)}
            attempts = (await here.far.read_attempts(limit=2000)).attempts
            assert Counter(row.job_id for row in attempts) == traffic.done
            assert await here.near.stats(now=NOW) == await here.far.stats(now=NOW)

    with nothing_unhandled():
        await cut_and_work()


async def test_a_handle_whose_connections_are_all_held_up_says_what_to_do(server: PostgresServer) -> None:
    async with line(server, "&pool_size=1&pool_timeout=0.2") as here:
        batch = records(1)
        with table_locked(here.far, "jobs", "ACCESS EXCLUSIVE"):
            held_up = asyncio.ensure_future(here.near.enqueue(batch, now=NOW))
            await eventually(lambda: waiting_for_locks(server) == 1)
            with pytest.raises(BackendUnavailable, match="raise pool_size"):
                await here.near.time()
            with pytest.raises(BackendUnavailable, match="raise pool_size"):
                await here.claim()
        assert [one.id for one in await finish(held_up)] == [batch[0].id]
        # A claim that never left is no claim of which the answer was lost.
        assert [job.id for job in await here.claim()] == [batch[0].id]
        assert here.proxy.connections == 1


def test_a_server_without_room_for_more_connections_is_not_a_mystery(
    server: PostgresServer, url: str
) -> None:
    server.execute("CREATE ROLE guest LOGIN CONNECTION LIMIT 0")
    try:
        with pytest.raises(BackendUnavailable, match="lower pool_size"):
            asyncio.run(connected(url.replace("postgres@", "guest@")).open())
    finally:
        server.execute("DROP ROLE guest")


async def test_a_call_that_is_given_up_on_a_dead_line_takes_nothing_with_it(server: PostgresServer) -> None:
    async with line(server) as here:
        await here.store()
        here.proxy.stall()
        calls = [here.near.time(), here.claim(), here.near.enqueue(records(1), now=NOW)]
        given_up = [asyncio.ensure_future(call) for call in calls]
        await asyncio.wait(given_up, timeout=0.05)
        assert not any(call.done() for call in given_up)
        for call in given_up:
            call.cancel()
        _, pending = await asyncio.wait(given_up, timeout=30)
        assert not pending
        here.proxy.cut()
        here.proxy.flow()
        # The claim never reached the server, or its job was given back: somebody gets it.
        await eventually(
            lambda: _is_one(here.near.reserve("q", limit=1, lease_for=LEASE, now=NOW, worker="x"))
        )


async def _is_one(claim: Awaitable[Sequence[Any]]) -> bool:
    return len(await claim) == 1


# -- listening --------------------------------------------------------------------------------------------


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener must notice what happens to its connection by itself, not when it next asks for a sign of life."""
    monkeypatch.setattr(notifications, "_PROBE", 10_000.0)


def listeners(server: PostgresServer) -> list[int]:
    return [pid for (pid,) in server.execute(LISTENERS)]


@contextlib.asynccontextmanager
async def waiter(here: Line) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """Gives a function that waits, and has looked at everything that there is by then."""

    async def wait() -> bool:
        return await waits_of(here.near)(["q"], now=NOW, timeout=600.0)

    await settled(here)
    yield wait


async def settled(here: Line) -> None:
    """What the first looks find, and the news that the listener is up, are over."""
    while await waits_of(here.near)(["q"], now=NOW, timeout=0.05):
        pass


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize("how", ["terminated", "cut"])
async def test_a_listener_that_was_lost_comes_back_and_hears(server: PostgresServer, how: str) -> None:
    async def main() -> None:
        # Nobody looks by itself in this test.
        async with line(server, "&poll=3600") as here:
            await here.store()
            await waits_of(here.near)(["q"], now=NOW, timeout=0.01)
            await eventually(lambda: len(listeners(server)) == 1)
            for _ in range(3):
                (old,) = listeners(server)
                if how == "terminated":
                    server.execute("SELECT pg_terminate_backend(%s)", [old])
                else:
                    here.proxy.cut()
                await eventually(lambda old=old: len(listeners(server)) == 1 and listeners(server) != [old])
                async with waiter(here) as wait:
                    waiting = asyncio.ensure_future(wait())
                    # A listener that comes back wakes all who wait, once: it may do so after the server shows it.
                    while (await asyncio.wait([waiting], timeout=0.05))[0]:
                        waiting = asyncio.ensure_future(wait())
                    await here.store()
                    assert await finish(waiting)

    with nothing_unhandled():
        await main()


@pytest.mark.usefixtures("no_probe")
class KnownDriver(PostgresDriver):
    """Every handle that was opened, to ask it for its listener: what a connection says of itself is its last claim."""

    opened: ClassVar[list[PostgresDriver]] = []

    async def open(self) -> None:
        await super().open()
        self.opened.append(self)

    @classmethod
    def listeners(cls) -> list[int]:
        held = [handle._connections.listening for handle in cls.opened if handle._connections is not None]
        return [session.connection.info.backend_pid for session in held if session is not None]


async def test_who_waits_while_the_listener_is_lost_is_woken(server: PostgresServer, url: str) -> None:
    """The worker would look again by itself only after ten minutes."""

    async def main() -> None:
        async with stage(KnownDriver.from_url(url)) as here:

            async def handler(job: Job) -> None:
                pass

            async with running(here.worker(handler, poll_interval=600.0)):
                await here.ended(await here.enqueue())
                for _ in range(5):
                    await eventually(lambda: len(KnownDriver.listeners()) == 1)
                    (listener,) = KnownDriver.listeners()
                    server.execute("SELECT pg_terminate_backend(%s)", [listener])
                    await here.ended(await here.enqueue())
                    await eventually(lambda gone=listener: gone not in KnownDriver.listeners())

    with nothing_unhandled():
        await main()


class SplitDriver(PostgresDriver):
    """Listens through a proxy, and does everything else straight."""

    proxy: FaultProxy

    async def open(self) -> None:
        await super().open()
        assert self._listener is not None
        by_proxy = f"{self.options.conninfo} port={self.proxy.port}"
        self._listener._options = msgspec.structs.replace(self.options, conninfo=by_proxy)


@contextlib.asynccontextmanager
async def split_line(server: PostgresServer, options: str) -> AsyncIterator[Line]:
    url = with_fresh_schema(server.url)
    with FaultProxy.to(server.url) as proxy:
        near = SplitDriver.from_url(url + options)
        near.proxy = proxy
        async with near, connected(url) as far:
            await far.enqueue(records(1), now=NOW)
            await waits_of(near)(["q"], now=NOW, timeout=0.01)
            await eventually(lambda: len(listeners(server)) == 1)
            yield Line(near, far, proxy)


@pytest.mark.usefixtures("no_probe")
async def test_a_line_that_fell_silent_delays_a_wake_up_but_loses_none(server: PostgresServer) -> None:
    async with split_line(server, "&poll=3600") as here, waiter(here) as wait:
        here.proxy.stall()
        waiting = asyncio.ensure_future(waits_of(here.near)(["q"], now=NOW, timeout=0.1))
        await asyncio.wait([waiting], timeout=0.02)
        await here.store()
        assert not await finish(waiting)
        # Nobody told it, so it has to find out itself when it waits next.
        assert await finish(wait())
        here.proxy.flow()
        await settled(here)
        waiting = asyncio.ensure_future(wait())
        await asyncio.wait([waiting], timeout=0.05)
        await here.store()
        assert await finish(waiting)


async def test_a_line_that_stays_silent_is_given_up_for_looking(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_PROBE", 0.1)
    monkeypatch.setattr(notifications, "_PATIENCE", 0.1)

    async with split_line(server, "&poll=0.02") as here, waiter(here) as wait:
        here.proxy.stall()
        for _ in range(3):
            waiting = asyncio.ensure_future(wait())
            await asyncio.wait([waiting], timeout=0.05)
            await here.store()
            assert await finish(waiting)
        here.proxy.cut()
        here.proxy.flow()
        ear = here.near._listener
        assert ear is not None
        await eventually(lambda: ear.is_up)
        waiting = asyncio.ensure_future(wait())
        await here.store()
        assert await finish(waiting)
