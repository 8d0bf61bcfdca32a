"""PgQueuer on asyncpg, fetching 500 jobs at a time (the default is 10); batches of 1000 and 2000 were no quicker for certain.

Ended jobs go from the queue to its log in batches as well.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from benchmarks.peers import stopwatch
from benchmarks.peers.program import CHUNK, Program, run_async

BATCH = 500


class Contestant(Program):
    connection: Any
    queries: Any

    async def prepare(self) -> None:
        await self.open()
        await self.queries.install()
        await self.close()

    async def open(self) -> None:
        import asyncpg
        from pgqueuer import Queries
        from pgqueuer.db import AsyncpgDriver

        self.connection = await asyncpg.connect(self.url)
        self.queries = Queries(AsyncpgDriver(self.connection))

    async def close(self) -> None:
        await self.connection.close()

    async def enqueue(self, n: int) -> None:
        await self.queries.enqueue("noop", _payload(n))

    async def enqueue_many(self, count: int) -> None:
        for start in range(0, count, CHUNK):
            payloads = [_payload(n) for n in range(start, min(start + CHUNK, count))]
            await self.queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))

    def work(self, idle: bool) -> None:
        run_async(self._work())

    async def _work(self) -> None:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgPoolDriver

        logging.getLogger("pgqueuer").setLevel(logging.ERROR)

        async def noop(job: Any) -> None:
            stopwatch.mark(json.loads(job.payload)["n"])

        async with asyncpg.create_pool(self.url, min_size=2, max_size=10) as pool:
            queue = PgQueuer(AsyncpgPoolDriver(pool))
            queue.entrypoint("noop")(noop)
            await queue.run(batch_size=BATCH)


def _payload(n: int) -> bytes:
    return json.dumps({"n": n}).encode()
