"""Stored jobs that no call could have stored: damaged, or written by another program.

One such job would stop every call that meets it. They are removed from the queue. Their bytes stay in the hash `damaged` beside
the queue's keys.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

from taskharbor.drivers.redis.records import record_from
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.drivers.validation import check_records
from taskharbor.jobs import Micros

log = logging.getLogger("taskharbor.redis")

UNLOADABLE = (ValueError, LookupError, TypeError, struct.error)
"""Errors of reading a stored job."""


async def set_aside(store: RedisStore, queue: str, now: Micros) -> list[str]:
    """Remove the jobs of a queue that cannot be loaded. Returns what was found."""
    keys = store.keys(queue)
    damaged = [
        (job_id, value)
        for family in ("waiting_job", "active_job", "finished_job")
        async for job_id, value in _pairs(store, keys[family])
        if not _is_whole(job_id, queue, value)
    ]
    named = [pair for family in ("waiting_key", "active_key") async for pair in _pairs(store, keys[family])]
    found: list[str] = []
    for job_id, value in damaged:
        own = [key for key, holder in named if holder == job_id]
        # The server looks again: a job that was moved meanwhile stays.
        _, is_removed = await store.ask("set_aside", queue, now, keys["damaged"], job_id, value, *own)
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
    except UNLOADABLE:
        return False
    return True


async def _pairs(store: RedisStore, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
    cursor: Any = 0
    while True:
        cursor, found = await store.command("HSCAN", key, cursor, "COUNT", 1000)
        for pair in zip(found[::2], found[1::2], strict=True):
            yield pair
        if int(cursor) == 0:
            return
