"""Chancy with the asyncio executor, 500 jobs at once and eager polling, which looks again as soon as a slot is free.

From 100 to 500 at once its speed is about the same. New jobs are announced by NOTIFY. No plugins, none are needed.
"""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program, run_async

CONCURRENCY = 500


async def noop(*, n: int) -> None:
    """On the module's level: workers find a function by its name."""
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from chancy import Chancy, job

        super().__init__(url)
        quiet = logging.getLogger("chancy")
        quiet.setLevel(logging.ERROR)
        self.app: Any = Chancy(url, log=quiet)
        self.job: Any = job(queue="bench")(noop).job

    async def prepare(self) -> None:
        from chancy import Chancy, Queue

        async with self.app:
            await self.app.migrate()
            await self.app.declare(
                Queue(
                    "bench",
                    executor=Chancy.Executor.Async,
                    concurrency=CONCURRENCY,
                    polling_interval=1,
                    eager_polling=True,
                )
            )

    async def open(self) -> None:
        await self.app.pool.open()

    async def close(self) -> None:
        await self.app.pool.close()

    async def enqueue(self, n: int) -> None:
        await self.app.push(self.job.with_kwargs(n=n))

    async def enqueue_many(self, count: int) -> None:
        async for _ in self.app.push_many([self.job.with_kwargs(n=n) for n in range(count)]):
            pass

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        from chancy import Worker

        async with self.app, Worker(self.app) as worker:
            await worker.wait_for_shutdown()
