"""Stored jobs that no call could have stored: damaged, or written by another program.

One such job would stop every call that meets it. They are removed from the queue. Their bytes stay in the hash `damaged` beside
the queue's keys.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

from taskharbor.drivers.redis.library import LAYOUT
from taskharbor.drivers.redis.records import record_from
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.drivers.validation import check_records
from taskharbor.jobs import Micros

log = logging.getLogger("taskharbor.redis")

_LINES = ("waiting", "scheduled", "jobs", "done", "dead", "cancelled")


async def set_aside(store: RedisStore, queue: str, now: Micros) -> list[str]:
    """Remove the jobs of a queue that cannot be loaded, and names of jobs that are not stored. Returns what was found."""
    keys = store.keys(queue)
    damaged: dict[bytes, bytes] = {}
    stored: set[bytes] = set()
    for family in ("waiting_job", "active_job", "finished_job"):
        async for job_id, value in _scan(store, "HSCAN", keys[family]):
            stored.add(job_id)
            if not _is_whole(job_id, queue, value):
                damaged[job_id] = value
    members: dict[bytes, list[bytes]] = {}
    for family in (*_LINES, "ready", "active"):
        async for member, _ in _scan(store, "ZSCAN", keys[family]):
            job_id = _id_in(family, member)
            if job_id in damaged or job_id not in stored:
                members.setdefault(job_id, []).append(member)
    names: dict[bytes, list[bytes]] = {}
    for family in ("waiting_key", "active_key"):
        async for key, job_id in _scan(store, "HSCAN", keys[family]):
            names.setdefault(job_id, []).append(key)
    found: list[str] = []
    for job_id in dict.fromkeys([*damaged, *members]):
        value = damaged.get(job_id, b"")
        more = members.get(job_id, []), names.get(job_id, [])
        # The server looks again: a job that was stored or moved meanwhile stays.
        _, is_removed = await store.ask(
            "set_aside", queue, now, keys["damaged"], job_id, value, len(more[0]), *more[0], *more[1]
        )
        if is_removed:
            name = job_id[:200].decode(errors="backslashreplace")
            found.append(f"job {name!r} of queue {queue!r} could not be loaded: it was removed")
            log.error("%s; its bytes are in the hash %s", found[-1], keys["damaged"])
    return found


def _is_whole(job_id: bytes, queue: str, value: bytes) -> bool:
    try:
        record = record_from(job_id.decode(), queue, value, 0)
        record.payload = b""  # A copy of a dead job may be larger than a request.
        check_records([record])
    except (ValueError, LookupError, TypeError, struct.error):
        return False
    return True


def _id_in(family: str, member: bytes) -> bytes:
    if family == "active":
        return member.rpartition(b":")[0]
    if family == "ready":
        return member[2 + int.from_bytes(member[:2]) + LAYOUT["PLACE_SIZE"] :]
    return member


async def _scan(store: RedisStore, command: str, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
    cursor: Any = 0
    while True:
        cursor, found = await store.command(command, key, cursor, "COUNT", 1000)
        for pair in zip(found[::2], found[1::2], strict=True):
            yield pair
        if int(cursor) == 0:
            return
