"""Behind Sentinel: the master is found, a failover is followed, and what may be lost in one is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from drivers.redis.redis_stage import Waits, call, connected, insist, refused
from taskharbor.drivers.redis.connection import connect
from taskharbor.drivers.redis.options import Address
from taskharbor.drivers.redis.store import keys_of
from taskharbor.errors import BackendUnavailable
from taskharbor_testkit.servers import RedisSentinels, RedisServer
from worker.stage import eventually, finish

pytestmark = pytest.mark.xdist_group("redis sentinels")  # They are started once.
Pair = tuple[RedisServer, RedisServer]


@pytest.fixture(scope="module")
def group() -> Iterator[RedisSentinels]:
    with RedisSentinels.start() as started:
        yield started


async def test_the_master_is_found_whichever_sentinel_is_asked(group: RedisSentinels) -> None:
    urls = [f"redis+sentinel://127.0.0.1:{sentinel.port}/harbor/0" for sentinel in group.sentinels]
    # One that does not answer is passed over.
    for url in (*urls, group.url.replace("://", "://127.0.0.1:1,", 1)):
        async with connected(url) as connections:
            await connections.run(call("count", "found", 1))
    assert int(group.master.execute("GET", "found")) == len(group.sentinels) + 1


async def test_what_is_no_sentinel_of_the_service_is_said(group: RedisSentinels) -> None:
    assert "no service 'unknown'" in await refused(group.url.replace("/harbor", "/unknown"))
    assert "forbidden" in await refused(f"redis+sentinel://127.0.0.1:{group.master.port}/harbor")


async def test_a_refusal_by_a_former_master_leads_to_the_new_one_in_the_call(group: RedisSentinels) -> None:
    """A server whose connections outlived its demotion only says READONLY."""

    def is_replica() -> bool:
        try:
            return replica.info("replication")["role"] == "slave"
        except redis.ConnectionError:
            return False  # Whoever demotes a server drops its clients, and this may have been one.

    async with connected(group.url) as connections:
        node = connections.server_for("n")
        await node.connect()
        replica = group.replica
        await eventually(is_replica)
        node.drop("the test has another one")
        node._shared = await connect(Address("127.0.0.1", replica.port), connections.options)
        (count,) = await connections.run(call("count", "led", 1))
        assert int(group.master.execute("GET", "led")) == count


async def test_a_failover_in_order_is_followed_by_calls_and_by_those_who_wait(group: RedisSentinels) -> None:
    def listeners(server: RedisServer) -> int:
        try:
            return int(server.execute("PUBSUB", "NUMSUB", keys_of("taskharbor:", "q").channel)[1])
        except redis.ConnectionError:
            return -1

    async with connected(group.url) as connections:
        waits = Waits(connections)
        try:
            await waits.quiet("q")
            waiting = asyncio.create_task(waits("q"))
            (before,) = await connections.run(call("count", "n", 1))
            old = group.master
            new = await asyncio.to_thread(group.fail_over)
            assert await insist(connections, "n") == before + 1
            assert int(new.execute("GET", "n")) == before + 1
            assert await finish(waiting)
            await eventually(lambda: listeners(new) == 1)
            await eventually(lambda: listeners(old) == 0)
        finally:
            await waits.listener.close()


async def test_a_master_that_is_killed_is_replaced() -> None:
    with RedisSentinels.start() as own:
        async with connected(own.url, "?timeout=2&connect_timeout=2") as connections:
            (first,) = await connections.run(call("count", "n", 1))
            own.replica.catch_up(own.master)
            new = await asyncio.to_thread(own.kill_master)
            assert await insist(connections, "n") == first + 1
            assert int(new.execute("GET", "n")) == first + 1


# -- a master and its replica -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with RedisServer.start(version="7.2+", appendonly=True) as master, master.replica() as replica:
        yield master, replica


async def test_a_change_is_answered_once_a_replica_has_it(pair: Pair) -> None:
    master, replica = pair
    async with connected(master.url, "?wait_replicas=1&wait_timeout=5") as connections:
        assert await connections.run(call("count", "n", 1)) == [1]
        assert int(replica.execute("GET", "n")) == 1
        assert await connections.run(call("count", "n", 1) * 2) == [2, 3]
        assert int(replica.execute("GET", "n")) == 3
    # WAITAOF: what a power cut cannot take any more.
    async with connected(master.url, "?wait_aof=1&wait_timeout=5") as connections:
        assert await connections.run(call("count", "n", 1)) == [4]
        assert int(replica.execute("GET", "n")) == 4


async def test_a_change_that_no_replica_has_fails_loudly_and_reading_does_not(pair: Pair) -> None:
    """Even where a repeated call changes nothing itself and comes on another connection: else it would promise too much."""
    master, replica = pair
    async with connected(master.url) as plain:
        replica.pause()
        try:
            await plain.run(call("count", "lost", 1))
            for option, where in (("wait_replicas", "in memory"), ("wait_aof", "in their append-only files")):
                async with connected(master.url, f"?{option}=1&wait_timeout=0.05") as careful:
                    assert await careful.run(call("read", "lost")) == [b"1"]
                    for function in ("nothing", "count"):
                        with pytest.raises(BackendUnavailable, match=rf"{where}.*could lose it"):
                            await careful.run(call(function, "other", 1))
        finally:
            replica.resume()


async def test_a_server_without_an_append_only_file_cannot_promise_one() -> None:
    with RedisServer.start(version="7.2+") as forgetful:
        async with connected(forgetful.url, "?wait_aof=0") as connections:
            with pytest.raises(BackendUnavailable, match="append-only"):
                await connections.run(call("count", "n", 1))


async def test_a_replica_says_that_it_is_one_and_how_to_find_the_master() -> None:
    with RedisServer.start() as master, master.replica() as replica:
        async with connected(replica.url) as connections:
            for calls in (call("count", "n", 1), [*call("read", "n"), *call("count", "n", 1)]):
                for _ in range(2):
                    with pytest.raises(BackendUnavailable, match=r"replica.*redis\+sentinel"):
                        await connections.run(calls)
            replica.promote()
            assert await connections.run(call("count", "n", 1)) == [1]
