"""Eight who work at once on one PostgreSQL store, and two who begin early and commit late."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql

from taskharbor.drivers.contract import Ack, Driver, Retry, Settlement
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Failure, JobRecord, Micros

_BATCH = 50


def _now() -> Micros:
    return time.time_ns() // 1000


class Committers:
    """Work in stages: each goes on for its share of a stage once it is let, so that readers can be started in between."""

    def __init__(self, url: str, *, jobs: int, workers: int, stages: int, seed: int) -> None:
        self.url = url
        self.late: list[int] = []
        """Rows of the log that were committed late."""
        each = jobs // workers
        self._shares = [each * (n + 1) // stages - each * n // stages for n in range(stages)]
        self._gates = [threading.Semaphore(0) for _ in range(workers)]
        self._bell = threading.Semaphore(0)
        self._batches: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._work, n, random.Random(seed + n)))
            for n in range(workers)
        ]
        self._dawdler = threading.Thread(target=self._guarded, args=(self._dawdle,))
        self._sleeper = threading.Thread(target=self._guarded, args=(self._oversleep,))

    @property
    def stages(self) -> int:
        return len(self._shares)

    def start(self) -> None:
        for thread in (*self._threads, self._dawdler, self._sleeper):
            thread.start()

    def let(self) -> None:
        """Let everybody do the next stage."""
        for gate in (*self._gates, self._bell):
            gate.release()

    def finish(self) -> None:
        """Wait until all is done. Raises what went wrong."""
        for thread in self._threads:
            thread.join()
        self._batches.put(False)
        self._dawdler.join()
        self._sleeper.join()
        if self._errors:
            raise self._errors[0]

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def _work(self, number: int, dice: random.Random) -> None:
        asyncio.run(self._working(number, dice))

    async def _working(self, number: int, dice: random.Random) -> None:
        async with connect(self.url) as driver:
            for stage, share in enumerate(self._shares):
                self._gates[number].acquire()
                for first in range(0, share, _BATCH):
                    count = min(_BATCH, share - first)
                    await _enqueue(driver, f"{number}-{stage}-{first}", count)
                    await _settle(driver, dice, f"worker {number}")
                    self._batches.put(True)
            # What others enqueued after their last look, and what was to be tried again.
            while await _settle(driver, dice, f"worker {number}"):
                self._batches.put(True)

    def _dawdle(self) -> None:
        """Write a row, let several others commit theirs, and only then commit: again and again, until the others are done."""
        with self._connected() as connection:
            while self._batches.get():
                self._log_one(connection)
                goes_on = all(self._batches.get() for _ in range(8))
                connection.commit()
                if not goes_on:
                    return

    def _oversleep(self) -> None:
        """Write a row when a stage begins, and commit it when the next one does: a reader comes by in between."""
        with self._connected() as connection:
            self._bell.acquire()
            for _ in self._shares[1:]:
                self._bell.acquire()
                connection.commit()
                self._log_one(connection)
            connection.commit()

    def _connected(self) -> psycopg.Connection[Any]:
        options = parse_url(self.url)
        connection = psycopg.connect(options.conninfo)
        connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(options.schema)))
        connection.commit()
        return connection

    def _log_one(self, connection: psycopg.Connection[Any]) -> None:
        found = connection.execute(
            "INSERT INTO attempts (fence, created_at, run_at, ended_at, queue_id, payload_size, rank, outcome, state, "
            "job_id, type) SELECT 1, 1, 1, %s, id, 0, 0, 0, 4, 'late', 't' FROM queues LIMIT 1 RETURNING seq",
            [_now()],
        ).fetchall()
        self.late += [seq for (seq,) in found]


async def _enqueue(driver: Driver, name: str, count: int) -> None:
    now = _now()
    records = [
        JobRecord(id=f"{name}-{n}", type="t", queue="busy", run_at_us=now, created_at_us=now)
        for n in range(count)
    ]
    await driver.enqueue(records, now=now)


async def _settle(driver: Driver, dice: random.Random, worker: str) -> int:
    held = await driver.reserve("busy", limit=_BATCH + 10, lease_for=600 * SECOND, now=_now(), worker=worker)
    now = _now()
    ends: list[Settlement] = [
        Retry(job.id, job.token or "", now, 1, Failure("OSError", "again"))
        if job.fence == 1 and dice.random() < 0.1
        else Ack(job.id, job.token or "")
        for job in held
    ]
    answers = await driver.settle(ends, now=now)
    assert answers == [None] * len(held)
    return len(held)
