"""Scripts and commands on one server: answers, transactions, errors, and what happens when a connection does not hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis
from redis.asyncio import Connection

from drivers.redis.redis_stage import (
    COUNT,
    ONCE,
    READ,
    call,
    connected,
    load_stage,
    nothing_unhandled,
    soon,
    until,
)
from needing import REDIS_VERSIONS
from taskharbor.drivers.redis.connection import SharedConnection
from taskharbor.drivers.redis.library import Call
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Store, check, read_info
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor_testkit.servers import FaultProxy, RedisServer, shared_redis

_PASSWORD = "s3cr3t-p4ss"


@pytest.fixture(scope="module", params=REDIS_VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One that these tests may stop and spoil as they like, of each version that is tested."""
    with RedisServer.start(version=request.param, appendonly=True) as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.flush()


def with_no_trouble(use: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with nothing_unhandled():
            await use()

    asyncio.run(main())


# -- scripts ------------------------------------------------------------------------------------------------


async def test_answers_come_as_bytes_numbers_and_lists(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        assert await connections.run(call("echo", "{q}:a", b"\xff\x00")) == [
            [b"\xff\x00", 1, None, [b"{q}:a"]]
        ]


async def test_several_calls_are_answered_in_order_and_no_call_by_nothing(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        answers = await connections.run(lambda _: [Call(COUNT, ["n"], (n,)) for n in (1, 10, 100)])
        assert answers == [1, 11, 111]
        assert await connections.run(lambda _: []) == []


async def test_calls_of_concurrent_tasks_share_one_connection(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        before = int(server.info("clients")["connected_clients"])
        answers = await asyncio.gather(*(connections.run(call(COUNT, "n", 1)) for _ in range(100)))
        assert sorted(answers) == [[n] for n in range(1, 101)]
        assert int(server.info("clients")["connected_clients"]) == before


def test_a_caller_who_gives_up_takes_nobody_elses_answer(server: RedisServer) -> None:
    async def use() -> None:
        async with connected(server.url) as connections:
            await connections.run(call(COUNT, "n", 1))
            given_up = asyncio.create_task(connections.run(call(COUNT, "n", 10)))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await connections.run(call(COUNT, "n", 100)) == [111]

    with_no_trouble(use)


async def test_a_script_that_the_server_forgot_is_brought_again(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        for _ in range(2):
            server.execute("FUNCTION", "FLUSH")
            await connections.run(call(COUNT, "n", 1))
            await connections.run(call(COUNT, "n", 1))
        assert int(server.execute("GET", "n")) == 4


async def test_a_transaction_with_forgotten_scripts_happens_once_and_whole(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        server.execute("FUNCTION", "FLUSH")
        assert await connections.run(lambda _: [Call(COUNT, ["n"], (1,)), Call(COUNT, ["n"], (1,))]) == [
            1,
            2,
        ]
        server.execute("FUNCTION", "FLUSH")
        await connections.run(call(COUNT, "n", 1))
        # One of the two is known now, and must not take effect without the other.
        assert await connections.run(lambda _: [Call(COUNT, ["n"], (1,)), Call(READ, ["n"], ())]) == [
            4,
            b"4",
        ]


async def test_what_a_function_says_becomes_our_error(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        with pytest.raises(TaskHarborError, match="what") as error:
            await connections.run(lambda _: [Call("fail", ["k"], ("ERR what",))])
        assert not isinstance(error.value, BackendUnavailable)
        # The connection is as good as before.
        assert await connections.run(call(COUNT, "n", 1)) == [1]


# -- plain commands -----------------------------------------------------------------------------------------


async def test_commands_go_out_together_and_are_answered_in_order(server: RedisServer) -> None:
    async with connected(server.url) as connections:
        assert await connections.commands([("SET", "a", "1"), ("GET", "a"), ("HGETALL", "h")]) == [
            b"OK",
            b"1",
            [],
        ]
        assert await connections.commands([]) == []
        seconds, _ = await connections.command("TIME")
        assert int(seconds) > 1_500_000_000


async def test_the_database_of_the_url_is_used(server: RedisServer) -> None:
    async with connected(server.url.removesuffix("/0") + "/5") as connections:
        await connections.command("SET", "here", "1")
    assert server.execute("EXISTS", "here") == 0


# -- lost connections ---------------------------------------------------------------------------------------


async def test_a_connection_that_is_given_up_before_anything_was_read_is_closed(server: RedisServer) -> None:
    connection = Connection(port=server.port)
    await connection.connect()
    SharedConnection(connection, 1.0).abort("nobody needs it")
    assert not connection.is_connected


def test_a_connection_that_died_while_idle_costs_nothing(server: RedisServer) -> None:
    async def use() -> None:
        async with connected(server.url) as connections:
            await connections.run(call(COUNT, "n", 1))
            server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await until(lambda: not connections.server_for("n").is_connected, "the loss is noticed")
            assert await connections.run(call(COUNT, "n", 1)) == [2]

    with_no_trouble(use)


def test_a_lost_answer_makes_the_call_again_and_says_so(server: RedisServer) -> None:
    seen: list[int] = []

    def make(again: int) -> list[Call]:
        seen.append(again)
        return [Call(ONCE, ["n"], (again,))]

    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            async with connected(proxy.url_for(server.url)) as connections:
                await connections.run(call(READ, "n"))
                load_stage(server)
                proxy.on_request(b"_once", "lose_answer")
                assert await connections.run(make) == [b"recognised"]
        assert seen == [0, 1]
        assert int(server.execute("GET", "n")) == 1

    with_no_trouble(use)


def test_a_request_that_never_arrived_is_made_again_too(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            async with connected(proxy.url_for(server.url)) as connections:
                proxy.cut_before_request()
                assert await connections.run(lambda again: [Call(ONCE, ["n"], (again,))]) == [b"done"]
        assert int(server.execute("GET", "n")) == 1

    with_no_trouble(use)


def test_a_transaction_whose_answer_is_lost_is_made_again_as_a_whole(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            async with connected(proxy.url_for(server.url)) as connections:
                load_stage(server)
                proxy.on_request(b"MULTI", "lose_answer")
                answers = await connections.run(
                    lambda again: [Call(ONCE, ["a"], (again,)), Call(ONCE, ["b"], (again,))]
                )
                assert answers == [b"recognised", b"recognised"]
        assert [int(n) for n in server.execute("MGET", "a", "b")] == [1, 1]

    with_no_trouble(use)


def test_two_lost_answers_are_an_outage(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            async with connected(proxy.url_for(server.url)) as connections:
                tries = 0

                def make(again: int) -> list[Call]:
                    nonlocal tries
                    tries += 1
                    proxy.on_request(b"FCALL", "drop")
                    return [Call(ONCE, ["n"], (again,))]

                with pytest.raises(BackendUnavailable, match="before the answer came"):
                    await connections.run(make)
                assert tries == 2
                proxy.disarm()
                assert await connections.run(call(COUNT, "n", 1)) == [1]

    with_no_trouble(use)


def test_all_who_wait_for_an_answer_learn_that_none_comes(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            async with connected(proxy.url_for(server.url)) as connections:
                await connections.run(call(READ, "n"))
                proxy.stall()
                calls = [asyncio.create_task(connections.run(call(READ, "n"))) for _ in range(20)]
                await asyncio.sleep(0)
                proxy.cut()
                proxy.flow()
                assert await soon(asyncio.gather(*calls)) == [[None]] * 20

    with_no_trouble(use)


def test_silence_counts_as_a_lost_connection(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            url = proxy.url_for(server.url) + "?timeout=0.2&connect_timeout=0.2"
            async with connected(url) as connections:
                await connections.run(call(READ, "n"))
                proxy.stall()
                with pytest.raises(BackendUnavailable, match=r"no answer within 0\.2 s|no connection within"):
                    await soon(connections.run(call(READ, "n")))
                proxy.flow()
                assert await soon(connections.run(call(COUNT, "n", 1))) == [1]

    with_no_trouble(use)


def test_a_server_that_is_gone_is_named_without_secrets(server: RedisServer) -> None:
    with FaultProxy.to(server.url) as proxy:
        port = proxy.port

    async def use() -> None:
        with pytest.raises(BackendUnavailable) as error:
            await Store(parse_url(f"redis://someone:{_PASSWORD}@127.0.0.1:{port}/0")).open()
        assert str(port) in str(error.value)
        assert _PASSWORD not in str(error.value)
        assert "someone" not in str(error.value)

    with_no_trouble(use)


async def test_what_is_no_redis_server_is_recognised() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(BackendUnavailable, match="not a Redis server"):
            await Store(parse_url(f"redis://127.0.0.1:{port}")).open()


def test_a_closed_handle_says_so_and_closing_twice_is_harmless(server: RedisServer) -> None:
    async def use() -> None:
        connections = Store(parse_url(server.url))
        with pytest.raises(BackendUnavailable, match="open"):
            await connections.run(call(READ, "n"))
        await connections.open()
        await connections.open()
        await connections.close()
        await connections.close()
        with pytest.raises(BackendUnavailable, match="open"):
            await connections.command("TIME")

    with_no_trouble(use)


def test_closing_ends_calls_under_way(server: RedisServer) -> None:
    async def use() -> None:
        with FaultProxy.to(server.url) as proxy:
            connections = Store(parse_url(proxy.url_for(server.url)))
            await connections.open()
            proxy.stall()
            waiting = asyncio.create_task(connections.run(call(READ, "n")))
            await asyncio.sleep(0)
            await connections.close()
            with pytest.raises(BackendUnavailable):
                await soon(waiting)

    with_no_trouble(use)


# -- who is let in, and what is refused ---------------------------------------------------------------------


async def test_a_password_is_asked_for_and_checked() -> None:
    with RedisServer.start(config={"requirepass": _PASSWORD}) as guarded:
        bare = guarded.url.partition("@")[2]
        for url, words in (
            (f"redis://{bare}", "wants a password"),
            (f"redis://:wrong{_PASSWORD}@{bare}", "password is wrong"),
            (f"redis://nobody:{_PASSWORD}@{bare}", "password is wrong"),
        ):
            with pytest.raises(InvalidRequest, match=words) as error:
                await Store(parse_url(url)).open()
            assert _PASSWORD not in str(error.value)
        async with connected(guarded.url) as connections:
            assert await connections.run(call(COUNT, "n", 1)) == [1]


async def test_a_password_for_a_server_without_one_is_said(server: RedisServer) -> None:
    with pytest.raises((BackendUnavailable, InvalidRequest), match="no password, but"):
        await Store(parse_url(server.url.replace("redis://", f"redis://:{_PASSWORD}@"))).open()


async def test_a_user_of_few_rights_is_told_which_are_missing(server: RedisServer) -> None:
    server.execute("ACL", "SETUSER", "weak", "on", f">{_PASSWORD}", "~other:*", "+@all")

    url = server.url.replace("redis://", f"redis://weak:{_PASSWORD}@")
    with pytest.raises(InvalidRequest, match="lacks a right"):
        await Store(parse_url(url)).open()
    async with connected(f"{url}?prefix=other:") as connections:
        with pytest.raises(InvalidRequest, match="lacks a right"):
            await connections.run(call(COUNT, "n", 1))


async def test_a_database_that_is_not_there_is_said(server: RedisServer) -> None:
    with pytest.raises(BackendUnavailable, match="fewer databases"):
        await Store(parse_url(server.url.removesuffix("/0") + "/99")).open()


async def test_a_full_house_is_said() -> None:
    with RedisServer.start(config={"maxclients": "2"}) as small:
        async with connected(small.url), connected(small.url):
            with pytest.raises(BackendUnavailable, match="maxclients"):
                await Store(parse_url(small.url)).open()


async def test_a_server_that_throws_keys_away_is_refused_unless_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "taskharbor.redis")

    with RedisServer.start(config={"maxmemory-policy": "allkeys-lru"}) as careless:
        async with connected(careless.url):
            assert "noeviction" in caplog.text
        careless.execute("CONFIG", "SET", "maxmemory", "100mb")
        with pytest.raises(InvalidRequest, match="maxmemory-policy noeviction"):
            await Store(parse_url(careless.url)).open()
        async with connected(careless.url + "?eviction=accept"):
            pass
        # Only keys with a time to live go, and ours have none.
        careless.execute("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        async with connected(careless.url):
            pass


@pytest.mark.parametrize("version", REDIS_VERSIONS)
async def test_a_server_that_takes_no_changes_without_replicas_says_so(version: str) -> None:
    with RedisServer.start(version=version, config={"min-replicas-to-write": "1"}) as alone:
        async with connected(alone.url) as connections:
            for calls in (1, 2):
                with pytest.raises(BackendUnavailable, match="min-replicas-to-write"):
                    await connections.run(lambda _, calls=calls: [Call(COUNT, ["n"], (1,))] * calls)
            assert await connections.run(call(READ, "n")) == [None]


@pytest.mark.parametrize("version", REDIS_VERSIONS)
async def test_a_server_that_somebodys_script_holds_says_so(version: str) -> None:
    with RedisServer.start(version=version, config={"lua-time-limit": "10"}) as held:
        async with connected(held.url) as connections, connected(held.url) as other:
            endless = asyncio.ensure_future(other.run(call("endless", "n")))
            await until(lambda: _is_busy(held), "the script runs")
            with pytest.raises(BackendUnavailable, match="FUNCTION KILL"):
                await connections.run(call(COUNT, "n", 1))
            held.execute("FUNCTION", "KILL")
            with pytest.raises(TaskHarborError):
                await endless
            assert await connections.run(call(COUNT, "n", 1)) == [1]


def _is_busy(server: RedisServer) -> bool:
    try:
        server.execute("GET", "n")
    except redis.ResponseError as error:
        return "BUSY" in str(error) or "busy" in str(error)
    return False


def test_a_server_that_is_too_old_is_refused() -> None:
    options = parse_url("redis://h?wait_aof=1")
    for version, message in (
        ("6.2.14", r"6\.2 is too old: 7\.0 or newer"),
        ("7.0.15", r"wait_aof needs Redis 7\.2"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            check(read_info(f"redis_version:{version}\r\n".encode()), options, "h:6379")
    check(read_info(b"redis_version:7.0.15\r\n"), parse_url("redis://h"), "h:6379")


@pytest.mark.installed
async def test_waiting_for_files_needs_a_server_that_can() -> None:
    server = shared_redis("7.0")

    with pytest.raises(InvalidRequest, match=r"7\.2"):
        await Store(parse_url(server.url + "?wait_aof=1")).open()


async def test_a_socket_in_the_file_system_works(server: RedisServer) -> None:
    path = server.data / "socket"
    with RedisServer.start(config={"unixsocket": str(path), "unixsocketperm": "777"}) as local:
        async with connected(f"redis+unix://{path}") as connections:
            assert await connections.run(call(COUNT, "n", 1)) == [1]
        assert int(local.execute("GET", "n")) == 1
