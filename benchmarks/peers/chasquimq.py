"""ChasquiMQ, whose workers are written in Rust and call Python handlers: 100 jobs at once, its default, without its events."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program, run_async


class Contestant(Program):
    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        from chasquimq import Queue

        self.queue: Any = Queue("bench", redis_url=self.url)

    async def close(self) -> None:
        await self.queue.close()

    async def enqueue(self, n: int) -> None:
        await self.queue.add("noop", {"n": n})

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            await self.queue.add_bulk([{"name": "noop", "data": {"n": n}} for n in numbers])

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        from chasquimq import Worker

        async def noop(job: Any) -> None:
            stopwatch.mark(job.data["n"])

        await Worker("bench", noop, redis_url=self.url, events_enabled=False, run_scheduler=False).run()
