"""The raw limit of the backend, as one more contender: COPY in, lease 500, delete 500, LISTEN for what comes alone."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import Program


class Contestant(Program):
    async def prepare(self) -> None:
        from benchmarks import raw_postgres

        with raw_postgres.connect(self.url) as connection:
            raw_postgres.create(connection)

    async def open(self) -> None:
        from benchmarks import raw_postgres

        self.connection = raw_postgres.connect(self.url)

    async def close(self) -> None:
        self.connection.close()

    async def enqueue(self, n: int) -> None:
        from benchmarks import raw_postgres

        raw_postgres.insert_and_notify(self.connection, n)

    async def enqueue_many(self, count: int) -> None:
        from benchmarks import raw_postgres

        raw_postgres.insert(self.connection, count)

    def work(self, idle: bool) -> None:
        from benchmarks import raw_postgres

        def handle(payload: Any) -> None:
            stopwatch.mark(payload["n"])

        with raw_postgres.connect(self.url) as connection:
            if idle:
                raw_postgres.serve(connection, handle, sys.maxsize)
            else:
                raw_postgres.drain(connection, handle)
