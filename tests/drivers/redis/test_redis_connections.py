"""Functions and commands on one server: answers, transactions, errors, and what happens when a connection does not hold."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import redis
from redis.asyncio import Connection

from drivers.redis.redis_stage import call, connected, refused
from needing import REDIS_VERSIONS, Certificate, Entered
from taskharbor.drivers.redis.connection import Server, SharedConnection
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import RedisStore, check, read_info
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor_testkit.servers import FaultProxy, RedisServer
from worker.stage import eventually, finish

_PASSWORD = "s3cr3t-p4ss"


@pytest.fixture(scope="module", params=REDIS_VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One that these tests may spoil as they like, of each version that is tested."""
    with RedisServer.start(version=request.param) as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.flush()


@pytest.fixture
def connections(server: RedisServer) -> Entered:
    return Entered(connected(server.url))


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy.to(server.url) as proxy:
        yield proxy


@pytest.fixture
def near(server: RedisServer, proxy: FaultProxy) -> Entered:
    """Connections that run through the proxy."""
    return Entered(connected(proxy.url_for(server.url)))


# -- functions and commands ---------------------------------------------------------------------------------


async def test_a_caller_who_gives_up_takes_nobody_elses_answer(connections: RedisStore) -> None:
    await connections.run(call("count", "n", 1))
    given_up = asyncio.create_task(connections.run(call("count", "n", 10)))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await connections.run(call("count", "n", 100)) == [111]


async def test_functions_the_server_forgot_come_again(server: RedisServer, connections: RedisStore) -> None:
    two = [*call("count", "n", 1), *call("read", "n")]
    server.execute("FUNCTION", "FLUSH")
    assert await connections.run(call("count", "n", 1)) == [1]
    server.execute("FUNCTION", "FLUSH")
    # A transaction happens once and as a whole.
    assert await connections.run(two) == [2, b"2"]
    # An error of a function is none of the connection.
    with pytest.raises(TaskHarborError, match="what") as error:
        await connections.run(call("fail", "k", "ERR what"))
    assert not isinstance(error.value, BackendUnavailable)
    assert await connections.run(two) == [3, b"3"]


# -- lost connections ---------------------------------------------------------------------------------------


async def test_a_connection_that_is_given_up_before_anything_was_read_is_closed(server: RedisServer) -> None:
    connection = Connection(port=server.port)
    await connection.connect()  # type: ignore[no-untyped-call]
    SharedConnection(connection, 1.0).abort("nobody needs it")
    assert not connection.is_connected


async def test_two_lost_answers_are_an_outage(
    near: RedisStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Server.call

    def dropped(*args: Any, **options: Any) -> Coroutine[Any, Any, list[Any]]:
        proxy.on_request(b"FCALL", "drop")
        return undisturbed(*args, **options)

    monkeypatch.setattr(Server, "call", dropped)
    with pytest.raises(BackendUnavailable, match="before the answer came"):
        await near.run(call("once", "n"))
    monkeypatch.undo()
    assert await near.run(call("once", "n")) == [b"done"]


async def test_all_who_wait_for_an_answer_learn_that_none_comes(near: RedisStore, proxy: FaultProxy) -> None:
    await near.run(call("read", "n"))
    proxy.stall()
    calls = [asyncio.create_task(near.run(call("read", "n"))) for _ in range(20)]
    await asyncio.sleep(0)
    proxy.cut()
    proxy.flow()
    assert await finish(asyncio.gather(*calls)) == [[None]] * 20


async def test_closing_ends_calls_and_a_closed_handle_says_so(near: RedisStore, proxy: FaultProxy) -> None:
    proxy.stall()
    waiting = asyncio.create_task(near.run(call("read", "n")))
    await asyncio.sleep(0)
    await near.close()
    with pytest.raises(BackendUnavailable):
        await finish(waiting)
    with pytest.raises(BackendUnavailable, match="not open: await"):
        await near.command("TIME")


# -- who is let in, and what is refused ---------------------------------------------------------------------


async def test_a_server_that_is_gone_is_named_without_secrets(server: RedisServer, proxy: FaultProxy) -> None:
    proxy.refuse()
    why = await refused(f"redis://someone:{_PASSWORD}@127.0.0.1:{proxy.port}/0")
    assert str(proxy.port) in why
    assert _PASSWORD not in why
    assert "someone" not in why


async def test_what_is_no_redis_server_is_recognised() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        assert "not a Redis server" in await refused(f"redis://127.0.0.1:{port}")


async def test_a_password_is_asked_for_and_checked(server: RedisServer) -> None:
    with RedisServer.start(config={"requirepass": _PASSWORD}) as guarded:
        bare = guarded.url.partition("@")[2]
        assert "wants a password" in await refused(f"redis://{bare}")
        for account in (f":wrong{_PASSWORD}", f"nobody:{_PASSWORD}"):
            why = await refused(f"redis://{account}@{bare}")
            assert "password is wrong" in why
            assert _PASSWORD not in why
        async with connected(guarded.url) as connections:
            assert await connections.run(call("count", "n", 1)) == [1]
    assert "no password, but" in await refused(server.url.replace("redis://", f"redis://:{_PASSWORD}@"))


async def test_a_user_of_few_rights_is_told_which_are_missing(server: RedisServer) -> None:
    server.execute("ACL", "SETUSER", "weak", "on", f">{_PASSWORD}", "~other:*", "+@all")
    url = server.url.replace("redis://", f"redis://weak:{_PASSWORD}@")
    assert "lacks a right" in await refused(url)
    async with connected(url, "?prefix=other:") as connections:
        with pytest.raises(InvalidRequest, match="lacks a right"):
            await connections.run(call("count", "n", 1))


async def test_a_database_or_a_connection_that_is_not_to_be_had_is_said(server: RedisServer) -> None:
    assert "fewer databases" in await refused(server.url.removesuffix("/0") + "/99")
    async with connected(server.url.removesuffix("/0"), "/5") as only:
        await only.command("SET", "here", "1")
        assert server.execute("EXISTS", "here") == 0, "it is in the database of the URL"
        await only.command("CONFIG", "SET", "maxclients", 1)
        assert "maxclients" in await refused(server.url)
        await only.command("CONFIG", "SET", "maxclients", 1000)


async def test_a_server_that_evicts_is_refused_unless_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "taskharbor.redis")
    with RedisServer.start(config={"maxmemory-policy": "allkeys-lru"}) as careless:
        async with connected(careless.url):
            assert "noeviction" in caplog.text
        careless.execute("CONFIG", "SET", "maxmemory", "100mb")
        assert "maxmemory-policy noeviction" in await refused(careless.url)
        async with connected(careless.url, "?eviction=accept"):
            pass
        # Only keys with a time to live go, and ours have none.
        careless.execute("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        async with connected(careless.url):
            pass


async def test_a_server_that_waits_for_replicas_says_so(server: RedisServer, connections: RedisStore) -> None:
    server.execute("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        for calls in (1, 2):
            with pytest.raises(BackendUnavailable, match="min-replicas-to-write"):
                await connections.run(call("count", "n", 1) * calls)
        assert await connections.run(call("read", "n")) == [None]
    finally:
        server.execute("CONFIG", "SET", "min-replicas-to-write", 0)


async def test_a_server_that_a_script_holds_says_so(server: RedisServer, connections: RedisStore) -> None:
    def is_busy() -> bool:
        try:
            server.execute("GET", "n")
        except redis.ResponseError as error:
            return "busy" in str(error).lower()
        return False

    server.execute("CONFIG", "SET", "lua-time-limit", 10)
    async with connected(server.url) as other:
        endless = asyncio.ensure_future(other.run(call("endless", "n")))
        await eventually(is_busy)
        with pytest.raises(BackendUnavailable, match="FUNCTION KILL"):
            await connections.run(call("count", "n", 1))
        server.execute("FUNCTION", "KILL")
        with pytest.raises(TaskHarborError):
            await endless
        assert await connections.run(call("count", "n", 1)) == [1]


def test_a_server_that_is_too_old_is_refused() -> None:
    old, oldest = {"redis_version": "6.2.14"}, read_info(b"# Server\r\nredis_version:7.0.15\r\n")
    check(oldest, parse_url("redis://h"), "h:6379")
    with pytest.raises(InvalidRequest, match=r"6\.2 is too old: 7\.0 or newer"):
        check(old, parse_url("redis://h"), "h:6379")
    with pytest.raises(InvalidRequest, match=r"wait_aof needs Redis 7\.2"):
        check(oldest, parse_url("redis://h?wait_aof=1"), "h:6379")


async def test_a_socket_in_the_file_system_works(server: RedisServer) -> None:
    path = server.data / "socket"
    with RedisServer.start(config={"unixsocket": str(path), "unixsocketperm": "777"}) as local:
        async with connected(f"redis+unix://{path}") as connections:
            assert await connections.run(call("count", "n", 1)) == [1]
        assert int(local.execute("GET", "n")) == 1


# -- TLS ----------------------------------------------------------------------------------------------------


def tls_of(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate.authority)
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


@pytest.fixture
def secure(server: RedisServer, certificate: Certificate) -> Iterator[FaultProxy]:
    """Speaks TLS for the server."""
    with FaultProxy.to(server.url, tls=tls_of(certificate)) as proxy:
        yield proxy


async def test_a_server_whose_certificate_is_vouched_for_is_talked_to(
    server: RedisServer, secure: FaultProxy, certificate: Certificate
) -> None:
    async with connected(secure.url_for(server.url), f"?tls_ca={certificate.authority}") as connections:
        assert await connections.run(call("count", "n", 1)) == [1]
        # An answer that is lost is asked for again.
        secure.on_request(b"_count", "lose_answer")
        assert await connections.run(call("count", "n", 1)) == [3]
        assert secure.triggered.is_set()


async def test_a_server_may_ask_for_a_certificate(server: RedisServer, certificate: Certificate) -> None:
    strict = tls_of(certificate)
    strict.verify_mode = ssl.CERT_REQUIRED
    with FaultProxy.to(server.url, tls=strict) as proxy:
        url = f"{proxy.url_for(server.url)}?tls_ca={certificate.authority}"
        async with connected(url, f"&tls_cert={certificate.chain}&tls_key={certificate.key}"):
            pass
        assert await refused(url)


async def test_a_server_that_nobody_vouches_for_is_refused_unless_that_is_wanted(
    server: RedisServer, secure: FaultProxy, certificate: Certificate
) -> None:
    url = secure.url_for(server.url)
    assert "tls_ca" in await refused(url)
    assert "missing.pem" in await refused(f"{url}?tls_ca=/missing.pem")
    elsewhere = url.replace("127.0.0.1", "localhost")
    assert "certificate" in await refused(f"{elsewhere}?tls_ca={certificate.authority}")
    async with connected(url, "?tls_verify=off"):
        pass


async def test_tls_with_a_server_that_has_none_is_said(server: RedisServer) -> None:
    # Redis says nothing to what it does not understand, or closes the connection.
    why = await refused(server.url.replace("redis://", "rediss://") + "?connect_timeout=0.3")
    assert any(words in why for words in ("no connection within", "instead of rediss", "closed", "reset"))
