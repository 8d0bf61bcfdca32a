"""taskiq with its stream broker, the one that acknowledges, and 100 tasks at once. It has no call for many tasks."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program, run_async

AT_ONCE = 100


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from taskiq_redis import RedisStreamBroker

        super().__init__(url)
        # The group reads from the beginning: what was enqueued before the worker came is its work too.
        self.broker: Any = RedisStreamBroker(url, queue_name="bench", consumer_id="0")

        async def noop(n: int) -> None:
            stopwatch.mark(n)

        self.noop: Any = self.broker.task(task_name="noop")(noop)

    async def prepare(self) -> None:
        await self.open()
        await self.close()

    async def open(self) -> None:
        await self.broker.startup()

    async def close(self) -> None:
        await self.broker.shutdown()

    async def enqueue(self, n: int) -> None:
        await self.noop.kiq(n)

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(self.enqueue(n) for n in range(start, min(start + AT_ONCE, count))))

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        from taskiq.api import run_receiver_task

        self.broker.is_worker_process = True
        await run_receiver_task(self.broker, max_async_tasks=AT_ONCE, run_startup=True)
