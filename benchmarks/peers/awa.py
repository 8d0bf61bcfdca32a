"""Awa, whose workers are written in Rust and call Python handlers: queue storage, COPY ingestion, 512 jobs at once.

That many make it complete jobs in four batches side by side; claims are of 512 jobs already. What its documentation offers
beyond that for a hot queue (more claimers, partitioned queues) was slower, with one worker process on two cores.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program, run_async

WORKERS = 512


@dataclass
class Noop:
    n: int


class Contestant(Program):
    def __init__(self, url: str) -> None:
        import awa

        super().__init__(url)
        self.client: Any = awa.AsyncClient(url, max_connections=20)

    async def prepare(self) -> None:
        await self.client.migrate()
        await self.client.install_queue_storage()
        await self.client.close()

    async def open(self) -> None:
        await self.client.health_check()

    async def close(self) -> None:
        await self.client.close()

    async def enqueue(self, n: int) -> None:
        await self.client.insert(Noop(n), queue="bench")

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, CHUNK):
            jobs = [Noop(n) for n in range(start, min(start + CHUNK, count))]
            await self.client.enqueue_many_copy(jobs, queue="bench")

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        async def noop(job: Any) -> None:
            stopwatch.mark(job.args.n)

        self.client.task(Noop, queue="bench")(noop)
        await self.client.start([("bench", WORKERS)], poll_interval_ms=50)
        await asyncio.Event().wait()
