"""The Redis servers that other tests rely on, and the failures that can be had from them on purpose."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from needing import REDIS_VERSIONS
from taskharbor_testkit.servers import (
    FaultProxy,
    RedisAt,
    RedisCluster,
    RedisSentinels,
    RedisServer,
    ServerMissing,
    drop_prefix,
    reaper,
    shared_redis,
    shared_redis_cluster,
    with_fresh_prefix,
)
from taskharbor_testkit.servers.discovery import find_redis, redis_versions
from taskharbor_testkit.servers.process import ServerFailed
from taskharbor_testkit.servers.proxy import Fault

LOST = redis.ConnectionError


def connect(url: str, protocol: int = 3) -> redis.Redis:
    once = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(
        url, retry=once, socket_timeout=10, protocol=protocol, single_connection_client=True
    )


def eventually_closed(proxy: FaultProxy) -> None:
    """A client's farewell takes its time; that a connection stays open for good would be an error."""
    deadline = time.monotonic() + 10
    while proxy.connections:
        assert time.monotonic() < deadline


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


def test_every_version_that_is_installed_starts(server: RedisServer) -> None:
    assert server.version in redis_versions()
    for version in redis_versions():
        with RedisServer.start(version=version) as one:
            assert one.version == RedisAt(one.url).version == version
            assert one.execute("CONFIG", "GET", "appendonly") == [b"appendonly", b"no"]
            assert one.execute("CONFIG", "GET", "bind") == [b"bind", b"127.0.0.1"]
        assert not one.data.exists()


def test_a_version_is_found_by_how_it_begins_or_by_a_lower_bound() -> None:
    for version, program in redis_versions().items():
        assert find_redis(version) == (version, program)
        assert find_redis(version.rpartition(".")[0])[0].startswith(version.rpartition(".")[0])
    assert find_redis("7+") == find_redis("7.2+")


def test_the_newest_version_is_the_default_unless_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKHARBOR_REDIS_SERVER", raising=False)
    versions = list(redis_versions())
    assert find_redis()[0] == versions[-1]
    oldest = redis_versions()[versions[0]]
    monkeypatch.setenv("TASKHARBOR_REDIS_SERVER", str(oldest))
    assert find_redis() == (versions[0], oldest)
    monkeypatch.setenv("TASKHARBOR_REDIS_SERVER", sys.executable)
    with pytest.raises(ServerMissing, match=r"TASKHARBOR_REDIS_SERVER=.* was not found"):
        find_redis()


def test_a_version_that_nobody_has_is_missing() -> None:
    with pytest.raises(ServerMissing, match=r"Redis 2\.8 was not found \(found: .*\d"):
        RedisServer.start(version="2.8")
    with pytest.raises(ServerMissing, match=r"Redis 99\+ was not found"):
        RedisServer.start(version="99+")


def test_settings_win_and_a_password_is_in_the_url() -> None:
    config = {"appendfsync": "no", "requirepass": "p@ss", "databases": "3"}
    with RedisServer.start(appendonly=True, fsync="always", config=config) as server:
        assert server.execute("CONFIG", "GET", "appendfsync") == [b"appendfsync", b"no"]
        assert server.execute("CONFIG", "GET", "databases") == [b"databases", b"3"]
        with pytest.raises(redis.AuthenticationError):
            RedisAt(f"redis://127.0.0.1:{server.port}/0").execute("PING")


def test_a_setting_that_redis_refuses_is_in_the_message() -> None:
    with pytest.raises(ServerFailed, match="maxclients"):
        RedisServer.start(config={"maxclients": "many"})


def test_a_port_that_was_taken_meanwhile_is_given_up(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_paused_server_answers_when_it_is_resumed(server: RedisServer) -> None:
    answers: list[object] = []
    with connect(server.url) as client:
        client.ping()
        server.pause()
        asking = threading.Thread(target=lambda: answers.append(client.ping()))
        asking.start()
        assert answers == []
        server.resume()
        asking.join()
    assert answers == [True]


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_a_replica_takes_over_and_stays_master(version: str) -> None:
    with RedisServer.start(version=version, appendonly=True) as master, master.replica() as replica:
        master.execute("SET", "note", "replicated")
        replica.catch_up(master)
        with pytest.raises(redis.ReadOnlyError):
            replica.execute("SET", "note", "refused")
        master.kill()
        replica.promote()
        replica.restart()
        assert replica.execute("GET", "note") == b"replicated"
        replica.execute("SET", "note", "changed")


def test_flushing_forgets_keys_and_scripts(server: RedisServer) -> None:
    sha = server.execute("SCRIPT", "LOAD", "return 1")
    server.execute("SET", "note", 1)
    server.flush()
    assert server.execute("DBSIZE") == 0
    assert server.execute("SCRIPT", "EXISTS", sha) == [0]


def test_servers_of_a_process_that_was_killed_are_ended(tmp_path: Path) -> None:
    program = (
        "from taskharbor_testkit.servers import RedisServer\n"
        "import signal\n"
        "server = RedisServer.start()\n"
        "print(server.pid, server.data, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, data = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
        owner.stdout.read()  # Ends with the reaper, which keeps it open until the server is gone.
    assert not reaper.alive(int(pid))
    assert not Path(data).exists()


# Sharing


def test_there_is_one_shared_server_per_process_and_version() -> None:
    assert shared_redis() is shared_redis() is shared_redis(find_redis()[0])


def test_a_prefix_is_dropped_with_everything_under_it_and_nothing_else() -> None:
    server = shared_redis()
    mine, others = with_fresh_prefix(server.url), with_fresh_prefix(server.url)
    prefixes = [url.partition("prefix=")[2].replace("%3A", ":") for url in (mine, others)]
    assert prefixes[0] != prefixes[1]
    for prefix in prefixes:
        server.execute("MSET", *(part for n in range(50) for part in (f"{prefix}{n}", n)))
    drop_prefix(mine)
    assert server.execute("EXISTS", f"{prefixes[0]}7", f"{prefixes[1]}7") == 1
    drop_prefix(others)
    assert server.execute("KEYS", f"{prefixes[1]}*") == []


# Sentinel


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_sentinels_replace_a_master_that_is_killed(version: str) -> None:
    with RedisSentinels.start(version=version) as group:
        first = group.master
        first.execute("SET", "note", "replicated")
        group.replica.catch_up(first)
        second = group.kill_master()
        assert second is not first
        assert group.master is second
        assert second.execute("GET", "note") == b"replicated"
        second.execute("SET", "note", "changed")


def test_sentinels_fail_over_in_order() -> None:
    with RedisSentinels.start() as group:
        first = group.master
        first.execute("SET", "note", "kept")
        assert group.fail_over().execute("GET", "note") == b"kept"
        assert group.master is not first
        assert group.url.startswith("redis+sentinel://127.0.0.1:")
        assert group.url.endswith("/harbor/0")


# Cluster


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_three_nodes_share_the_slots(version: str) -> None:
    with RedisCluster.start(version=version) as cluster:
        owners = {cluster.node_of(f"{{{letter}}}:jobs") for letter in "abcdef"}
        assert owners == set(cluster.nodes)
        assert len(owners) == 3
        home = cluster.node_of("{a}")
        away = next(node for node in cluster.nodes if node is not home)
        home.execute("SET", "{a}:note", "here")
        with pytest.raises(redis.exceptions.MovedError):
            away.execute("GET", "{a}:note")


def test_a_slot_moves_with_its_keys() -> None:
    cluster = shared_redis_cluster()
    home = cluster.node_of("{b}")
    away = next(node for node in cluster.nodes if node is not home)
    home.execute("SET", "{b}:note", "moved")
    cluster.begin_move("{b}", away)
    with pytest.raises(redis.exceptions.AskError):
        home.execute("GET", "{b}:another")
    cluster.move("{b}", away)
    assert cluster.node_of("{b}") is away
    assert away.execute("GET", "{b}:note") == b"moved"
    away.execute("DEL", "{b}:note")


def test_a_prefix_is_dropped_on_every_node() -> None:
    cluster = shared_redis_cluster()
    url = with_fresh_prefix(cluster.url)
    prefix = url.partition("prefix=")[2].replace("%3A", ":")
    keys = [f"{prefix}{{{letter}}}" for letter in "cdefgh"]
    for key in keys:
        cluster.node_of(key).execute("SET", key, 1)
    drop_prefix(url)
    assert [cluster.node_of(key).execute("EXISTS", key) for key in keys] == [0] * 6


def test_a_replica_of_the_cluster_takes_over() -> None:
    with RedisCluster.start(replicas=True) as cluster:
        assert len(cluster.nodes) == 6
        first = cluster.node_of("{a}")
        first.execute("SET", "{a}:note", "kept")
        second = cluster.fail_over("{a}")
        assert (second is not first, second.execute("GET", "{a}:note")) == (True, b"kept")
        gone = cluster.node_of("{b}")
        assert cluster.kill_master("{b}") is not gone


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
    eventually_closed(proxy)


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


def test_a_request_that_is_cut_before_the_server_sees_it_did_nothing(
    server: RedisServer, proxy: FaultProxy
) -> None:
    with connect(proxy.url_for(server.url)) as client:
        client.incr("n")
        proxy.cut_before_request(2)
        client.incr("n")
        with pytest.raises(LOST):
            client.incr("n")
    assert proxy.triggered.wait(10)
    assert server.execute("GET", "n") == b"2"


def test_a_request_whose_answer_is_lost_was_carried_out(server: RedisServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(server.url)) as client:
        proxy.cut_after_request()
        with pytest.raises(LOST):
            client.incr("n")
    assert proxy.triggered.wait(10)
    assert server.execute("GET", "n") == b"1"


def test_of_a_pipeline_the_request_that_is_named_is_the_last_that_happens(
    server: RedisServer, proxy: FaultProxy
) -> None:
    with connect(proxy.url_for(server.url)) as client, client.pipeline(transaction=False) as pipeline:
        proxy.on_request(b"second", "lose_answer")
        pipeline.set("first", 1).set("second", 1).set("third", 1)
        with pytest.raises(LOST):
            pipeline.execute()
    assert proxy.triggered.wait(10)
    assert [server.execute("EXISTS", key) for key in ("first", "second", "third")] == [1, 1, 0]


@pytest.mark.parametrize(("fault", "happened"), [("drop", 0), ("lose_answer", 1)])
def test_a_transaction_is_one_request(
    server: RedisServer, proxy: FaultProxy, fault: Fault, happened: int
) -> None:
    with connect(proxy.url_for(server.url)) as client, client.pipeline() as transaction:
        proxy.on_request(b"second", fault)
        transaction.set("first", 1).set("second", 1).set("third", 1)
        with pytest.raises(LOST):
            transaction.execute()
    assert proxy.triggered.wait(10)
    assert [server.execute("EXISTS", key) for key in ("first", "second", "third")] == [happened] * 3


def test_a_stalled_proxy_flows_on(server: RedisServer, proxy: FaultProxy) -> None:
    answers: list[object] = []
    with connect(proxy.url_for(server.url)) as client:
        client.ping()
        proxy.stall()
        asking = threading.Thread(target=lambda: answers.append(client.incr("n")))
        asking.start()
        assert answers == []
        assert server.execute("GET", "n") is None
        proxy.flow()
        asking.join()
    assert answers == [1]
