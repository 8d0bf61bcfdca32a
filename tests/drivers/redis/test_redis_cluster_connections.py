"""In a cluster: every call finds the node that holds its queue, also after the queue has moved or the node is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from drivers.redis.redis_stage import Waits, call, connected, insist, refused
from needing import REDIS_VERSIONS, Entered
from taskharbor.drivers.redis.library import RedisCall
from taskharbor.drivers.redis.store import RedisStore, keys_of
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor_testkit.servers import RedisCluster, RedisServer, shared_redis
from worker.stage import finish

pytestmark = pytest.mark.xdist_group("redis cluster")  # It is started once.

Pair = tuple[RedisServer, RedisServer]
FAR_APART = ["{a}:n", "{b}:n", "{c}:n"]
"""Keys on three nodes."""


@pytest.fixture(scope="module", params=REDIS_VERSIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    with RedisCluster.start(version=request.param) as started:
        yield started


@pytest.fixture
def connections(cluster: RedisCluster) -> Entered:
    cluster.flush()
    return Entered(connected(cluster.url))


@pytest.fixture
def route(cluster: RedisCluster) -> Iterator[Pair]:
    """The node that holds queue `a`, and another one. In the end the queue is where it was."""
    source = cluster.node_of("{a}:n")
    yield source, next(node for node in cluster.nodes if node is not source)
    if cluster.node_of("{a}:n") is not source:
        cluster.move("{a}:n", source)


def test_slots_are_reckoned_as_the_server_does(cluster: RedisCluster) -> None:
    for key in ("a", "{a}b", "x{a}b", "{}a", "{a", "a}b{", "{{a}}b", "ü{zwei ü}", "{a%7D}:n", ""):
        assert key_slot(key.encode()) == cluster.slot_of(key), key


async def test_calls_for_several_nodes_are_answered_in_order(connections: RedisStore) -> None:
    assert len({connections.server_for(key) for key in FAR_APART}) == 3
    answers = await connections.run([RedisCall("count", [key], (1,)) for key in FAR_APART * 2])
    assert answers == [1, 1, 1, 2, 2, 2]
    assert await connections.commands([("GET", key) for key in FAR_APART]) == [b"2"] * 3
    assert len(await connections.command("TIME")) == 2


async def test_a_plain_url_to_one_node_is_recognised_as_a_cluster(cluster: RedisCluster) -> None:
    async with connected(cluster.nodes[1].url) as connections:
        assert connections.cluster is not None
        assert await connections.commands([("GET", key) for key in FAR_APART])


async def test_a_cluster_url_to_a_plain_server_is_refused() -> None:
    assert "cluster" in await refused(shared_redis().url.replace("redis://", "redis+cluster://"))


async def test_nodes_that_do_not_answer_are_passed_over(cluster: RedisCluster) -> None:
    """When the store is opened."""
    async with connected(cluster.url.replace("://", "://127.0.0.1:1,", 1)) as connections:
        assert await connections.run(call("read", "{a}:nothing")) == [None]


async def test_functions_that_nodes_forgot_come_again(cluster: RedisCluster, connections: RedisStore) -> None:
    for expected in (1, 2):
        for node in cluster.nodes:
            node.execute("FUNCTION", "FLUSH")
        answers = await connections.run([RedisCall("count", [key], (1,)) for key in FAR_APART])
        assert answers == [expected] * 3


async def test_a_moved_queue_is_followed(cluster: RedisCluster, connections: RedisStore, route: Pair) -> None:
    """And found at once from then on."""
    source, target = route
    await connections.run(call("count", "{a}:n", 1))
    cluster.move("{a}:n", target)
    assert await connections.run(call("count", "{a}:n", 1)) == [2]
    assert str(connections.server_for("{a}:n").address) == f"127.0.0.1:{target.port}"
    cluster.move("{a}:n", source)
    assert await connections.command("GET", "{a}:n") == b"2"


async def test_a_moving_queue_is_found(cluster: RedisCluster, connections: RedisStore, route: Pair) -> None:
    """Where it goes."""
    cluster.begin_move("{a}:n", route[1])
    # Nothing of it is left at the source: the server there says ASK.
    assert await connections.run(call("count", "{a}:n", 1)) == [1]
    assert await connections.command("GET", "{a}:n") == b"1"
    # Some of its keys are there and some are not: the server says TRYAGAIN.
    with pytest.raises(BackendUnavailable, match="being moved"):
        await connections.run([RedisCall("read_two", ["{a}:n", "{a}:other"], ())])
    cluster.move("{a}:n", route[1])
    assert await connections.run(call("count", "{a}:n", 1)) == [2]


async def test_a_lost_answer_of_one_node_repeats_only_its_calls(
    cluster: RedisCluster, connections: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = await connections.server_for("{a}:n").connect()
    ask = shared.ask

    async def ask_and_break(packed: bytes, count: int) -> list[Any]:
        answer = asyncio.ensure_future(ask(packed, count))
        await asyncio.sleep(0)
        shared.abort("the test's hand")
        return await answer

    # The request is on its way to this node, and its answer never comes.
    monkeypatch.setattr(shared, "ask", ask_and_break)
    answers = await finish(connections.run([RedisCall("once", [key], ()) for key in FAR_APART]))
    assert answers[1:] == [b"done", b"done"]
    assert answers[0] in (b"done", b"recognised")
    assert [int(cluster.node_of(key).execute("GET", key)) for key in FAR_APART] == [1, 1, 1]


async def test_a_failing_call_does_not_keep_the_others_from_being_done(connections: RedisStore) -> None:
    with pytest.raises(TaskHarborError, match="no"):
        await connections.run([*call("fail", FAR_APART[0], "ERR no"), *call("count", FAR_APART[1], 1)])
    assert await connections.run(call("read", FAR_APART[1])) == [b"1"]


# -- waking -------------------------------------------------------------------------------------------------


async def test_a_wait_is_for_all_nodes(cluster: RedisCluster, connections: RedisStore, route: Pair) -> None:
    """Also of a queue that has moved."""

    async def stir(queue: str) -> None:
        keys = keys_of("taskharbor:", queue)
        await connections.run(call("stir", keys["meta"], keys.channel))

    waits = Waits(connections)
    try:
        for queue in ("a", "b", "c"):
            waiting = await waits.asleep("a", "b", "c")
            await stir(queue)
            assert await finish(waiting)
        await waits.quiet("a", "b", "c")
        cluster.move("{a}:n", route[1])
        await stir("a")
        assert await finish(waits("a", "b", "c"))
        waiting = await waits.asleep("a", "b", "c")
        await stir("a")
        assert await finish(waiting)
    finally:
        await waits.listener.close()


# -- nodes that go ------------------------------------------------------------------------------------------


async def test_a_failover_in_order_and_a_killed_master_are_followed_and_lose_nothing() -> None:
    with RedisCluster.start(replicas=True) as pairs:
        async with connected(pairs.url, "?wait_replicas=1&wait_timeout=5") as careful:
            (before,) = await careful.run(call("count", "{b}:n", 1))
        async with connected(pairs.url, "?timeout=2&connect_timeout=2") as connections:
            (first,) = await connections.run(call("count", "{a}:n", 1))
            await asyncio.to_thread(pairs.fail_over, "{a}:n")
            assert await insist(connections, "{a}:n") == first + 1
            await asyncio.to_thread(pairs.kill_master, "{b}:n")
            assert await insist(connections, "{b}:n") == before + 1
            # The others were never away.
            assert await connections.run(call("read", "{c}:nothing")) == [None]
