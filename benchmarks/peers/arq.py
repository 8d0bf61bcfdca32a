"""arq with 100 jobs at once and a look at the queue every 10 ms instead of every half second. It has no call for many jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program, run_async

AT_ONCE = 100


async def noop(_context: dict[str, Any], n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        from arq import create_pool

        self.pool: Any = await create_pool(self._settings())

    async def close(self) -> None:
        await self.pool.aclose()

    async def enqueue(self, n: int) -> None:
        await self.pool.enqueue_job("noop", n)

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(self.enqueue(n) for n in range(start, min(start + AT_ONCE, count))))

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        from arq import Worker

        worker = Worker(
            [noop],
            redis_settings=self._settings(),
            max_jobs=AT_ONCE,
            poll_delay=0.01,
            keep_result=0,
            health_check_interval=3600,
        )
        await worker.async_run()

    def _settings(self) -> Any:
        from arq.connections import RedisSettings

        return RedisSettings.from_dsn(self.url)
