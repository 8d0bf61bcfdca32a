"""What a server says of itself when a store is opened, and whether jobs are safe with it."""

from __future__ import annotations

import logging
from typing import NamedTuple

from taskharbor.drivers.redis.options import Options
from taskharbor.errors import InvalidRequest

log = logging.getLogger("taskharbor.redis")

OLDEST = (7, 0)
HAS_WAITAOF = (7, 2)


class Facts(NamedTuple):
    version: tuple[int, int]
    is_cluster: bool
    maxmemory: int
    policy: str


def facts_of(info: bytes) -> Facts:
    """From the answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    return Facts(
        version=_version(said.get("redis_version", "0.0")),
        is_cluster=said.get("cluster_enabled") == "1" or said.get("redis_mode") == "cluster",
        maxmemory=int(said.get("maxmemory", "0")),
        policy=said.get("maxmemory_policy", "noeviction"),
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = (text.split(".") + ["0"])[:2]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def check(facts: Facts, options: Options, place: str) -> None:
    """Refuse a server that cannot keep jobs, or lacks what the URL asks for."""
    if facts.version < OLDEST:
        raise InvalidRequest(
            f"{place}: Redis {facts.version[0]}.{facts.version[1]} is too old: 7.0 or newer is needed"
        )
    if options.wait_aof is not None and facts.version < HAS_WAITAOF:
        raise InvalidRequest(
            f"{place}: wait_aof needs Redis 7.2, this is {facts.version[0]}.{facts.version[1]}: use wait_replicas"
        )
    # Policies that only touch keys with a time to live cannot hurt: ours have none.
    if not facts.policy.startswith("allkeys") or options.eviction == "accept":
        return
    if facts.maxmemory:
        raise InvalidRequest(
            f"{place}: the server throws away keys of its choice when its memory is full (maxmemory-policy "
            f"{facts.policy}), and with them whole queues: set maxmemory-policy noeviction, or write eviction=accept "
            "if losing jobs is all right"
        )
    log.warning(
        "%s: maxmemory-policy is %s; as soon as somebody sets maxmemory, queues may be thrown away: set noeviction",
        place,
        facts.policy,
    )
