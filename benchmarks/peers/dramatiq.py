"""dramatiq with 8 threads in one process, which is its command's default. It has no call for many messages."""

from __future__ import annotations

import threading
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program

THREADS = 8


def noop(n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        super().__init__(url)
        self.broker: Any = RedisBroker(url=url)
        dramatiq.set_broker(self.broker)
        self.noop: Any = dramatiq.actor(actor_name="noop")(noop)

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self.broker.close()

    async def enqueue(self, n: int) -> None:
        self.noop.send(n)

    async def enqueue_many(self, count: int) -> None:
        for n in range(count):
            self.noop.send(n)

    def work(self, idle: bool) -> None:
        from dramatiq import Worker

        Worker(self.broker, worker_threads=THREADS).start()
        threading.Event().wait()
