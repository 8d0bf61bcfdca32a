"""Waking those who wait: told by a channel, by a look where nobody can be told, and never missed.

The kit shows which calls wake whom. Here somebody stirs queues behind the back of a handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from drivers.redis.redis_stage import Waits, connected
from needing import Entered
from records import NOW
from taskharbor.drivers.redis import driver as listening
from taskharbor.drivers.redis.store import RedisStore, keys_of
from taskharbor.errors import BackendUnavailable
from taskharbor_testkit.servers import FaultProxy, RedisServer
from worker.stage import PATIENCE, eventually, finish

STIR = "return redis.call('PUBLISH', ARGV[1], redis.call('HINCRBY', KEYS[1], 'moves', 1))"
"""What every function of the driver does that may have made something runnable."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(appendonly=True) as started:
        yield started


class Bench:
    def __init__(self, connections: RedisStore, server: RedisServer) -> None:
        self.server = server
        self.waits = Waits(connections)
        self.listener = self.waits.listener

    def stir(self, queue: str = "q") -> int:
        """How many heard it."""
        keys = keys_of("taskharbor:", queue)
        return int(self.server.execute("EVAL", STIR, 1, keys["meta"], keys.channel))

    def wait(self, queue: str = "q", now: int = NOW, timeout: float = PATIENCE) -> asyncio.Task[bool]:
        return asyncio.ensure_future(self.waits(queue, now=now, timeout=timeout))

    async def is_woken_by_a_stir(self, queue: str = "q", heard_by: int = 1) -> None:
        waiting = await self.waits.asleep(queue)
        assert self.stir(queue) == heard_by
        assert await finish(waiting)


@contextlib.asynccontextmanager
async def bench(server: RedisServer, url: str, options: str = "") -> AsyncIterator[Bench]:
    server.flush()
    async with connected(url, options) as connections:
        it = Bench(connections, server)
        try:
            yield it
        finally:
            await it.listener.close()


@pytest.fixture
def it(server: RedisServer) -> Entered:
    return Entered(bench(server, server.url))


@pytest.mark.parametrize("queue", ["q", "zwei ü", "{a}b", "}", "a%7D", " ", "x" * 200])
async def test_a_stir_wakes_and_one_from_before_the_wait_is_not_missed(it: Bench, queue: str) -> None:
    await it.is_woken_by_a_stir(queue)
    await it.waits.quiet(queue)
    it.stir(queue)
    assert await finish(it.wait(queue))
    await it.waits.quiet(queue)
    assert not await it.wait(queue, timeout=0)


async def test_other_queues_wake_nobody(it: Bench) -> None:
    await it.waits.quiet("other")
    waiting = await it.waits.asleep("q")
    it.stir("other")
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    it.stir()
    assert await finish(waiting)


async def test_a_server_that_lost_its_memory_neither_silences_nor_spins(it: Bench) -> None:
    for _ in range(5):
        it.stir()
    await it.waits.quiet("q")
    it.server.execute("FLUSHALL")
    await it.is_woken_by_a_stir()


async def test_what_a_claim_has_seen_wakes_nobody_and_what_came_after_it_does(it: Bench) -> None:
    await it.waits.quiet("q")
    it.stir()
    it.listener.emptied["q"] = "1"
    assert not await it.wait(timeout=0)
    it.stir()
    it.stir()
    it.listener.emptied["q"] = "2"
    assert await finish(it.wait())


# -- not told -----------------------------------------------------------------------------------------------


async def test_without_notifications_a_look_now_and_then_finds_what_moved(server: RedisServer) -> None:
    async with bench(server, server.url, "?notify=off&poll=0.01") as it:
        await it.is_woken_by_a_stir(heard_by=0)


async def test_a_user_who_may_not_subscribe_looks_instead_and_is_told_why(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "taskharbor.redis")
    server.execute("ACL", "SETUSER", "deaf", "on", ">word", "~*", "+@all", "resetchannels")
    async with bench(server, server.url.replace("redis://", "redis://deaf:word@"), "?poll=0.01") as it:
        for _ in range(100):
            if not await it.wait(timeout=0.02) and caplog.text:
                break
        waiting = it.wait()
        await eventually(lambda: it.listener.notifications.is_awaited("q"))
        assert it.stir() == 0
        assert await finish(waiting)
    assert "may not subscribe" in caplog.text


# -- lines that do not hold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("outage", ["a lost line", "a restart"])
async def test_an_outage_wakes_and_the_next_stir_is_heard_again(it: Bench, outage: str) -> None:
    it.stir()
    waiting = await it.waits.asleep("q")
    if outage == "a restart":
        await asyncio.to_thread(it.server.restart)
    else:
        assert it.server.execute("CLIENT", "KILL", "TYPE", "pubsub") == 1
    assert await finish(waiting)
    await it.is_woken_by_a_stir()


async def test_a_line_that_went_dead_is_noticed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PROBE", 0.05)
    monkeypatch.setattr(listening, "_PATIENCE", 0.05)
    with FaultProxy.to(server.url) as proxy:
        async with bench(server, proxy.url_for(server.url)) as it:
            waiting = await it.waits.asleep("q")
            before = it.listener._connection
            proxy.stall()
            assert await finish(waiting)
            proxy.flow()
            await it.waits.quiet("q")
            assert it.listener._connection is not before


async def test_a_line_that_is_alive_is_left_alone(it: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PROBE", 0.01)
    monkeypatch.setattr(listening, "_PATIENCE", 0.3)

    def pings() -> int:
        said = it.server.info("commandstats").get("cmdstat_ping", "calls=0,")
        return int(said.removeprefix("calls=").partition(",")[0])

    await it.waits.quiet("q")
    connection, before = it.listener._connection, pings()
    await eventually(lambda: pings() >= before + 2)
    assert it.listener._connection is connection


async def test_a_wait_on_a_server_that_is_gone_says_so(server: RedisServer) -> None:
    with FaultProxy.to(server.url) as proxy:
        async with bench(server, proxy.url_for(server.url)) as it:
            await it.waits.quiet("q")
            proxy.refuse()
            proxy.cut()

            async def go_on_waiting() -> None:
                """As a worker does. The first may still be woken by the loss of the line."""
                while True:
                    await it.wait(timeout=1)

            with pytest.raises(BackendUnavailable, match="refused"):
                await finish(go_on_waiting())
            proxy.accept()
            await it.waits.quiet("q")


async def test_closing_ends_the_line(it: Bench) -> None:
    await it.waits.quiet("q")
    await it.listener.close()
    await eventually(lambda: it.stir() == 0)
