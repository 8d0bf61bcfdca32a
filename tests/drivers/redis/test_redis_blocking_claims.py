"""Blocking claims: what ends them, what time they claim by, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from drivers.redis.redis_shelf import token
from needing import Entered
from records import NOW, make_record, present
from taskharbor import Harbor
from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.redis.driver import RedisDriver
from taskharbor.drivers.redis.store import keys_of
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.servers import RedisServer
from worker.stage import PATIENCE, eventually, finish

LEASE = 60 * SECOND

# `NOW` is far from the server's clock: a claim that judged by that one would find nothing, or everything.


class Claimer:
    """A handle that claims, and another one on the same store."""

    def __init__(self, server: RedisServer, driver: RedisDriver, other: RedisDriver) -> None:
        self.server, self.driver, self.other = server, driver, other

    async def reserve(self, limit: int = 10, *, worker: str = "w") -> list[str]:
        jobs = await self.driver.reserve("q", limit=limit, lease_for=LEASE, now=NOW, worker=worker)
        return [job.id for job in jobs]

    async def block(self, limit: int = 10, *, timeout: float = PATIENCE) -> list[JobRecord] | None:
        return await self.driver.reserve_next(
            "q", limit=limit, lease_for=LEASE, now=NOW, worker="w", timeout=timeout
        )

    async def blocked(self, count: int = 1) -> asyncio.Task[list[JobRecord] | None]:
        """A claim that the server holds."""
        assert await self.reserve() == []
        claim = asyncio.create_task(self.block())
        await eventually(lambda: blocked_clients(self.server) >= count)
        return claim

    def enqueue_behind_its_back(self) -> None:
        """On another thread, so that this loop has no chance to read the answer."""

        async def enqueue() -> None:
            async with self.driver.clone() as producer:
                await producer.enqueue([make_record("a")], now=NOW)

        enqueued = threading.Thread(target=asyncio.run, args=(enqueue(),))
        enqueued.start()
        enqueued.join()

    async def given_back(self) -> None:
        await asyncio.gather(*self.driver._claims._giving_back)


def blocked_clients(server: RedisServer) -> int:
    return int(server.info("clients")["blocked_clients"])


@contextlib.asynccontextmanager
async def claimer(server: RedisServer, url: str) -> AsyncIterator[Claimer]:
    async with RedisDriver.from_url(url) as driver, driver.clone() as other:
        yield Claimer(server, driver, other)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Of these tests alone: they look at who is blocked there."""
    with RedisServer.start() as started:
        yield started


@pytest.fixture
def it(server: RedisServer) -> Entered:
    server.flush()
    return Entered(claimer(server, server.url))


async def test_a_job_wakes_it_and_comes_with_the_answer(it: Claimer) -> None:
    claim = await it.blocked()
    await it.other.enqueue([make_record("a")], now=NOW)
    (job,) = present(await finish(claim))
    assert (job.id, job.state) == ("a", JobState.INFLIGHT)
    reserved_at = present(job.reserved_at_us)
    assert NOW <= reserved_at < NOW + 3600 * SECOND, "the caller's clock, and not the server's"
    assert job.expires_at_us == reserved_at + LEASE
    await it.driver.ack("a", token(job), now=reserved_at)


async def test_room_wakes_it_and_limits_hold(it: Claimer) -> None:
    """Every change that notifies adds to the stream, in the same function; so one more cause stands for all of the kit's."""
    await it.other.configure("q", QueueSettings(max_inflight=1), now=NOW)
    await it.other.enqueue([make_record(name) for name in "abc"], now=NOW)
    (held,) = await it.other.reserve("q", limit=9, lease_for=LEASE, now=NOW, worker="x")
    claim = await it.blocked()
    await it.other.ack("a", token(held), now=NOW)
    assert [job.id for job in present(await finish(claim))] == ["b"]


async def test_time_alone_wakes_it(it: Claimer) -> None:
    due = NOW + SECOND // 10
    await it.other.enqueue([make_record("a", run_at_us=due)], now=NOW)
    assert await it.reserve() == []
    (job,) = present(await finish(it.block()))
    assert present(job.reserved_at_us) >= due
    assert await it.reserve() == []
    assert await it.block(timeout=0.01) == [], "time is up"


async def test_it_is_only_for_who_has_seen_that_nothing_is_left(it: Claimer) -> None:
    assert await it.block() is None
    await it.other.enqueue([make_record("a"), make_record("b")], now=NOW)
    assert await it.reserve(1) == ["a"]
    assert await it.block(1) is None


@pytest.mark.parametrize("option", ["notify=off", "wait_replicas=1&wait_timeout=0.01"])
async def test_it_is_not_offered_where_the_handle_cannot(server: RedisServer, option: str) -> None:
    async with claimer(server, f"{server.url}?{option}") as it:
        with contextlib.suppress(Exception):
            await it.reserve()
        assert await it.block() is None


async def test_one_job_goes_to_one_blocking_claim(it: Claimer) -> None:
    async with claimer(it.server, it.server.url) as another:
        claims = [await it.blocked(), await another.blocked(count=2)]
        await it.other.enqueue([make_record("a")], now=NOW)
        found = await finish(asyncio.gather(*claims))
    assert sorted(len(present(jobs)) for jobs in found) == [0, 1]


@pytest.mark.parametrize("has_leased", [True, False])
async def test_what_a_cancelled_one_leases_goes_back(it: Claimer, has_leased: bool) -> None:
    claim = await it.blocked()
    if has_leased:
        it.enqueue_behind_its_back()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await it.given_back()
    if not has_leased:
        await it.other.enqueue([make_record("a")], now=NOW)
    assert await it.reserve(worker="another") == ["a"]


@pytest.mark.parametrize("has_leased", [True, False])
async def test_a_connection_that_breaks_meanwhile_loses_nothing(it: Claimer, has_leased: bool) -> None:
    claim = await it.blocked()
    if has_leased:
        it.enqueue_behind_its_back()
        # The answer waits in the socket: it is lost with it.
        for line in present(it.driver._store._server)._connections:
            line.abort("cut")
    else:
        it.server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await finish(claim) is None
    if not has_leased:
        await it.other.enqueue([make_record("a")], now=NOW)
    assert await it.reserve() == ["a"]


async def test_a_server_that_forgot_the_functions_is_asked_by_other_means(it: Claimer) -> None:
    claim = await it.blocked()
    it.server.execute("FUNCTION", "FLUSH")
    it.server.execute("XADD", keys_of("taskharbor:", "q")["notify"], "99-0", "m", "")
    assert await finish(claim) is None
    await it.other.enqueue([make_record("a")], now=NOW)
    assert await it.reserve() == ["a"]


async def test_who_may_not_block_is_told_once(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """And works."""
    server.flush()
    server.execute("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-xread")
    async with claimer(server, server.url.replace("redis://", "redis://narrow:secret@")) as it:
        assert await it.reserve() == []
        with caplog.at_level(logging.WARNING, "taskharbor.redis"):
            await it.block()
        assert "may not use XREAD" in caplog.text
        assert await it.reserve() == []
        assert await it.block() is None, "it is not tried again and again"
        await it.other.enqueue([make_record("a")], now=NOW)
        assert await it.reserve() == ["a"]


async def test_a_counter_that_went_back_only_costs_a_time_out(it: Claimer) -> None:
    """Somebody took the counters away and left the stream: the entry is refused, and the jobs are there all the same."""
    await it.other.enqueue([make_record("a"), make_record("b")], now=NOW)
    await it.other.enqueue([make_record("c")], now=NOW)
    it.server.execute("HDEL", keys_of("taskharbor:", "q")["meta"], "moves")
    await it.other.enqueue([make_record("d")], now=NOW)
    assert await it.reserve() == ["a", "b", "c", "d"]


async def test_what_many_workers_saw_is_not_kept_long(it: Claimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.drivers.redis.leases._VIEWS", 3)
    for n in range(10):
        assert await it.reserve(worker=f"w{n}") == []
    assert len(it.driver._claims._views) <= 3


async def test_a_call_that_was_repeated_is_forgotten_in_time(it: Claimer) -> None:
    meta = keys_of("taskharbor:", "q")["meta"]
    await it.other.enqueue([make_record("a")], now=NOW)
    claim = asyncio.create_task(it.reserve())
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await it.given_back()
    assert it.server.execute("HGET", meta, "has_repeated") == b"1"
    await it.driver.prune(now=NOW + 3601 * SECOND)
    assert it.server.execute("HGET", meta, "has_repeated") is None


def test_an_idle_worker_makes_blocking_claims(server: RedisServer) -> None:
    server.flush()
    harbor = Harbor(server.url)
    ran = threading.Event()

    @harbor.job
    async def hello() -> None:
        ran.set()

    worker = harbor.worker()
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        for _ in range(3):
            asyncio.run(eventually(lambda: blocked_clients(server) > 0))
            ran.clear()
            hello.enqueue()
            assert ran.wait(PATIENCE)
    finally:
        worker.stop()
        running.join()
        harbor.close()
    assert "cmdstat_xread" in server.info("commandstats")
