"""The least that leases and finishes a batch on SQLite: one table, two statements, the same durability as ours.

No priorities, no schedule, no limits, no history, no worker: what is left is the database.
"""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

BATCH = 500


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute("pragma journal_mode=wal")
    connection.execute(f"pragma synchronous={synchronous}")
    return connection


def create(connection: sqlite3.Connection) -> None:
    connection.execute(
        "create table q (id integer primary key, payload text not null, attempt int not null default 0, owner int, lease real)"
    )
    connection.execute("create index waiting on q (id) where lease is null")


def insert(connection: sqlite3.Connection, count: int) -> float:
    """Jobs per second, in one transaction, payloads encoded on the way."""
    began = time.perf_counter()
    connection.execute("begin immediate")
    connection.executemany(
        "insert into q (payload) values (?)", ((json.dumps({"n": n}),) for n in range(count))
    )
    connection.execute("commit")
    return count / (time.perf_counter() - began)


def drain(connection: sqlite3.Connection) -> float:
    """Jobs per second: lease a batch, read the payloads, delete the batch."""
    claim = (
        "update q set lease=?, owner=1, attempt=attempt+1 where id in "
        "(select id from q where lease is null order by id limit ?) returning id, payload"
    )
    finished = 0
    began = time.perf_counter()
    while rows := connection.execute(claim, (time.time() + 60, BATCH)).fetchall():
        for _, payload in rows:
            json.loads(payload)
        done = json.dumps([row[0] for row in rows])
        connection.execute("delete from q where owner=1 and id in (select value from json_each(?))", (done,))
        finished += len(rows)
    return finished / (time.perf_counter() - began)
