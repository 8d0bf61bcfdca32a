"""TaskHarbor as it comes: one worker process with its default settings, every job kept as done and logged."""

from __future__ import annotations

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from taskharbor import Harbor

        super().__init__(url)
        self.harbor = Harbor(url)

        @self.harbor.job
        async def noop(n: int) -> None:
            stopwatch.mark(n)

        self.noop = noop

    async def prepare(self) -> None:
        await self.open()
        await self.close()

    async def open(self) -> None:
        await self.harbor.async_client().open()

    async def close(self) -> None:
        await self.harbor.close_async()

    async def enqueue(self, n: int) -> None:
        await self.noop.enqueue_async(n)

    async def enqueue_many(self, count: int) -> None:
        await self.noop.enqueue_many_async([(n,) for n in range(count)])

    def work(self, idle: bool) -> None:
        self.harbor.worker().run()
