"""A PostgreSQL server, or the way to it, goes away under a worker: it comes through by itself, and every job ends once.

What a single lost answer does to a single call is told in `test_postgres_ambiguity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from drivers.postgres import harness
from drivers.postgres.harness import Line, Raw, ack, claim, held, ids, line, make_records, wait
from needing import Entered
from records import NOW, make_record, present
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.contract import Ack, Extension, JobFilter
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres import driver as notifying
from taskharbor.errors import BackendUnavailable
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.servers import FaultProxy, PostgresServer, with_fresh_schema
from worker.stage import Stage, eventually, finish, running, stage

SEED = "TASKHARBOR_POSTGRES_CUT_SEED"


@pytest.fixture
def at_work(server: PostgresServer) -> Entered:
    """A store on a server that may be stopped."""
    return Entered(stage(PostgresDriver.from_url(with_fresh_schema(server.url))))


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
        self._ids: list[str] = []

    async def handle(self, job: Job) -> None:
        self._executions[job.id] += 1
        if self._is_held:
            self._held.add(job.id)
            await self._go_on.wait()

    @contextlib.asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """The outage is the block: it ends when the block does. Then all jobs end, once each."""
        worker = self._here.worker(self.handle, concurrency=self.MIDST, lease=60.0, poll_interval=0.2)
        async with running(worker):
            await self._add_jobs()
            await self._ended()
            self._is_held = True
            await self._add_jobs()
            await eventually(lambda: len(self._held) == self.MIDST)
            yield
            self._is_held = False
            self.let_go()
            await self._add_jobs()
            await self._ended()
        assert self._executions == dict.fromkeys(self._ids, 1)
        (stats,) = await self._here.client.stats("default")
        assert stats.counts[JobState.DONE] == stats.done_total == len(self._ids)
        attempts = (await self._here.client.read_attempts(limit=1000)).attempts
        assert sorted(row.job_id for row in attempts) == sorted(self._ids)
        assert {row.outcome for row in attempts} == {Outcome.DONE}
        check_no_overlap(spans(attempts, ()))

    def let_go(self) -> None:
        """The jobs in the middle of which the outage began may end now."""
        self._go_on.set()

    async def _add_jobs(self) -> None:
        self._ids += await self._here.enqueue_many(20)

    async def _ended(self) -> None:
        for job_id in self._ids:
            assert (await self._here.ended(job_id)).state is JobState.DONE


OTHER_ENDS = [pytest.param(how, marks=pytest.mark.slow) for how in ("fast", "kill")]


@pytest.mark.parametrize("how", ["immediate", *OTHER_ENDS])
async def test_a_worker_comes_through_restarts(at_work: Stage, server: PostgresServer, how: Any) -> None:
    """Executions that end meanwhile are written later."""
    shift = Shift(at_work)
    end = server.kill if how == "kill" else partial(server.stop, how)
    async with shift.interrupted():
        await asyncio.to_thread(end)
        await asyncio.to_thread(server.restart)
        await asyncio.to_thread(end)
        shift.let_go()
        with pytest.raises(BackendUnavailable):
            await at_work.enqueue()
        await asyncio.to_thread(server.restart)


async def do_nothing(job: Job) -> None:
    pass


async def test_a_worker_waits_for_its_server(at_work: Stage, server: PostgresServer) -> None:
    job_id = await at_work.enqueue()
    await asyncio.to_thread(server.stop)
    async with running(at_work.worker(do_nothing, poll_interval=0.2)):
        await asyncio.to_thread(server.restart)
        assert (await at_work.ended(job_id)).state is JobState.DONE


# -- failing over -----------------------------------------------------------------------------------------

Pair = tuple[PostgresServer, PostgresServer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary that answers a commit only when its standby has it too."""
    with harness.crash_proof_server() as primary, primary.standby() as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names TO 'standby'")
        primary.execute("SELECT pg_reload_conf()")
        yield primary, standby


async def test_a_worker_finds_the_new_primary_among_its_hosts(pair: Pair) -> None:
    primary, standby = pair
    first, second = (urlsplit(one.url).netloc.rpartition("@")[2] for one in pair)
    either = with_fresh_schema(primary.url).replace(first, f"{first},{second}")
    async with stage(PostgresDriver.from_url(f"{either}&target_session_attrs=read-write")) as here:
        shift = Shift(here)
        async with shift.interrupted():
            await asyncio.to_thread(primary.kill)
            shift.let_go()
            await asyncio.to_thread(standby.promote)


async def test_a_worker_goes_on_when_its_address_leads_to_another_server(pair: Pair) -> None:
    """As behind a name or an address that moves: for a while it leads to a server that takes no writes."""
    primary, standby = pair
    with FaultProxy.to(primary.url) as proxy:
        driver = PostgresDriver.from_url(proxy.url_for(with_fresh_schema(primary.url)))
        async with stage(driver) as here:
            shift = Shift(here)
            async with shift.interrupted():
                proxy.reroute("127.0.0.1", standby.port)
                proxy.cut()
                with pytest.raises(BackendUnavailable, match="target_session_attrs"):
                    await here.client.driver.enqueue([make_record()], now=NOW)
                await asyncio.to_thread(standby.catch_up)
                await asyncio.to_thread(primary.kill)
                shift.let_go()
                await asyncio.to_thread(standby.promote)


# -- a handle and its connections -------------------------------------------------------------------------


async def test_every_call_says_that_the_server_is_away(server: PostgresServer) -> None:
    async def opened_and_closed(driver: PostgresDriver) -> None:
        async with driver:
            pass

    async with PostgresDriver.from_url(with_fresh_schema(server.url)) as driver:
        (known,) = await driver.enqueue([make_record()], now=NOW)
        (job,) = await claim(driver)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: driver.time(),
            lambda: driver.enqueue([make_record(queue="other")], now=NOW),
            lambda: driver.enqueue([make_record(queue="other", key="k")], now=NOW),
            lambda: claim(driver),
            lambda: driver.extend_lease([Extension(*held(job))], lease_for=harness.LEASE, now=NOW),
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
            lambda: wait(driver, "q", timeout=0.001),
            lambda: opened_and_closed(driver.clone()),
            lambda: driver.migrate(dry_run=True),
            lambda: driver.settle([Ack(*held(job))], now=NOW),
        ]
        with harness.nothing_unhandled():
            await asyncio.to_thread(server.stop, "immediate")
            for call in calls:
                with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1"):
                    await call()
            await asyncio.to_thread(server.restart)
            for call in calls:
                await call()
        assert await harness.outcomes(driver, job.id) == [Outcome.DONE]


class Traffic:
    """Producers and consumers on one handle, whose line is cut again and again in the middle of what they do."""

    def __init__(self, driver: PostgresDriver) -> None:
        self._driver = driver
        self.tries = 0
        self.accepted: set[str] = set()
        self.done: Counter[str] = Counter()

    def has_tried(self, times: int) -> bool:
        return self.tries >= times

    async def insist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """As a caller does: the same again until it is answered."""
        while True:
            self.tries += 1
            with contextlib.suppress(BackendUnavailable):
                return await call()

    async def produce(self, name: str, batches: int) -> None:
        for n in range(batches):
            batch = make_records(3) if n % 2 else make_records(1, idempotency_key=f"{name} {n}")
            answers = await self.insist(partial(self._driver.enqueue, batch, now=NOW))
            assert ids(answers) == ids(batch)
            self.accepted |= set(ids(batch))

    async def consume(self, name: str, is_over: Callable[[], bool]) -> None:
        while not is_over():
            jobs = await self.insist(lambda: claim(self._driver, 4, worker=name))
            await self.insist(partial(ack, self._driver, jobs))
            self.done.update(ids(jobs))


async def test_calls_on_a_line_that_is_cut_at_any_moment_happen_once(url: str) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    rng = random.Random(seed)
    producers, batches = 3, 20
    async with line(url, "&pool_size=5") as here:
        traffic = Traffic(here.near)

        async def cut() -> None:
            while True:
                more = traffic.tries + rng.randrange(12)
                await eventually(partial(traffic.has_tried, more))
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
        assert await harness.counts(here.far) == {JobState.DONE: len(traffic.accepted)}
        attempts = (await here.far.read_attempts(limit=2000)).attempts
        assert Counter(row.job_id for row in attempts) == traffic.done
        assert await here.near.stats(now=NOW) == await here.far.stats(now=NOW)


async def test_a_handle_without_a_free_connection_says_what_to_do(url: str, raw: Raw) -> None:
    async with line(url, "&pool_size=1&pool_timeout=0.2") as here:
        job = make_record()
        with raw.another("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"):
            held_up = asyncio.ensure_future(here.near.enqueue([job], now=NOW))
            await eventually(lambda: raw.locks_awaited() == 1)
            for call in (here.near.time(), claim(here.near)):
                with pytest.raises(BackendUnavailable, match="raise pool_size"):
                    await call
        assert ids(await finish(held_up)) == [job.id]
        # A claim that never left is no claim of which the answer was lost.
        assert ids(await claim(here.near)) == [job.id]
        assert here.proxy.connections == 1


async def test_a_server_without_room_for_more_connections_is_not_a_mystery(server: PostgresServer) -> None:
    server.execute("CREATE ROLE guest LOGIN CONNECTION LIMIT 0")
    with pytest.raises(BackendUnavailable, match="lower pool_size"):
        await PostgresDriver.from_url(server.url.replace("postgres@", "guest@")).open()


async def test_a_call_that_is_given_up_on_a_dead_line_takes_nothing_with_it(here: Line) -> None:
    await here.store()
    here.proxy.stall()
    calls = [here.near.time(), claim(here.near), here.near.enqueue([make_record(queue="other")], now=NOW)]
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
    async def is_claimed() -> bool:
        return len(await claim(here.near, worker="x")) == 1

    await eventually(is_claimed)


# -- listening --------------------------------------------------------------------------------------------


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener must notice what happens to its connection by itself, not when it next asks for a sign of life."""
    monkeypatch.setattr(notifying, "_PROBE", 10_000.0)


def listener(raw: Raw, *, but: int = 0) -> int | None:
    """The process of the server that has a listener."""
    found = raw("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %%' AND pid <> %s", but)
    return found[0][0] if found else None


async def new_listener(raw: Raw, old: int = 0) -> int:
    await eventually(lambda: listener(raw, but=old) is not None)
    return present(listener(raw, but=old))


async def settled(here: Line) -> None:
    """What the first looks find, and the news that the listener is up, are over."""
    while await wait(here.near, "q", timeout=0.05):
        pass


async def is_woken_by_a_job(here: Line) -> bool:
    await settled(here)
    waiting = wait(here.near, "q")
    # A listener that comes back wakes all who wait, once: it may do so after the server shows it.
    while (await asyncio.wait([waiting], timeout=0.05))[0]:
        waiting = wait(here.near, "q")
    await here.store()
    return await finish(waiting)


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize("how", ["terminated", "cut"])
async def test_a_listener_that_was_lost_comes_back_and_hears(url: str, raw: Raw, how: str) -> None:
    # Nobody looks by itself in this test.
    async with line(url, "&poll=3600") as here:
        await here.store()
        await wait(here.near, "q", timeout=0.01)
        old = await new_listener(raw)
        for _ in range(2):
            if how == "terminated":
                raw("SELECT pg_terminate_backend(%s)", old)
            else:
                here.proxy.cut()
            old = await new_listener(raw, old)
            assert await is_woken_by_a_job(here)


@pytest.mark.usefixtures("no_probe")
async def test_who_waits_while_connections_are_lost_is_woken(url: str, raw: Raw) -> None:
    """The worker would look again by itself only after ten minutes."""
    lost = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'th_lost'"
    driver = PostgresDriver.from_url(f"{url}&application_name=th_lost")
    with harness.nothing_unhandled():
        async with stage(driver) as here, running(here.worker(do_nothing, poll_interval=600.0)):
            await here.ended(await here.enqueue())
            for _ in range(3):
                raw(lost)
                await here.ended(await here.enqueue())


class SplitDriver(PostgresDriver):
    """Listens through a proxy, and does everything else straight."""

    proxy: FaultProxy

    async def open(self) -> None:
        await super().open()
        assert self._listener is not None
        by_proxy = f"{self.options.conninfo} port={self.proxy.port}"
        self._listener._options = msgspec.structs.replace(self.options, conninfo=by_proxy)


@contextlib.asynccontextmanager
async def split_line(url: str, options: str, raw: Raw) -> AsyncIterator[Line]:
    with FaultProxy.to(url) as proxy:
        near = SplitDriver.from_url(url + options)
        near.proxy = proxy
        async with near, PostgresDriver.from_url(url) as far:
            here = Line(near, far, proxy)
            await here.store()
            await wait(here.near, "q", timeout=0.01)
            await new_listener(raw)
            await settled(here)
            yield here


@pytest.mark.usefixtures("no_probe")
async def test_a_silent_line_loses_no_wake_up(url: str, raw: Raw) -> None:
    async with split_line(url, "&poll=3600", raw) as here:
        here.proxy.stall()
        waiting = wait(here.near, "q", timeout=0.1)
        await asyncio.wait([waiting], timeout=0.02)
        await here.store()
        assert not await finish(waiting)
        # Nobody told it, so it has to find out itself when it waits next.
        assert await finish(wait(here.near, "q"))
        here.proxy.flow()
        assert await is_woken_by_a_job(here)


async def test_a_silent_line_is_given_up(url: str, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifying, "_PROBE", 0.1)
    monkeypatch.setattr(notifying, "_PATIENCE", 0.1)
    async with split_line(url, "&poll=0.02", raw) as here:
        here.proxy.stall()
        for _ in range(3):
            assert await is_woken_by_a_job(here)
        here.proxy.cut()
        here.proxy.flow()
        await eventually(lambda: present(here.near._listener).is_up)
        assert await is_woken_by_a_job(here)
