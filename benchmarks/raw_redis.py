"""The least that leases and finishes a batch on Redis: a list, a sorted set of leases, two scripts, plain redis-py.

No priorities, no schedule, no limits, no history, no worker: what is left is the server, its client and the round trip.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

BATCH = 500
CHUNK = 1000
LEASE = 60

_LUA = Path(__file__).parent / "lua"
_WAITING = "q"
_LEASED = "lease"

Client = redis.Redis


def connect(url: str) -> Client:
    return redis.Redis.from_url(url)


def _load(client: Client, name: str) -> str:
    sha: Any = client.script_load(_script(name))
    return str(sha)


def _script(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text()


def insert(client: Client, count: int) -> float:
    """Jobs per second, one RPUSH for CHUNK of them, payloads encoded on the way."""
    began = time.perf_counter()
    for start in range(0, count, CHUNK):
        client.rpush(_WAITING, *(json.dumps({"n": n}) for n in range(start, min(start + CHUNK, count))))
    return count / (time.perf_counter() - began)


def drain(client: Client, handle: Callable[[Any], None] = lambda payload: None) -> float:
    """Jobs per second: lease a batch, read the payloads, delete the batch."""
    claim, delete = _load(client, "raw_claim"), _load(client, "raw_delete")
    finished = 0
    began = time.perf_counter()
    while payloads := _claim(client, claim):
        for payload in payloads:
            handle(json.loads(payload))
        client.evalsha(delete, 1, _LEASED, *payloads)
        finished += len(payloads)
    return finished / (time.perf_counter() - began)


def _claim(client: Client, claim: str) -> list[bytes]:
    payloads: Any = client.evalsha(claim, 2, _WAITING, _LEASED, str(BATCH), str(int(time.time()) + LEASE))
    return list(payloads)


def insert_one(client: Client, looks: int) -> float:
    """Median milliseconds of one RPUSH."""
    spent = []
    for n in range(looks):
        payload = json.dumps({"n": n})
        began = time.perf_counter()
        client.rpush(_WAITING, payload)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


async def insert_one_async(url: str, looks: int) -> float:
    """The same on an asyncio connection, whose event loop is part of the round trip."""
    spent = []
    async with redis.asyncio.Redis.from_url(url) as client:
        for n in range(looks):
            payload = json.dumps({"n": n})
            began = time.perf_counter()
            await client.rpush(_WAITING, payload)
            spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


def push(client: Client, n: int) -> None:
    client.rpush(_WAITING, json.dumps({"n": n}))


def serve(client: Client, handle: Callable[[Any], None], count: int) -> None:
    """The idle worker: blocks until there is a job, claims it, `count` in all, each deleted once it was handled."""
    claim, delete = _load(client, "raw_claim"), _load(client, "raw_delete")
    served = 0
    while served < count:
        payloads = _claim(client, claim)
        for payload in payloads:
            handle(json.loads(payload))
            served += 1
        if payloads:
            client.evalsha(delete, 1, _LEASED, *payloads)
        else:
            # Blocks until the list has a head, and puts that back where it was.
            client.blmove(_WAITING, _WAITING, 1, "LEFT", "LEFT")
