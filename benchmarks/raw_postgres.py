"""The least that leases and finishes a batch on PostgreSQL: one table, two statements, plain psycopg, a commit for each.

No priorities, no schedule, no limits, no history, no worker: what is left is the database, its driver and the round trip.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg

BATCH = 500
CHUNK = 1000

_CLAIM = (
    "update q set lease = now() + interval '60 s', owner = 1, attempt = attempt + 1 where id = any(array("
    "select id from q where lease is null order by id limit %s for update skip locked)) returning id, payload"
)
_INSERT = "insert into q (payload) values (%s)"
_INSERT_AND_TELL = (
    "with i as (insert into q (payload) values (%s) returning 1) select pg_notify('q', '') from i"
)
_DELETE = "delete from q where id = any(%s) and owner = 1"

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(url: str) -> Connection:
    return psycopg.connect(url, autocommit=True)


def create(connection: Connection) -> None:
    connection.execute(
        "create table q (id bigint generated always as identity primary key, payload text not null, "
        "attempt int not null default 0, owner int, lease timestamptz)"
    )
    connection.execute("create index waiting on q (id) where lease is null")


def insert(connection: Connection, count: int) -> float:
    """Jobs per second, by COPY in transactions of CHUNK rows, payloads encoded on the way."""
    began = time.perf_counter()
    for start in range(0, count, CHUNK):
        with connection.cursor().copy("copy q (payload) from stdin") as copy:
            for n in range(start, min(start + CHUNK, count)):
                copy.write_row((json.dumps({"n": n}),))
    return count / (time.perf_counter() - began)


def drain(connection: Connection, handle: Callable[[Any], None] = lambda payload: None) -> float:
    """Jobs per second: lease a batch, read the payloads, delete the batch."""
    finished = 0
    began = time.perf_counter()
    while rows := connection.execute(_CLAIM, (BATCH,), prepare=True).fetchall():
        for _, payload in rows:
            handle(json.loads(payload))
        connection.execute(_DELETE, ([row[0] for row in rows],), prepare=True)
        finished += len(rows)
    return finished / (time.perf_counter() - began)


def insert_one(connection: Connection, looks: int) -> float:
    """Median milliseconds of one bare INSERT and its commit."""
    spent = []
    for n in range(looks):
        payload = json.dumps({"n": n})
        began = time.perf_counter()
        connection.execute(_INSERT, (payload,), prepare=True)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


async def insert_one_async(url: str, looks: int) -> float:
    """The same on an asyncio connection: what an event loop adds to the round trip."""
    spent = []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for n in range(looks):
            payload = json.dumps({"n": n})
            began = time.perf_counter()
            await connection.execute(_INSERT, (payload,), prepare=True)
            spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


def insert_and_tell(connection: Connection, n: int) -> None:
    connection.execute(_INSERT_AND_TELL, (json.dumps({"n": n}),), prepare=True)


def serve(connection: Connection, handle: Callable[[Any], None], count: int) -> None:
    """The idle worker: one job claimed at every notification, `count` in all, each deleted once it was handled."""
    connection.execute("listen q")
    served = 0
    while served < count:
        rows = connection.execute(_CLAIM, (1,), prepare=True).fetchall()
        for _, payload in rows:
            handle(json.loads(payload))
            served += 1
        if rows:
            connection.execute(_DELETE, ([row[0] for row in rows],), prepare=True)
        else:
            for _ in connection.notifies(timeout=1, stop_after=1):
                pass
