"""The least that leases and finishes a batch on PostgreSQL: one table, two statements, plain psycopg, a commit for each.

No priorities, no schedule, no limits, no history, no worker: what is left is the database, its driver and the round trip.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg

BATCH = 500

_CLAIM = (
    "update q set lease = now() + interval '60 s', attempt = attempt + 1, owner = %s where id = any(array("
    "select id from q where lease is null order by id limit %s for update skip locked)) returning id, payload"
)
_INSERT = "with i as (insert into q (payload) values (%s) returning 1) select pg_notify('q', '') from i"
_DELETE = "delete from q where id = any(%s) and owner = %s"
_OWNER = os.getpid()

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(url: str) -> Connection:
    return psycopg.connect(url, autocommit=True)


def create(connection: Connection) -> None:
    connection.execute(
        "create table q (id bigint generated always as identity primary key, payload jsonb not null, "
        "attempt int not null default 0, owner int, lease timestamptz)"
    )
    connection.execute("create index waiting on q (id) where lease is null")


def insert(connection: Connection, count: int) -> float:
    """Jobs per second, by one COPY, payloads encoded on the way."""
    began = time.perf_counter()
    with connection.cursor().copy("copy q (payload) from stdin") as copy:
        for n in range(count):
            copy.write_row((json.dumps({"n": n}),))
    return count / (time.perf_counter() - began)


def drain(connection: Connection, handle: Callable[[Any], None] = lambda payload: None) -> float:
    """Jobs per second: lease a batch, read the payloads, delete the batch."""
    finished = 0
    began = time.perf_counter()
    while rows := _claim(connection):
        for _, payload in rows:
            handle(payload)
        _delete(connection, rows)
        finished += len(rows)
    return finished / (time.perf_counter() - began)


def _claim(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute(_CLAIM, (_OWNER, BATCH)).fetchall()


def _delete(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    connection.execute(_DELETE, ([row[0] for row in rows], _OWNER))


def insert_one(connection: Connection, looks: int) -> float:
    """Median milliseconds of one INSERT that notifies, and its commit."""
    spent = []
    for n in range(looks):
        payload = json.dumps({"n": n})
        began = time.perf_counter()
        connection.execute(_INSERT, (payload,))
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


async def insert_one_async(url: str, looks: int) -> float:
    """The same on an asyncio connection: what an event loop adds to the round trip."""
    spent = []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for n in range(looks):
            payload = json.dumps({"n": n})
            began = time.perf_counter()
            await connection.execute(_INSERT, (payload,))
            spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


def insert_and_notify(connection: Connection, n: int) -> None:
    connection.execute(_INSERT, (json.dumps({"n": n}),))


def serve(connection: Connection, handle: Callable[[Any], None], count: int) -> None:
    """The idle worker: claims at every notification, `count` jobs in all, each deleted once it was handled."""
    connection.execute("listen q")
    served = 0
    while served < count:
        rows = _claim(connection)
        for _, payload in rows:
            handle(payload)
            served += 1
        if rows:
            _delete(connection, rows)
        else:
            for _ in connection.notifies(timeout=1, stop_after=1):
                pass
