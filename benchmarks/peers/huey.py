"""huey with 4 threads, no results, and looks at the queue 10 to 20 ms apart when it is empty.

A task is taken out of Redis before it runs, so there is nothing to acknowledge, and a crash loses it. It has no call for
many tasks.
"""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program

THREADS = 4


def noop(n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from huey import RedisHuey

        super().__init__(url)
        self.huey: Any = RedisHuey("bench", url=url, results=False)
        self.noop: Any = self.huey.task(name="noop")(noop)

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def enqueue(self, n: int) -> None:
        self.noop(n)

    async def enqueue_many(self, count: int) -> None:
        for n in range(count):
            self.noop(n)

    def work(self, idle: bool) -> None:
        logging.basicConfig(level=logging.CRITICAL)
        consumer = self.huey.create_consumer(
            workers=THREADS,
            worker_type="thread",
            periodic=False,
            check_worker_health=False,
            initial_delay=0.01,
            max_delay=0.02,
        )
        consumer.run()
