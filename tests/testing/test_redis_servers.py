"""The Redis servers that other tests rely on, and the failures that can be had from them on purpose."""

import os
import sys
import time
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from needing import REDIS_VERSIONS
from taskharbor_testkit.servers import drop_prefix, shared_redis, with_fresh_prefix
from taskharbor_testkit.servers.discovery import ServerMissing, find_redis, redis_versions
from taskharbor_testkit.servers.process import ServerFailed
from taskharbor_testkit.servers.proxy import Fault, FaultProxy
from taskharbor_testkit.servers.redis import RedisAt, RedisServer

LOST = redis.ConnectionError


def connect(url: str, protocol: int = 3) -> redis.Redis:
    options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 10, "single_connection_client": True}
    return redis.Redis.from_url(url, protocol=protocol, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    server.flush()
    with FaultProxy.to(server.url) as proxy:
        yield proxy


# Servers


def test_programs_are_found_by_version_and_the_newest_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKHARBOR_REDIS_SERVER", raising=False)
    versions = redis_versions()
    for version, program in versions.items():
        assert find_redis(version) == (version, program)
        assert find_redis(version.rpartition(".")[0])[0].startswith(version.rpartition(".")[0])
    assert find_redis("7+") == find_redis("7.2+")
    assert find_redis()[0] == list(versions)[-1]
    for missing, said in (("2.8", r"Redis 2\.8 was not found \(found: .*\d"), ("99+", r"99\+ was not found")):
        with pytest.raises(ServerMissing, match=said):
            RedisServer.start(version=missing)
    oldest = next(iter(versions))
    monkeypatch.setenv("TASKHARBOR_REDIS_SERVER", str(versions[oldest]))
    assert find_redis() == (oldest, versions[oldest])
    monkeypatch.setenv("TASKHARBOR_REDIS_SERVER", sys.executable)
    with pytest.raises(ServerMissing, match=r"TASKHARBOR_REDIS_SERVER=.* was not found"):
        find_redis()


def test_settings_win_and_a_password_is_in_the_url(server: RedisServer) -> None:
    assert server.version == RedisAt(server.url).version
    assert server.execute("CONFIG", "GET", "bind") == [b"bind", b"127.0.0.1"]
    config = {"appendfsync": "no", "requirepass": "p@ss", "databases": "3"}
    with RedisServer.start(appendonly=True, fsync="always", config=config) as other:
        assert other.execute("CONFIG", "GET", "appendfsync") == [b"appendfsync", b"no"]
        assert other.execute("CONFIG", "GET", "databases") == [b"databases", b"3"]
        with pytest.raises(redis.AuthenticationError):
            RedisAt(f"redis://127.0.0.1:{other.port}/0").execute("PING")
    assert not other.data.exists()
    with pytest.raises(ServerFailed, match="maxclients"):
        RedisServer.start(config={"maxclients": "many"})


def test_a_port_that_is_taken_is_given_up(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from taskharbor_testkit.servers import process

    ports = iter([server.port, process.free_port()])
    monkeypatch.setattr(process, "free_port", lambda: next(ports))
    with RedisServer.start() as other:
        assert other.port != server.port
        assert other.execute("PING") == b"PONG"


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_what_was_appended_survives_every_way_to_stop(version: str) -> None:
    with RedisServer.start(version=version, appendonly=True) as server:
        port = server.port
        server.execute("SET", "note", "kept")
        server.restart()
        server.kill()
        assert not server.running
        server.restart()
        assert (server.port, server.execute("GET", "note")) == (port, b"kept")


def test_a_prefix_is_dropped_with_everything_under_it_and_nothing_else() -> None:
    server = shared_redis()
    assert server is shared_redis(find_redis()[0])
    mine, others = with_fresh_prefix(server.url), with_fresh_prefix(server.url)
    prefixes = [url.partition("prefix=")[2].replace("%3A", ":") for url in (mine, others)]
    assert prefixes[0] != prefixes[1]
    for prefix in prefixes:
        server.execute("MSET", *(part for n in range(50) for part in (f"{prefix}{n}", n)))
    drop_prefix(mine)
    assert server.execute("EXISTS", f"{prefixes[0]}7", f"{prefixes[1]}7") == 1
    drop_prefix(others)
    assert server.execute("KEYS", f"{prefixes[1]}*") == []


# The fault proxy


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_proxy_carries_everything(server: RedisServer, proxy: FaultProxy, protocol: int) -> None:
    large = os.urandom(3_000_000)
    with connect(proxy.url_for(server.url), protocol) as client:
        client.set("large", large)
        assert client.get("large") == large
        client.hset("facts", mapping={"a": "1", "b": "2"})
        assert client.hgetall("facts") == {b"a": b"1", b"b": b"2"}
        with client.pipeline() as transaction:
            transaction.incr("n").get("missing").lrange("none", 0, -1)
            assert transaction.execute() == [1, None, []]
        assert client.eval("return {1, {'two', {3}}, false}", 0) == [1, [b"two", [3]], None]
    # A client's farewell takes its time; that a connection stays open for good would be an error.
    deadline = time.monotonic() + 10
    while proxy.connections:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("protocol", [2, 3])
def test_published_messages_are_no_answers(server: RedisServer, proxy: FaultProxy, protocol: int) -> None:
    with connect(proxy.url_for(server.url), protocol) as client, client.pubsub() as listener:
        listener.subscribe("news", "more")
        for _ in range(2):
            assert (listener.get_message(timeout=10) or {})["type"] == "subscribe"
        for n in range(3):
            server.execute("PUBLISH", "news", n)
            assert (listener.get_message(timeout=10) or {})["data"] == str(n).encode()
        proxy.on_request(b"PING", "lose_answer")
        listener.ping()
        with pytest.raises(LOST):
            listener.get_message(timeout=10)
        assert proxy.triggered.wait(10)


def test_a_request_is_cut_before_or_after_the_server(server: RedisServer, proxy: FaultProxy) -> None:
    for cut, count in ((proxy.cut_before_request, b"1"), (proxy.cut_after_request, b"3")):
        with connect(proxy.url_for(server.url)) as client:
            cut(2)
            client.incr("n")
            with pytest.raises(LOST):
                client.incr("n")
        assert proxy.triggered.wait(10)
        assert server.execute("GET", "n") == count


@pytest.mark.parametrize("fate", [("lose_answer", False, 2), ("lose_answer", True, 3), ("drop", True, 0)])
def test_the_fate_of_a_pipeline(
    server: RedisServer, proxy: FaultProxy, fate: tuple[Fault, bool, int]
) -> None:
    """The request that is named is the last that happens. A transaction is one request."""
    fault, transaction, happened = fate
    with connect(proxy.url_for(server.url)) as client, client.pipeline(transaction) as pipeline:
        proxy.on_request(b"second", fault)
        pipeline.set("first", 1).set("second", 1).set("third", 1)
        with pytest.raises(LOST):
            pipeline.execute()
    assert proxy.triggered.wait(10)
    exist = [server.execute("EXISTS", key) for key in ("first", "second", "third")]
    assert exist == [1] * happened + [0] * (3 - happened)
