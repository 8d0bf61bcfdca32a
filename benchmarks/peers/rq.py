"""RQ with its simple worker, which runs jobs in its own process instead of forking for each; no results, a thousand at a time."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program

NO_RESULT = 0


def noop(n: int) -> None:
    """On the module's level: workers find a function by its name."""
    stopwatch.mark(n)


NOOP = f"{__name__}.noop"


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from redis import Redis
        from rq import Queue

        super().__init__(url)
        self.connection: Any = Redis.from_url(url)
        self.queue: Any = Queue("bench", connection=self.connection)

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self.connection.close()

    async def enqueue(self, n: int) -> None:
        self.queue.enqueue(NOOP, n, result_ttl=NO_RESULT)

    async def enqueue_many(self, count: int) -> None:
        from rq import Queue

        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            self.queue.enqueue_many([Queue.prepare_data(NOOP, (n,), result_ttl=NO_RESULT) for n in numbers])

    def work(self, idle: bool) -> None:
        from rq import SimpleWorker

        logging.basicConfig(level=logging.CRITICAL)
        SimpleWorker([self.queue], connection=self.connection).work(logging_level="ERROR")
