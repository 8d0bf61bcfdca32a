"""The raw limit of the backend, as one more contender: RPUSH in, lease 500, delete 500, a blocking move for what comes alone."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program


class Contestant(Program):
    async def prepare(self) -> None:
        pass

    async def open(self) -> None:
        from benchmarks import raw_redis

        self.client = raw_redis.connect(self.url)

    async def close(self) -> None:
        self.client.close()

    async def enqueue(self, n: int) -> None:
        from benchmarks import raw_redis

        raw_redis.push(self.client, n)

    async def enqueue_many(self, count: int) -> None:
        from benchmarks import raw_redis

        raw_redis.insert(self.client, count)

    def work(self, idle: bool) -> None:
        from benchmarks import raw_redis

        def handle(payload: Any) -> None:
            stopwatch.mark(payload["n"])

        with raw_redis.connect(self.url) as client:
            if idle:
                raw_redis.serve(client, handle, sys.maxsize)
            else:
                raw_redis.drain(client, handle)
