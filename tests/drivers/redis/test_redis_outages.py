"""A Redis server, or the way to it, goes away under a worker: it comes through by itself, and every job ends once.

`test_redis_lost_answers` shows what a single lost answer does to a single call.
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

import msgspec
import pytest

from drivers.redis.redis_shelf import LEASE, Line, Shelf, ack, calls_for, fail, token
from drivers.redis.redis_stage import nothing_unhandled
from needing import REDIS_VERSIONS
from records import NOW, make_record
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.contract import Enqueued, Extension, FailurePayload, JobFilter, QueueSettings
from taskharbor.drivers.redis import RedisDriver, leases
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.errors import BackendUnavailable, LeaseMismatch
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.servers import (
    FaultProxy,
    RedisCluster,
    RedisSentinels,
    RedisServer,
    with_fresh_prefix,
)
from worker.stage import Stage, eventually, finish, running, stage

SEED = "TASKHARBOR_REDIS_CUT_SEED"
FAILS_OVER = "?wait_replicas=1&wait_timeout=1&timeout=2&connect_timeout=2"
"""Every change waits for the replica, so nothing that was answered can be lost."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """What it has answered survives any end of its process."""
    with RedisServer.start(appendonly=True, fsync="always") as started:
        yield started


class Shift:
    """A worker with jobs before, in the middle of and behind an outage, and what became of each of them."""

    MIDST = 8
    """As many run when it begins; they end while it lasts."""

    def __init__(self, here: Stage) -> None:
        self.here = here
        self.ids: list[str] = []
        self._executions: Counter[str] = Counter()
        self._go_on = asyncio.Event()
        self._is_held = False
        self._held: set[str] = set()

    async def handle(self, job: Job) -> None:
        self._executions[job.id] += 1
        if self._is_held:
            self._held.add(job.id)
            await self._go_on.wait()

    @contextlib.asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """The outage is the block: it ends when the block does."""
        worker = self.here.worker(self.handle, concurrency=self.MIDST, lease=60.0, poll_interval=0.2)
        async with running(worker):
            self.ids += await self.here.enqueue_many(20)
            await self.ended()
            self._is_held = True
            self.ids += await self.here.enqueue_many(20)
            await eventually(lambda: len(self._held) == self.MIDST)
            yield
            self._is_held = False
            self.let_go()
            self.ids += await self.here.enqueue_many(20)
            await self.ended()

    def let_go(self) -> None:
        """The jobs in the middle of which the outage began may end now."""
        self._go_on.set()

    async def ended(self) -> None:
        for job_id in self.ids:
            assert (await self.here.ended(job_id)).state is JobState.DONE

    async def check(self) -> None:
        assert self._executions == dict.fromkeys(self.ids, 1)
        (stats,) = await self.here.client.stats("default")
        assert stats.counts[JobState.DONE] == stats.done_total == len(self.ids)
        attempts = (await self.here.client.read_attempts(limit=1000)).attempts
        assert sorted(row.job_id for row in attempts) == sorted(self.ids)
        assert {row.outcome for row in attempts} == {Outcome.DONE}
        check_no_overlap(spans(attempts, ()))


@contextlib.asynccontextmanager
async def shift(url: str) -> AsyncIterator[Shift]:
    """The block is the outage of a worker on this store."""
    async with stage(RedisDriver.from_url(url)) as here:
        made = Shift(here)
        async with made.interrupted():
            yield made
        await made.check()


async def is_followed(new: RedisServer, old: RedisServer) -> None:
    """The former master comes back as a replica. Before that no change can be answered."""
    await asyncio.to_thread(old.restart)
    await eventually(lambda: "state=online" in new.info("replication").get("slave0", ""))


# -- a worker and its server ------------------------------------------------------------------------------


async def _restart(server: RedisServer, it: Shift, *ends: Callable[[RedisServer], None]) -> None:
    for end in ends or (RedisServer.stop,):
        await asyncio.to_thread(end, server)
        it.let_go()
        with pytest.raises(BackendUnavailable, match="refused"):
            await it.here.enqueue()
        await asyncio.to_thread(server.restart)


async def _kill_again_and_again(server: RedisServer, it: Shift) -> None:
    await _restart(server, it, *[RedisServer.kill] * 3)


async def _forget_functions(server: RedisServer, it: Shift) -> None:
    server.execute("FUNCTION", "FLUSH")
    it.let_go()
    server.execute("FUNCTION", "FLUSH")


async def _fall_silent(server: RedisServer, it: Shift) -> None:
    server.pause()
    it.let_go()
    with pytest.raises(BackendUnavailable, match=r"no answer within 0\.3 s|no connection within"):
        await it.here.client.driver.time()
    server.resume()


async def _run_full(server: RedisServer, it: Shift) -> None:
    """A full server has its jobs finished and takes no new ones."""
    server.execute("CONFIG", "SET", "maxmemory", 1)
    it.let_go()
    await it.ended()
    with pytest.raises(BackendUnavailable, match="memory is full"):
        await it.here.enqueue()
    server.execute("CONFIG", "SET", "maxmemory", 0)


@pytest.mark.parametrize(
    "outage", [_restart, _kill_again_and_again, _forget_functions, _fall_silent, _run_full]
)
async def test_a_worker_comes_through(
    server: RedisServer, outage: Callable[[RedisServer, Shift], Awaitable[None]]
) -> None:
    options = "&timeout=0.3&connect_timeout=0.3" if outage is _fall_silent else ""
    async with shift(with_fresh_prefix(server.url) + options) as it:
        await outage(server, it)


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(server: RedisServer) -> None:
    async with stage(RedisDriver.from_url(with_fresh_prefix(server.url))) as here:
        job_id = await here.enqueue()
        await asyncio.to_thread(server.stop)
        async with running(here.worker(lambda job: None, poll_interval=0.2)):
            await asyncio.to_thread(server.restart)
            assert (await here.ended(job_id)).state is JobState.DONE


async def test_a_worker_waits_for_a_server_that_reads_its_data() -> None:
    """LOADING: it is there, and refuses everything until it has read all from its disk."""
    slowly = {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    fill = "for n = 1, 800 do redis.call('SET', 'other' .. n, string.rep('x', 100)) end"
    said: set[str] = set()
    with RedisServer.start(appendonly=True, fsync="always", config=slowly) as slow:
        slow.execute("EVAL", fill, 0)
        slow.execute("BGREWRITEAOF")
        slow.wait(lambda: slow.info("persistence")["aof_rewrite_in_progress"] == "0", "rewrite its file")
        async with shift(with_fresh_prefix(slow.url)) as it:
            await asyncio.to_thread(slow.stop)
            it.let_go()
            starting = asyncio.ensure_future(asyncio.to_thread(slow.restart))
            while not starting.done():
                try:
                    await it.here.client.driver.reclaim(now=1)
                except BackendUnavailable as error:
                    said.add(str(error).rpartition("(")[2])
                await asyncio.sleep(0.01)
            await starting
    assert "LOADING)" in said


# -- failing over -----------------------------------------------------------------------------------------


@pytest.mark.slow  # `test_redis_sentinel` follows a failover without a worker.
async def test_a_worker_follows_its_sentinels_to_the_new_master() -> None:
    with RedisSentinels.start() as group:
        async with shift(group.url + FAILS_OVER) as it:
            new = await asyncio.to_thread(group.kill_master)
            it.let_go()
            # Nobody follows the new master yet, and no call may succeed before somebody does.
            with pytest.raises(BackendUnavailable):
                await it.here.client.driver.enqueue([make_record()], now=NOW)
            await is_followed(new, group.servers[0])


@pytest.mark.slow  # As `test_redis_cluster_connections` does without a worker.
async def test_a_worker_follows_its_cluster_to_the_new_master() -> None:
    with RedisCluster.start(replicas=True) as cluster:
        key = "{default}:waiting"
        async with shift(cluster.url + FAILS_OVER) as it:
            old = cluster.node_of(key)
            new = await asyncio.to_thread(cluster.kill_master, key)
            it.let_go()
            await is_followed(new, old)


async def test_a_worker_goes_on_when_its_address_leads_to_another_server() -> None:
    """As behind a name or an address that moves: for a while it leads to a server that takes no writes."""
    with RedisServer.start() as master, master.replica() as replica, FaultProxy.to(master.url) as proxy:
        async with shift(proxy.url_for(with_fresh_prefix(master.url))) as it:
            await asyncio.to_thread(replica.catch_up, master)
            proxy.reroute("127.0.0.1", replica.port)
            proxy.cut()
            with pytest.raises(BackendUnavailable, match=r"replica.*READONLY"):
                await it.here.client.driver.enqueue([make_record()], now=NOW)
            await asyncio.to_thread(master.kill)
            it.let_go()
            await asyncio.to_thread(replica.promote)


async def test_what_a_promoted_replica_lost_can_be_done_again_and_is_not_mixed_up() -> None:
    """It counts on from what it knows, so fences come again. Tokens do not, and only who holds the right one ends a job. A
    producer that keeps its records until it knows better repeats them, and each is there once."""
    with RedisServer.start() as master, master.replica() as replica:
        async with RedisDriver.from_url(master.url) as one, RedisDriver.from_url(replica.url) as other:
            before, after = Shelf(one, master), Shelf(other, replica)
            kept, lost = before.jobs(3), before.jobs(2)
            await before.enqueue(*kept)
            replica.catch_up(master)
            replica.execute("REPLICAOF", "NO", "ONE")
            await before.enqueue(*lost)
            stale = await before.reserve(5)
            master.kill()
            answers = await after.driver.enqueue([*kept, *lost], now=NOW)
            assert [answer.existed for answer in answers] == [True] * 3 + [False] * 2
            again = await after.reserve(9)
            assert [(job.id, job.fence) for job in again] == [(job.id, 1) for job in (*kept, *lost)]
            assert not {job.token for job in again} & {job.token for job in stale}
            refused = await after.driver.settle([ack(job) for job in stale], now=NOW)
            assert [type(answer) for answer in refused] == [LeaseMismatch] * 5
            # Nothing of that has cost the true holder anything.
            await after.settle(*map(ack, again))
            assert [row.outcome for row in await after.log(kept[0].id)] == [Outcome.DONE]


# -- servers of each version ------------------------------------------------------------------------------


@pytest.fixture(params=REDIS_VERSIONS)
def own(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the test's own."""
    with RedisServer.start(version=request.param) as started:
        yield started


async def test_a_full_server_takes_no_jobs_but_lets_those_it_has_be_finished(own: RedisServer) -> None:
    async with RedisDriver.from_url(own.url) as driver:
        on = Shelf(driver, own)
        await on.enqueue(*on.jobs(50))
        (keyed,) = await on.enqueue(on.job(key="k"))
        held = await on.reserve(10)
        on.server.execute("CONFIG", "SET", "maxmemory", 1)
        for fields in ({}, {"key": "other"}, {"idempotency_key": "i"}):
            for new_ids in (False, True):
                with pytest.raises(BackendUnavailable, match=r"memory is full.*nothing of this call"):
                    await on.enqueue(*on.jobs(3, **fields), new_ids=new_ids)
            with pytest.raises(BackendUnavailable, match="memory is full"):
                await on.enqueue(on.job(queue="new", **fields))
        # Nothing is added by this: a job that waits is changed.
        assert await driver.enqueue([on.job(key="k")], now=NOW) == [Enqueued(keyed, True)]
        assert await on.counts() == {JobState.READY: 41, JobState.INFLIGHT: 10}
        # What is there can be worked off, and then removed.
        beats = [Extension(job.id, token(job), b"progress") for job in held]
        assert len(await driver.extend_lease(beats, lease_for=LEASE, now=NOW)) == 10
        await on.settle(*map(ack, held))
        assert len(await on.reserve(100)) == 41
        assert await driver.reclaim(now=NOW + LEASE) == 41
        assert await driver.cancel([keyed], now=NOW) == [JobState.CANCELLED]
        assert await driver.purge(JobFilter(queue="q"), limit=1000) == 11
        on.server.execute("CONFIG", "SET", "maxmemory", 0)
        assert len(await on.reserve(100)) == 40
        await on.enqueue(on.job())


RIGHTS = ("+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "+@transaction", "+info", "+time")


@pytest.mark.parametrize("channels", [["&p:*"], []], ids=["with channels", "without"])
async def test_the_rights_that_the_manual_names_are_enough(own: RedisServer, channels: list[str]) -> None:
    """Without channels nobody is woken. The error of a refused notification came after the change was made."""
    own.execute("ACL", "SETUSER", "app", "on", ">word", "resetchannels", "~p:*", *channels, *RIGHTS)
    async with shift(own.url.replace("redis://", "redis://app:word@") + "?prefix=p:") as it:
        driver = it.here.client.driver
        await driver.enqueue([make_record(), make_record(queue="r", key="k")], now=NOW)
        await driver.configure("q", QueueSettings(max_inflight=1), now=NOW)
        (job,) = await driver.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker="w")
        await driver.extend_lease([Extension(job.id, token(job))], lease_for=LEASE, now=NOW)
        await driver.cancel([job.id], now=NOW)
        await driver.list_jobs(JobFilter(), now=NOW)
        await driver.prune(now=NOW)
        await driver.purge(JobFilter(queue="q"))
    assert not (channels and own.execute("ACL", "LOG"))


# -- a handle and its connection --------------------------------------------------------------------------


async def test_every_call_says_that_the_server_is_away_and_works_when_it_is_back(server: RedisServer) -> None:
    async def reopened() -> None:
        async with driver.clone():
            pass

    with nothing_unhandled():
        async with RedisDriver.from_url(with_fresh_prefix(server.url)) as driver:
            on = Shelf(driver, server)
            (job,) = await on.claimed(1)
            calls = [
                lambda: on.enqueue(on.job(queue="other")),
                lambda: on.enqueue(on.job(queue="other", key="k")),
                reopened,
                *calls_for(on, job),
            ]
            await asyncio.to_thread(server.kill)
            for call in calls:
                with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1"):
                    await call()
            await asyncio.to_thread(server.restart)
            for call in calls:
                await call()
            assert [row.outcome for row in await on.log(job.id)] == [Outcome.DONE]


class Traffic:
    """Producers and consumers on one handle, whose line is cut again and again in the middle of what they do."""

    def __init__(self, here: Line) -> None:
        self._here = here
        self.tries = 0
        self.accepted: set[str] = set()
        self.done: Counter[str] = Counter()

    async def insist(self, call: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """As a caller does: the same again until it is answered."""
        while True:
            self.tries += 1
            with contextlib.suppress(BackendUnavailable):
                return await call(*args, **options)

    async def produce(self, name: str, batches: int) -> None:
        for n in range(batches):
            batch = self._here.jobs(3) if n % 2 else [self._here.job(idempotency_key=f"{name} {n}")]
            answers = await self.insist(self._here.near.enqueue, batch, now=NOW)
            assert [one.id for one in answers] == [job.id for job in batch]
            self.accepted |= {job.id for job in batch}

    async def consume(self, name: str, is_over: Callable[[], bool]) -> None:
        while not is_over():
            jobs = await self.insist(self._here.claim, 4, worker=name)
            acks = [ack(job) for job in jobs]
            answers = await self.insist(self._here.near.settle, acks, now=NOW)
            assert answers == [None] * len(jobs)
            self.done.update(job.id for job in jobs)

    def _has_tried(self, count: int) -> bool:
        return self.tries >= count

    async def cut(self, dice: random.Random) -> None:
        while True:
            await eventually(partial(self._has_tried, self.tries + dice.randrange(12)))
            self._here.proxy.cut()


async def test_calls_on_a_line_that_is_cut_at_any_moment_happen_once(here: Line) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    producers, batches = 3, 24
    traffic = Traffic(here)
    cutting = asyncio.ensure_future(traffic.cut(random.Random(seed)))
    producing = [asyncio.ensure_future(traffic.produce(f"p{n}", batches)) for n in range(producers)]

    def is_over() -> bool:
        return all(one.done() for one in producing) and len(traffic.done) == len(traffic.accepted)

    try:
        await finish(asyncio.gather(*producing, *(traffic.consume(f"w{n}", is_over) for n in range(2))))
    finally:
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
    assert len(traffic.accepted) == producers * batches * 2
    assert traffic.done == dict.fromkeys(traffic.accepted, 1)
    assert await here.counts() == {JobState.DONE: len(traffic.accepted)}
    attempts = (await here.driver.read_attempts(limit=2000)).attempts
    assert Counter(row.job_id for row in attempts) == traffic.done


async def test_a_handle_has_one_connection_however_many_calls_it_makes(here: Line) -> None:
    await here.enqueue(*here.jobs(200))
    batches = await asyncio.gather(*(here.claim(2, worker=f"w{n}") for n in range(100)))
    assert sum(map(len, batches)) == 200
    assert here.proxy.connections == 1
    here.proxy.cut()
    await asyncio.gather(*(here.near.time() for _ in range(100)))
    assert here.proxy.connections == 1


# -- deaths that nobody was told of ----------------------------------------------------------------------


async def _dies(store: RedisStore, queue: str) -> None:
    raise BackendUnavailable("the client is gone")


async def _dead_and_untold(on: Shelf, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> list[str]:
    """Jobs that died while their worker did: written down, but not told."""
    await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
    held = await on.claimed(count)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "deliver", _dies)
        with pytest.raises(BackendUnavailable):
            await on.driver.settle([fail(job) for job in held], now=on.now)
    assert on.ask("LLEN", "outbox") == count
    return sorted(job.id for job in held)


async def _by_reserve(on: Shelf) -> None:
    assert await on.reserve() == []


async def _by_settle(on: Shelf) -> None:
    await on.settle(*map(ack, await on.claimed(1)))


async def _by_reclaim(on: Shelf) -> None:
    await on.enqueue(on.job())
    await on.reserve()
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now) == 1


async def _by_four_at_once(on: Shelf) -> None:
    await asyncio.gather(*[deliver(on.driver._store, "q") for _ in range(4)])


@pytest.mark.parametrize("next_one", [_by_reserve, _by_settle, _by_reclaim, _by_four_at_once])
async def test_what_a_client_left_untold_is_told_once_by_the_next_one(
    on: Shelf, next_one: Callable[[Shelf], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await _dead_and_untold(on, monkeypatch, count=250 if next_one is _by_four_at_once else 3)
    await next_one(on)
    assert on.ask("EXISTS", "outbox") == 0
    told = await list_all(on.driver, JobFilter(queue="failed"), on.now)
    assert sorted(msgspec.json.decode(job.payload, type=FailurePayload).job_id for job in told) == ids


async def test_what_was_leased_is_kept_when_telling_fails(on: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    await _dead_and_untold(on, monkeypatch)
    await on.enqueue(job := on.job())
    monkeypatch.setattr(leases, "deliver", _dies)
    assert [held.id for held in await on.reserve()] == [job.id]
