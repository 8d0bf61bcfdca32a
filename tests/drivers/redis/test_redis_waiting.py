"""Waking those who wait: told by a channel, by a look where nobody can be told, and never missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from drivers.redis.redis_stage import PATIENCE, Waits, nothing_unhandled, soon, until
from taskharbor.drivers.redis import listener as listening
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Keys, Store, keys_of
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND
from taskharbor_testkit.servers import FaultProxy, RedisAt, RedisServer

NOW = 1_700_000_000 * SECOND

STIR = "return redis.call('PUBLISH', ARGV[1], redis.call('HINCRBY', KEYS[1], 'moves', 1))"
"""What every script of the driver does that may have made something runnable."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(appendonly=True) as started:
        yield started


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.flush()


class Bench:
    """A handle that waits, and somebody who stirs queues behind its back."""

    def __init__(self, connections: Store, server: RedisAt) -> None:
        self.connections = connections
        self.server = server
        self.waits = Waits(connections)
        self.listener = self.waits.listener

    def stir(self, queue: str = "q") -> int:
        """How many heard it."""
        keys = self.keys(queue)
        return int(self.server.execute("EVAL", STIR, 1, keys["meta"], keys.channel))

    def keys(self, queue: str) -> Keys:
        return keys_of("", queue)

    def wait(self, *queues: str, now: int = NOW, timeout: float = PATIENCE) -> asyncio.Task[bool]:
        return asyncio.ensure_future(self.waits(*queues or ("q",), now=now, timeout=timeout))

    async def quiet(self, *queues: str) -> None:
        """Until the handle is subscribed and has nothing more to say."""
        for _ in range(500):
            if not await self.wait(*queues, timeout=0.02) and (
                not self.connections.options.notify or self.listener.listen(queues or ("q",)) is None
            ):
                return
        raise AssertionError("it does not fall silent")

    async def asleep(self, queue: str = "q", count: int = 1) -> None:
        """Until so many wait for the queue, and have looked at it."""

        def wait() -> bool:
            shared = self.connections.server_for(queue)._shared
            waiters = self.listener.notifications.waiters.get(queue, ())
            return len(waiters) == count and (shared is None or not shared._pending)

        await until(wait, "all wait")

    def subscriptions(self) -> set[object]:
        """The connections that are subscribed now."""
        return {self.listener._connection} if self.listener.confirmed else set()


@contextlib.asynccontextmanager
async def bench(url: str, server: RedisAt) -> AsyncIterator[Bench]:
    with nothing_unhandled():
        options = parse_url(url)
        connections = Store(options)
        await connections.open()
        it = Bench(connections, server)
        try:
            yield it
        finally:
            await it.listener.close()
            await connections.close()


# -- told ---------------------------------------------------------------------------------------------------


async def test_a_stir_wakes_and_one_from_before_the_wait_is_not_missed(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        assert it.stir() == 1
        assert await soon(waiting)
        await it.quiet()
        it.stir()
        assert await soon(it.wait())
        await it.quiet()
        assert not await it.wait(timeout=0)


async def test_other_queues_wake_nobody(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet("other")
        await it.quiet("q")
        waiting = it.wait("q")
        await it.asleep()
        it.stir("other")
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        it.stir("q")
        assert await soon(waiting)


async def test_a_queue_of_any_name_wakes(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        for queue in ("zwei ü", "{a}b", "}", "a%7D", " ", "x" * 200):
            await it.quiet(queue)
            waiting = it.wait(queue)
            await it.asleep(queue)
            it.stir(queue)
            assert await soon(waiting), queue


async def test_all_who_wait_on_one_handle_are_woken_by_one_message(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        waiting = [it.wait() for _ in range(5)]
        await it.asleep(count=5)
        assert it.stir() == 1
        assert await soon(asyncio.gather(*waiting)) == [True] * 5


async def test_a_server_that_lost_its_memory_neither_silences_nor_spins(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        for _ in range(5):
            it.stir()
        await it.quiet()
        server.execute("FLUSHALL")
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        it.stir()
        assert await soon(waiting)


# -- by what a claim saw ------------------------------------------------------------------------------------


async def test_what_a_claim_has_seen_wakes_nobody(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        it.stir()
        it.listener.emptied["q"] = "1"
        assert not await it.wait(timeout=0)
        it.stir()
        assert await soon(it.wait())


async def test_what_came_after_the_claim_wakes(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        it.stir()
        it.stir()
        it.listener.emptied["q"] = "1"
        assert await soon(it.wait())


# -- by time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["waiting", "active"])
async def test_what_comes_due_ends_the_wait_once(server: RedisServer, family: str) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        server.execute("ZADD", it.keys("q")[family], NOW + SECOND // 50, "one", NOW + 900 * SECOND, "two")
        assert await soon(it.wait())
        # It could not be claimed: that must not make a busy loop.
        later = NOW + SECOND // 50
        await it.wait(now=later, timeout=0)
        assert not await it.wait(now=later, timeout=0.02)


async def test_a_blocked_job_does_not_come_due(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        server.execute("ZADD", it.keys("q")["waiting"], -(NOW + SECOND // 50), "blocked")
        assert not await it.wait(timeout=0.1)


# -- not told -----------------------------------------------------------------------------------------------


async def test_without_notifications_a_look_now_and_then_finds_what_moved(server: RedisServer) -> None:
    async with bench(server.url + "?notify=off&poll=0.01", server) as it:
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        assert it.stir() == 0
        assert await soon(waiting)


async def test_a_user_who_may_not_subscribe_looks_instead_and_is_told_why(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "taskharbor.redis")
    server.execute("ACL", "SETUSER", "deaf", "on", ">word", "~*", "+@all", "resetchannels")

    url = server.url.replace("redis://", "redis://deaf:word@") + "?poll=0.01"
    async with bench(url, server) as it:
        for _ in range(100):
            if not await it.wait(timeout=0.02) and caplog.text:
                break
        waiting = it.wait()
        await it.asleep()
        assert it.stir() == 0
        assert await soon(waiting)
    assert "may not subscribe" in caplog.text


# -- lines that do not hold ---------------------------------------------------------------------------------


async def test_a_lost_line_wakes_comes_back_and_is_heard_again(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        assert server.execute("CLIENT", "KILL", "TYPE", "pubsub") == 1
        assert await soon(waiting)
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        assert it.stir() == 1
        assert await soon(waiting)


async def test_a_line_that_went_dead_without_a_word_is_noticed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_PROBE", 0.05)
    monkeypatch.setattr(listening, "_PATIENCE", 0.05)

    with FaultProxy.to(server.url) as proxy:
        async with bench(proxy.url_for(server.url), server) as it:
            await it.quiet()
            before = it.subscriptions()
            waiting = it.wait()
            await it.asleep()
            proxy.stall()
            assert await soon(waiting)
            proxy.flow()
            await until(lambda: bool(it.subscriptions() - before), "it listens again")
            await it.quiet()


async def test_a_line_that_is_alive_is_left_alone(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_PROBE", 0.01)
    monkeypatch.setattr(listening, "_PATIENCE", 0.1)

    def pings() -> int:
        said = server.info("commandstats").get("cmdstat_ping", "calls=0,")
        return int(said.removeprefix("calls=").partition(",")[0])

    async with bench(server.url, server) as it:
        await it.quiet()
        subscriptions, before = it.subscriptions(), pings()
        await until(lambda: pings() >= before + 3, "it is asked for signs of life")
        assert it.subscriptions() == subscriptions


async def test_a_restart_of_the_server_wakes_and_the_next_stir_is_heard(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        it.stir()
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        await asyncio.to_thread(server.restart)
        assert await soon(waiting)
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        it.stir()
        assert await soon(waiting)


async def go_on_waiting(it: Bench) -> None:
    """As a worker does. The first may still be woken by the loss of the line."""
    while True:
        await it.wait(timeout=1)


async def test_a_wait_on_a_server_that_is_gone_says_so(server: RedisServer) -> None:
    with FaultProxy.to(server.url) as proxy:
        async with bench(proxy.url_for(server.url), server) as it:
            await it.quiet()
            proxy.refuse()
            proxy.cut()
            with pytest.raises(BackendUnavailable, match="refused"):
                await soon(go_on_waiting(it))
            proxy.accept()
            await it.quiet()


async def test_a_cancelled_wait_keeps_the_wake_up_for_the_next(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        waiting = it.wait()
        await it.asleep()
        it.stir()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await soon(it.wait())
        assert not it.listener.notifications.is_awaited("q")


async def test_closing_ends_the_line(server: RedisServer) -> None:
    async with bench(server.url, server) as it:
        await it.quiet()
        await it.listener.close()
        await until(lambda: it.stir() == 0, "nobody listens any more")
