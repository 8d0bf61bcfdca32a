"""Behind Sentinel: the master is found, a failover is followed, and what may be lost in one is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from drivers.redis.redis_stage import COUNT, READ, Waits, call, connected, nothing_unhandled, soon, until
from taskharbor.drivers.redis.connection import connect
from taskharbor.drivers.redis.options import Address, parse_url
from taskharbor.drivers.redis.store import Store, keys_of
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor_testkit.servers import RedisSentinels, RedisServer


@pytest.fixture(scope="module")
def group() -> Iterator[RedisSentinels]:
    with RedisSentinels.start() as started:
        yield started


async def test_the_master_is_found_whichever_sentinel_is_asked(group: RedisSentinels) -> None:
    for sentinel in group.sentinels:
        async with connected(f"redis+sentinel://127.0.0.1:{sentinel.port}/harbor/0") as connections:
            await connections.run(call(COUNT, "found", 1))
    assert int(group.master.execute("GET", "found")) == len(group.sentinels)


async def test_sentinels_that_do_not_answer_are_passed_over(group: RedisSentinels) -> None:
    async with connected(group.url.replace("://", "://127.0.0.1:1,", 1)) as connections:
        assert await connections.run(call(READ, "nothing")) == [None]


async def test_a_service_that_nobody_watches_is_said(group: RedisSentinels) -> None:
    with pytest.raises(BackendUnavailable, match="no service 'unknown'"):
        await Store(parse_url(group.url.replace("/harbor", "/unknown"))).open()


async def test_a_plain_server_is_no_sentinel(group: RedisSentinels) -> None:
    with pytest.raises((BackendUnavailable, InvalidRequest), match=r"SENTINEL|forbidden"):
        await Store(parse_url(f"redis+sentinel://127.0.0.1:{group.master.port}/harbor")).open()


async def test_a_failover_in_order_is_followed_by_calls_and_by_those_who_wait(group: RedisSentinels) -> None:
    channel = keys_of("", "q").channel

    with nothing_unhandled():
        async with connected(group.url) as connections:
            waits = Waits(connections)
            try:
                await until(lambda: waits.listener.listen(["q"]) is None, "it listens")
                while await waits("q", timeout=0.02):
                    pass
                waiting = asyncio.create_task(waits("q"))
                (before,) = await connections.run(call(COUNT, "n", 1))
                old = group.master
                new = await asyncio.to_thread(group.fail_over)
                assert await soon(insist(connections, "n")) == before + 1
                assert int(new.execute("GET", "n")) == before + 1
                assert await soon(waiting)
                await until(lambda: _listeners(new, channel) == 1, "it listens there")
                await until(lambda: _listeners(old, channel) == 0, "and no longer here")
            finally:
                await waits.listener.close()


def _is_replica(server: RedisServer) -> bool:
    try:
        return server.info("replication")["role"] == "slave"
    except redis.ConnectionError:
        return False  # Whoever demotes a server drops its clients, and this may have been one.


def _listeners(server: RedisServer, channel: str) -> int:
    try:
        return int(server.execute("PUBSUB", "NUMSUB", channel)[1])
    except redis.ConnectionError:
        return -1


async def test_a_master_that_is_killed_is_replaced() -> None:
    with RedisSentinels.start() as own:
        async with connected(own.url + "?timeout=2&connect_timeout=2") as connections:
            (first,) = await connections.run(call(COUNT, "n", 1))
            own.replica.catch_up(own.master)
            new = await asyncio.to_thread(own.kill_master)
            assert await soon(insist(connections, "n")) == first + 1
            assert int(new.execute("GET", "n")) == first + 1


async def insist(connections: Store, key: str) -> int:
    """As a worker does: until somebody answers. Right after a failover the sentinels may not agree yet."""
    while True:
        try:
            (answer,) = await connections.run(call(COUNT, key, 1))
        except BackendUnavailable:
            await asyncio.sleep(0.01)
            continue
        return int(answer)


async def test_a_replica_says_that_it_is_one_and_how_to_find_the_master() -> None:
    with RedisServer.start() as master, master.replica() as replica:
        async with connected(replica.url) as connections:
            for _ in range(2):
                with pytest.raises(BackendUnavailable, match=r"replica.*redis\+sentinel"):
                    await connections.run(call(COUNT, "n", 1))
            with pytest.raises(BackendUnavailable, match="replica"):
                await connections.run(lambda _: [*call(READ, "n")(0), *call(COUNT, "n", 1)(0)])
            replica.promote()
            assert await connections.run(call(COUNT, "n", 1)) == [1]


async def test_a_refusal_by_a_former_master_leads_to_the_new_one_within_the_call(
    group: RedisSentinels,
) -> None:
    """A server whose connections outlived its demotion only says READONLY."""

    async with connected(group.url) as connections:
        node = connections.server_for("n")
        await node.connect()
        replica = group.replica
        await until(lambda: _is_replica(replica), "it is told")
        node.drop("the test has another one")
        node._shared = await connect(Address("127.0.0.1", replica.port), connections.options)
        (count,) = await connections.run(call(COUNT, "led", 1))
        assert int(group.master.execute("GET", "led")) == count


# -- waiting for replicas -----------------------------------------------------------------------------------


async def test_a_change_is_answered_once_a_replica_has_it() -> None:
    with RedisServer.start() as master, master.replica() as replica:
        async with connected(master.url + "?wait_replicas=1&wait_timeout=5") as connections:
            assert await connections.run(call(COUNT, "n", 1)) == [1]
            assert int(replica.execute("GET", "n")) == 1
            answers = await connections.run(lambda _: [call(COUNT, "n", 1)(0)[0], call(COUNT, "n", 1)(0)[0]])
            assert answers == [2, 3]
            assert int(replica.execute("GET", "n")) == 3


async def test_without_replicas_a_change_fails_loudly_and_reading_does_not() -> None:
    with RedisServer.start() as alone:
        async with connected(alone.url + "?wait_replicas=1&wait_timeout=0.05") as connections:
            with pytest.raises(BackendUnavailable, match="failover now could lose it"):
                await connections.run(call(COUNT, "n", 1))
            assert await connections.run(call(READ, "n")) == [b"1"]


async def test_a_repeated_call_waits_for_what_the_first_one_changed() -> None:
    """Even where it changes nothing itself and comes on another connection: else its success would promise too much."""

    with RedisServer.start() as master, master.replica() as replica:
        async with connected(master.url) as plain:
            replica.pause()
            try:
                await plain.run(call(COUNT, "n", 1))
                async with connected(master.url + "?wait_replicas=1&wait_timeout=0.1") as careful:
                    with pytest.raises(BackendUnavailable, match="could lose it"):
                        await careful.run(call("nothing", "n"))
                    replica.resume()
                    await until(
                        lambda: int(master.info("replication")["connected_slaves"]) == 1, "it is back"
                    )
            finally:
                replica.resume()


async def test_a_change_is_answered_once_it_is_in_the_files() -> None:
    """WAITAOF: what a power cut cannot take any more. Without an append-only file nobody can promise that."""

    with RedisServer.start(version="7.2+", appendonly=True) as master, master.replica() as replica:
        async with connected(master.url + "?wait_aof=1&wait_timeout=5") as connections:
            assert await connections.run(call(COUNT, "n", 1)) == [1]
            assert int(replica.execute("GET", "n")) == 1
        replica.pause()
        async with connected(master.url + "?wait_aof=1&wait_timeout=0.05") as connections:
            with pytest.raises(BackendUnavailable, match="append-only files"):
                await connections.run(call(COUNT, "n", 1))
        replica.resume()
    with RedisServer.start(version="7.2+") as forgetful:
        async with connected(forgetful.url + "?wait_aof=0") as connections:
            with pytest.raises(BackendUnavailable, match="append-only"):
                await connections.run(call(COUNT, "n", 1))
