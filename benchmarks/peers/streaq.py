"""streaq with 256 tasks at once, tasks enqueued a thousand at a time, no results kept."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program

CONCURRENCY = 256


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from streaq import Worker

        super().__init__(url)
        self.worker: Any = Worker(redis_url=url, concurrency=CONCURRENCY, anyio_kwargs={"use_uvloop": True})

        async def noop(n: int) -> None:
            stopwatch.mark(n)

        self.noop: Any = self.worker.task(name="noop", ttl=0)(noop)

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        await self.worker.__aenter__()

    async def close(self) -> None:
        await self.worker.__aexit__(None, None, None)

    async def enqueue(self, n: int) -> None:
        await self.noop.enqueue(n)

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, CHUNK):
            tasks = [self.noop.enqueue(n) for n in range(start, min(start + CHUNK, count))]
            await self.worker.enqueue_many(tasks)

    def work(self, idle: bool) -> None:
        self.worker.run_sync()
