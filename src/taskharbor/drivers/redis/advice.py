"""The servers' own settings that decide whether jobs stay: persistence and eviction. For `taskharbor doctor`."""

from __future__ import annotations

from typing import TypeAlias

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import Server
from taskharbor.drivers.redis.library import RedisCall
from taskharbor.drivers.redis.store import RedisStore, server_info

Finding: TypeAlias = tuple[str, str, str]
"""Advice, which is empty if all is well; name of the check; what was found."""


async def findings(store: RedisStore) -> list[Finding]:
    """Return the findings about every server of an open store that takes changes."""
    return [
        (advice, name, f"{server.address}: {found}")
        for server in store.servers()
        for advice, name, found in await _examined(server)
    ]


async def _examined(server: Server) -> tuple[Finding, Finding]:
    info = await server_info(server, str(server.address))
    try:
        (pairs,) = await server.call([RedisCall("CONFIG", (), ("GET", "save", "appendfsync"))])
    except ResponseError:
        # Managed servers and users with few rights have no CONFIG.
        pairs = []
    config = {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
    kept = _persistence(info.get("aof_enabled"), config.get("appendfsync"), config.get("save"))
    return kept, _eviction(info.get("maxmemory_policy"), info.get("maxmemory", "0"))


def _persistence(aof: str | None, fsync: str | None, save: str | None) -> Finding:
    advice = "set appendonly yes on the server"
    if aof == "1" and fsync is None:
        found = "append-only file; could not tell its appendfsync, because CONFIG is refused"
        advice = "make sure that appendfsync is everysec or always"
    elif aof == "1":
        found, advice = f"append-only file, appendfsync {fsync}", ""
        if fsync == "no":
            lost = "all that the operating system has yet to write, often half a minute"
            found += f": a power loss takes {lost}"
            advice = "set appendfsync everysec on the server"
    elif aof is None or save is None:
        found = "could not tell if the server writes to disk: it refuses CONFIG or hides values of INFO"
        advice = "make sure that it does: appendonly yes"
    elif save:
        found = f"snapshots only (save {save}): a crash of the server takes all changes since the last one"
    else:
        found = "no append-only file and no snapshots: every job dies with the server's process"
    return advice, "persistence", found


def _eviction(policy: str | None, maxmemory: str) -> Finding:
    advice = "set maxmemory-policy noeviction on the server"
    if policy is None:
        found = "could not tell the maxmemory-policy: INFO hides it"
        advice = "make sure that it is noeviction"
    elif policy == "noeviction":
        found, advice = "maxmemory-policy noeviction", ""
    else:
        lost = "whole queues" if policy.startswith("allkeys") else "staged jobs of bulk writes"
        when = "is" if maxmemory != "0" else "gets a limit (maxmemory) and is"
        found = f"maxmemory-policy {policy}: the server deletes {lost} when its memory {when} full"
    return advice, "eviction", found
