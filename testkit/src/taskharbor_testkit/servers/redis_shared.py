"""One Redis for all tests of a process, started by the first that asks; tests that share it are kept apart by a prefix each."""

from __future__ import annotations

import os
import secrets
import threading
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from taskharbor_testkit.servers.redis import RedisServer
from taskharbor_testkit.servers.redis_address import RedisAt
from taskharbor_testkit.servers.redis_binaries import find_redis
from taskharbor_testkit.servers.redis_cluster import RedisCluster

TEST_REDIS = "TASKHARBOR_TEST_REDIS"

_servers: dict[str, RedisServer] = {}
_clusters: dict[str, RedisCluster] = {}
_lock = threading.Lock()


def shared_redis(version: str = "newest") -> RedisServer:
    """This process's server of that version. Ended at exit; do not stop it or flush it, others are on it."""
    found, _ = find_redis(version)
    with _lock:
        if found not in _servers:
            _servers[found] = RedisServer.start(version=found)
        return _servers[found]


def shared_redis_cluster(version: str = "newest") -> RedisCluster:
    """Likewise, three nodes."""
    found, _ = find_redis(version)
    with _lock:
        if found not in _clusters:
            _clusters[found] = RedisCluster.start(version=found)
        return _clusters[found]


def given_or_shared_redis() -> RedisAt:
    """The server that TASKHARBOR_TEST_REDIS names, or else the shared one."""
    given = os.environ.get(TEST_REDIS)
    return RedisAt(given) if given else shared_redis()


def with_fresh_prefix(url: str) -> str:
    """The URL with a `prefix` option that nobody has used; `drop_prefix(url)` removes what was stored under it."""
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if name != "prefix"]
    return urlunsplit(parts._replace(query=urlencode([*options, ("prefix", f"th_{secrets.token_hex(6)}:")])))


def drop_prefix(url: str) -> None:
    """Remove every key that begins with the URL's prefix, on every node that the URL names."""
    from redis import Redis

    parts = urlsplit(url)
    prefix = dict(parse_qsl(parts.query))["prefix"]
    user, at, hosts = parts.netloc.rpartition("@")
    database = "" if "cluster" in parts.scheme else parts.path
    for host in hosts.split(","):
        node = urlunsplit(("redis", f"{user}{at}{host}", database, "", ""))
        with Redis.from_url(node) as client, client.pipeline(transaction=False) as removal:
            for key in client.scan_iter(match=f"{prefix}*", count=1000):
                removal.unlink(key)
            removal.execute()
