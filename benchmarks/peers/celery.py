"""Celery with late acknowledgement, without which a crash loses tasks; results ignored, a prefetch of 64 for the drain.

The solo pool runs tasks in the worker's own process. It has no call for many tasks: one producer is kept open.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program

PREFETCH = 64


def noop(n: int) -> None:
    stopwatch.mark(n)


class Contestant(Program):
    def __init__(self, url: str) -> None:
        from celery import Celery

        super().__init__(url)
        self.app: Any = Celery("bench", broker=url)
        self.app.conf.update(
            task_acks_late=True,
            task_ignore_result=True,
            broker_connection_retry_on_startup=True,
            worker_hijack_root_logger=False,
            worker_redirect_stdouts=False,
            worker_send_task_events=False,
        )
        self.noop: Any = self.app.task(name="noop")(noop)

    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        self.producer: Any = self.app.amqp.producer_pool.acquire(block=True)

    async def close(self) -> None:
        self.producer.release()

    async def enqueue(self, n: int) -> None:
        self.noop.apply_async((n,), producer=self.producer)

    async def enqueue_many(self, count: int) -> None:
        for n in range(count):
            self.noop.apply_async((n,), producer=self.producer)

    def work(self, idle: bool) -> None:
        self.app.conf.worker_prefetch_multiplier = 4 if idle else PREFETCH
        quiet = ["--loglevel", "ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        self.app.worker_main(["worker", "--pool", "solo", *quiet])
