"""A Redis server, or the way to it, goes away under a worker: it comes through by itself, and every job ends once.

What a single lost answer does to a single call is told in `test_redis_ambiguity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from drivers.redis.redis_line import LEASE, NOW, Line, line, records
from drivers.redis.redis_stage import nothing_unhandled
from needing import REDIS_VERSIONS
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.contract import Ack, Enqueued, Extension, JobFilter, QueueSettings
from taskharbor.drivers.redis import RedisDriver
from taskharbor.errors import BackendUnavailable, LeaseMismatch
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.servers import (
    FaultProxy,
    RedisCluster,
    RedisSentinels,
    RedisServer,
    with_fresh_prefix,
)
from worker.stage import Stage, eventually, finish, running, stage

SEED = "TASKHARBOR_REDIS_CUT_SEED"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """What it has answered survives any end of its process."""
    with RedisServer.start(appendonly=True, fsync="always") as started:
        yield started


@pytest.fixture
def url(server: RedisServer) -> str:
    return with_fresh_prefix(server.url)


def connected(url: str) -> RedisDriver:
    return RedisDriver.from_url(url)


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


def through(url: str, outage: Callable[[Shift, Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with stage(connected(url)) as here:
            shift = Shift(here)
            async with shift.interrupted():
                await outage(shift, here)
            await shift.check()

    asyncio.run(main())


def test_a_worker_comes_through_a_restart(server: RedisServer, url: str) -> None:
    async def outage(shift: Shift, here: Stage) -> None:
        await asyncio.to_thread(server.restart)

    through(url, outage)


def test_what_ends_while_the_server_is_away_is_written_when_it_is_back(server: RedisServer, url: str) -> None:
    async def outage(shift: Shift, here: Stage) -> None:
        await asyncio.to_thread(server.stop)
        shift.let_go()
        with pytest.raises(BackendUnavailable, match="refused"):
            await here.enqueue()
        await asyncio.to_thread(server.restart)

    through(url, outage)


def test_a_worker_comes_through_a_server_that_is_killed_again_and_again(
    server: RedisServer, url: str
) -> None:
    async def outage(shift: Shift, here: Stage) -> None:
        for _ in range(3):
            await asyncio.to_thread(server.kill)
            shift.let_go()
            await asyncio.to_thread(server.restart)

    through(url, outage)


def test_a_worker_goes_on_when_the_server_forgot_all_scripts(server: RedisServer, url: str) -> None:
    async def outage(shift: Shift, here: Stage) -> None:
        server.execute("FUNCTION", "FLUSH")
        shift.let_go()
        server.execute("FUNCTION", "FLUSH")

    through(url, outage)


def test_a_worker_sits_out_a_server_that_does_not_answer(server: RedisServer, url: str) -> None:
    async def outage(shift: Shift, here: Stage) -> None:
        server.pause()
        shift.let_go()
        with pytest.raises(BackendUnavailable):
            await here.client.driver.time()
        server.resume()

    through(url + "&timeout=0.3&connect_timeout=0.3", outage)


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(server: RedisServer, url: str) -> None:
    async with stage(connected(url)) as here:
        job_id = await here.enqueue()
        await asyncio.to_thread(server.stop)

        async def handler(job: Job) -> None:
            pass

        async with running(here.worker(handler, poll_interval=0.2)):
            await asyncio.to_thread(server.restart)
            assert (await here.ended(job_id)).state is JobState.DONE


async def test_a_worker_waits_for_a_server_that_reads_its_data() -> None:
    """LOADING: it is there, and refuses everything until it has read all from its disk."""
    slowly = {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    fill = "for n = 1, 1500 do redis.call('SET', 'other' .. n, string.rep('x', 100)) end"

    with RedisServer.start(appendonly=True, fsync="always", config=slowly) as slow:
        slow.execute("EVAL", fill, 0)
        slow.execute("BGREWRITEAOF")
        slow.wait(lambda: slow.info("persistence")["aof_rewrite_in_progress"] == "0", "rewrite its file")
        said: set[str] = set()
        async with stage(connected(with_fresh_prefix(slow.url))) as here:
            shift = Shift(here)
            async with shift.interrupted():
                await asyncio.to_thread(slow.stop)
                shift.let_go()
                starting = asyncio.ensure_future(asyncio.to_thread(slow.restart))
                while not starting.done():
                    try:
                        await here.client.driver.reclaim(now=1)
                    except BackendUnavailable as error:
                        said.add(str(error).rpartition("(")[2])
                    await asyncio.sleep(0.01)
                await starting
            await shift.check()
        assert "LOADING)" in said


# -- failing over -----------------------------------------------------------------------------------------


async def test_a_worker_follows_its_sentinels_to_the_new_master() -> None:
    """Every change waits for the replica, so nothing that was answered can be lost."""

    with RedisSentinels.start() as group:
        url = f"{group.url}?wait_replicas=1&wait_timeout=1&timeout=2&connect_timeout=2"
        async with stage(connected(url)) as here:
            shift = Shift(here)
            async with shift.interrupted():
                new = await asyncio.to_thread(group.kill_master)
                shift.let_go()
                # Nobody follows the new master yet, and no call may succeed before somebody does.
                with pytest.raises(BackendUnavailable):
                    await here.client.driver.enqueue(records(1), now=NOW)
                await asyncio.to_thread(group.servers[0].restart)
                await eventually(lambda: "state=online" in new.info("replication").get("slave0", ""))
            await shift.check()


async def test_a_worker_goes_on_when_its_address_leads_to_another_server() -> None:
    """As behind a name or an address that moves: for a while it leads to a server that takes no writes."""

    with RedisServer.start() as master, master.replica() as replica, FaultProxy.to(master.url) as proxy:
        async with stage(connected(proxy.url_for(with_fresh_prefix(master.url)))) as here:
            shift = Shift(here)
            async with shift.interrupted():
                await asyncio.to_thread(replica.catch_up, master)
                proxy.reroute("127.0.0.1", replica.port)
                proxy.cut()
                with pytest.raises(BackendUnavailable, match=r"replica.*READONLY"):
                    await here.client.driver.enqueue(records(1), now=NOW)
                await asyncio.to_thread(master.kill)
                shift.let_go()
                await asyncio.to_thread(replica.promote)
            await shift.check()


async def test_a_worker_follows_its_cluster_to_the_new_master() -> None:
    with RedisCluster.start(replicas=True) as cluster:
        key = "{default}:waiting"
        url = f"{cluster.url}?wait_replicas=1&wait_timeout=1&timeout=2&connect_timeout=2"
        async with stage(connected(url)) as here:
            shift = Shift(here)
            async with shift.interrupted():
                old = cluster.node_of(key)
                new = await asyncio.to_thread(cluster.kill_master, key)
                shift.let_go()
                await asyncio.to_thread(old.restart)
                await eventually(lambda: "state=online" in new.info("replication").get("slave0", ""))
            await shift.check()


async def test_a_replica_that_lost_claims_grants_others_that_cannot_be_mixed_up() -> None:
    """It counts on from what it knows, so fences come again. Tokens do not, and only who holds the right one ends a job."""

    with RedisServer.start() as master, master.replica() as replica:
        async with connected(master.url) as before, connected(replica.url) as after:
            await before.enqueue(records(2), now=NOW)
            replica.catch_up(master)
            replica.execute("REPLICAOF", "NO", "ONE")
            lost = await before.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker="w")
            master.kill()
            again = await after.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker="w")
            assert [(job.id, job.fence) for job in again] == [(job.id, job.fence) for job in lost]
            assert not {job.token for job in again} & {job.token for job in lost}
            answers = await after.settle([Ack(job.id, job.token or "") for job in lost], now=NOW)
            assert [type(answer) for answer in answers] == [LeaseMismatch] * 2
            # Nothing of that has cost the true holder anything.
            assert await after.settle([Ack(job.id, job.token or "") for job in again], now=NOW) == [None] * 2
            rows = [row for job in again for row in await after.job_attempts(job.id)]
            assert [row.outcome for row in rows] == [Outcome.DONE] * 2


async def test_a_job_whose_acceptance_was_lost_can_be_sent_again() -> None:
    """A producer that keeps its records until it knows better repeats them, and each is there once."""

    with RedisServer.start() as master, master.replica() as replica:
        async with connected(master.url) as before, connected(replica.url) as after:
            kept = records(3)
            await before.enqueue(kept, now=NOW)
            replica.catch_up(master)
            replica.execute("REPLICAOF", "NO", "ONE")
            lost = records(2)
            await before.enqueue(lost, now=NOW)
            master.kill()
            answers = await after.enqueue([*kept, *lost], now=NOW)
            assert [one.existed for one in answers] == [True] * 3 + [False] * 2
            claimed = await after.reserve("q", limit=9, lease_for=LEASE, now=NOW, worker="w")
            assert [job.id for job in claimed] == [job.id for job in (*kept, *lost)]


# -- a server that is full --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", REDIS_VERSIONS)
async def test_a_full_server_takes_no_jobs_but_lets_those_it_has_be_finished(version: str) -> None:
    with RedisServer.start(version=version) as small:
        async with connected(small.url) as driver:
            kept = await driver.enqueue(records(50, key=None), now=NOW)
            keyed = await driver.enqueue(records(1, key="k"), now=NOW)
            held = await driver.reserve("q", limit=10, lease_for=LEASE, now=NOW, worker="w")
            small.execute("CONFIG", "SET", "maxmemory", "1")
            for fields in ({}, {"key": "other"}, {"idempotency_key": "i"}):
                for new_ids in (False, True):
                    with pytest.raises(BackendUnavailable, match=r"memory is full.*nothing of this call"):
                        await driver.enqueue(records(3, **fields), now=NOW, new_ids=new_ids)
                with pytest.raises(BackendUnavailable, match="memory is full"):
                    await driver.enqueue(records(1, queue="new", **fields), now=NOW)
            # Nothing is added by this: a job that waits is changed.
            assert await driver.enqueue(records(1, key="k"), now=NOW) == [Enqueued(keyed[0].id, True)]
            (stats,) = await driver.stats(now=NOW, queue="q")
            assert stats.counts[JobState.READY] == 41
            # What is there can be worked off, and then removed.
            leases = await driver.extend_lease(
                [Extension(job.id, job.token or "", b"progress") for job in held],
                lease_for=LEASE,
                now=NOW,
            )
            assert len(leases) == 10
            acks = [Ack(job.id, job.token or "") for job in held]
            assert await driver.settle(acks, now=NOW) == [None] * 10
            rest = await driver.reserve("q", limit=100, lease_for=LEASE, now=NOW, worker="w")
            assert len(rest) == 41
            assert await driver.reclaim(now=NOW + LEASE) == 41
            assert await driver.cancel([keyed[0].id], now=NOW) == [JobState.CANCELLED]
            removed = await driver.purge(JobFilter(queue="q"), limit=1000)
            assert removed == 11
            small.execute("CONFIG", "SET", "maxmemory", "0")
            assert len(await driver.reserve("q", limit=100, lease_for=LEASE, now=NOW, worker="w")) == 40
            assert len(kept) == 50
            await driver.enqueue(records(1), now=NOW)


async def test_a_worker_finishes_what_a_full_server_has() -> None:
    with RedisServer.start() as small:
        async with stage(connected(small.url)) as here:
            shift = Shift(here)
            async with shift.interrupted():
                small.execute("CONFIG", "SET", "maxmemory", "1")
                shift.let_go()
                for job_id in shift.ids:
                    assert (await here.ended(job_id)).state is JobState.DONE
                with pytest.raises(BackendUnavailable, match="memory is full"):
                    await here.enqueue()
                small.execute("CONFIG", "SET", "maxmemory", "0")
            await shift.check()


# -- a handle and its connection --------------------------------------------------------------------------


async def opened_and_closed(driver: RedisDriver) -> None:
    async with driver:
        pass


async def test_every_call_says_that_the_server_is_away_and_works_when_it_is_back(
    server: RedisServer, url: str
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
                lambda: driver.wait(["q"], now=NOW, timeout=0.001),
                lambda: opened_and_closed(driver.clone()),
                lambda: driver.settle([Ack(job.id, token)], now=NOW),
            ]
            await asyncio.to_thread(server.kill)
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


async def test_calls_on_a_line_that_is_cut_at_any_moment_happen_once(server: RedisServer) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    rng = random.Random(seed)
    producers, batches = 3, 40

    async def cut_and_work() -> None:
        async with line(server) as here:
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


async def test_a_call_that_is_given_up_on_a_dead_line_takes_nothing_with_it(server: RedisServer) -> None:
    async with line(server) as here:
        await here.store()
        here.proxy.stall()
        calls = [here.near.time(), here.claim(), here.near.enqueue(records(1, queue="r"), now=NOW)]
        given_up = [asyncio.ensure_future(call) for call in calls]
        await asyncio.wait(given_up, timeout=0.05)
        assert not any(call.done() for call in given_up)
        for call in given_up:
            call.cancel()
        _, pending = await asyncio.wait(given_up, timeout=30)
        assert not pending
        here.proxy.cut()
        here.proxy.flow()

        async def is_claimed() -> bool:
            claimed = await here.far.reserve("q", limit=1, lease_for=LEASE, now=NOW, worker="x")
            return len(claimed) == 1

        # The claim never reached the server, or its job was given back: somebody gets it.
        await eventually(is_claimed)


async def test_a_handle_has_one_connection_however_many_calls_it_makes(server: RedisServer) -> None:
    async with line(server) as here:
        await here.store(200)
        batches = await asyncio.gather(*(here.claim(2, worker=f"w{n}") for n in range(100)))
        assert sum(map(len, batches)) == 200
        assert here.proxy.connections == 1
        here.proxy.cut()
        await asyncio.gather(*(here.near.time() for _ in range(100)))
        assert here.proxy.connections == 1


# -- a user of few rights ---------------------------------------------------------------------------------


RIGHTS = ("+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "+@transaction", "+info", "+time")


@pytest.mark.parametrize("version", REDIS_VERSIONS)
async def test_a_user_without_channels_works_and_wakes_nobody(version: str) -> None:
    """The error of a refused notification came after the change was made."""

    with RedisServer.start(version=version) as guarded:
        guarded.execute("ACL", "SETUSER", "app", "on", ">word", "resetchannels", "~p:*", *RIGHTS)
        url = guarded.url.replace("redis://", "redis://app:word@") + "?prefix=p:"
        async with connected(url) as driver:
            await driver.enqueue(records(2), now=NOW)
            jobs = await driver.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker="w")
            assert await driver.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW) == [None] * 2


@pytest.mark.parametrize("version", REDIS_VERSIONS)
async def test_the_rights_that_the_manual_names_are_enough(version: str) -> None:
    with RedisServer.start(version=version) as guarded:
        guarded.execute("ACL", "SETUSER", "app", "on", ">word", "resetchannels", "~p:*", "&p:*", *RIGHTS)
        url = guarded.url.replace("redis://", "redis://app:word@") + "?prefix=p:"
        async with stage(connected(url)) as here:
            shift = Shift(here)
            async with shift.interrupted():
                pass
            await shift.check()
            driver = here.client.driver
            await driver.enqueue([*records(1), *records(1, queue="r", key="k")], now=NOW)
            await driver.configure("q", QueueSettings(max_inflight=1), now=NOW)
            (job,) = await driver.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker="w")
            await driver.extend_lease([Extension(job.id, job.token or "")], lease_for=LEASE, now=NOW)
            await driver.cancel([job.id], now=NOW)
            await driver.list_jobs(JobFilter(), now=NOW)
            await driver.prune(now=NOW)
            await driver.purge(JobFilter())
        denied = guarded.execute("ACL", "LOG")
        assert denied == []
