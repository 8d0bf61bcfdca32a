"""procrastinate with jobs deleted as they end and 20 of them at once, on a pool as large: 50 were slower, 10 about the same.

It fetches one job per round trip and ends each with another; there is no setting for batches.
"""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program, run_async

CONCURRENCY = 20


async def _noop(n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        import procrastinate

        super().__init__(url)
        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        connector = procrastinate.PsycopgConnector(conninfo=url, max_size=CONCURRENCY)
        self.app: Any = procrastinate.App(connector=connector)
        self.noop: Any = self.app.task(name="noop", queue="bench")(_noop)

    async def prepare(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self.app.open_async()

    async def close(self) -> None:
        await self.app.close_async()

    async def enqueue(self, n: int) -> None:
        await self.noop.defer_async(n=n)

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            await self.noop.batch_defer_async(*({"n": n} for n in numbers))

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        async with self.app.open_async():
            await self.app.run_worker_async(
                queues=["bench"], concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False
            )
