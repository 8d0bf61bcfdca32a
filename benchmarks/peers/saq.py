"""saq with 50 jobs at once, which each block on a connection of their own; 100 would leave none of its pool for its sweep.

Results are not kept. It has no call for many jobs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program, run_async

CONCURRENCY = 50
AT_ONCE = 100
NO_RESULT = -1


async def noop(_context: dict[str, Any], *, n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from saq import Queue

        super().__init__(url)
        self.queue: Any = Queue.from_url(url, name="bench")

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        await self.queue.connect()

    async def close(self) -> None:
        await self.queue.disconnect()

    async def enqueue(self, n: int) -> None:
        await self.queue.enqueue("noop", n=n, ttl=NO_RESULT)

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(self.enqueue(n) for n in range(start, min(start + AT_ONCE, count))))

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        from saq import Worker

        await Worker(self.queue, functions=[noop], concurrency=CONCURRENCY).start()
