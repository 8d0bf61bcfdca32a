"""What the tests of outages share: a server of their own, and a handle whose connections run through a fault proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
from psycopg import sql

from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Micros
from taskharbor.requests import new_ids
from taskharbor_testkit.servers import FaultProxy, PostgresAt, PostgresServer, with_fresh_schema

NOW: Micros = 1_800_000_000 * SECOND
LEASE: Micros = 60 * SECOND


def crash_proof_server() -> PostgresServer:
    """What it has answered survives any end of its processes. Nobody cuts the power here, so no disk is waited for."""
    return PostgresServer.start(settings={"synchronous_commit": "on"})


def records(count: int, *, queue: str = "q", now: Micros = NOW, **fields: Any) -> list[JobRecord]:
    return [
        JobRecord(id=job_id, type="t", queue=queue, run_at_us=now, created_at_us=now, **fields)
        for job_id in new_ids(count)
    ]


class Line:
    """A handle by way of a fault proxy, and one that goes straight to the server, to see what is true."""

    def __init__(self, near: PostgresDriver, far: PostgresDriver, proxy: FaultProxy) -> None:
        self.near = near
        self.far = far
        self.proxy = proxy

    async def store(self, count: int = 1, **fields: Any) -> list[str]:
        answers = await self.far.enqueue(records(count, **fields), now=NOW)
        return [one.id for one in answers]

    async def claim(self, limit: int = 1, *, now: Micros = NOW, worker: str = "w") -> list[JobRecord]:
        return await self.near.reserve("q", limit=limit, lease_for=LEASE, now=now, worker=worker)

    async def jobs(self, *job_ids: str) -> list[JobRecord]:
        return [job for job in await self.far.get(job_ids, now=NOW) if job is not None]

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.far.job_attempts(job_id)

    async def counts(self) -> dict[JobState, int]:
        """The states of queue `q` that have any jobs."""
        (stats,) = await self.far.stats(now=NOW, queue="q")
        return {state: count for state, count in stats.counts.items() if count}


@contextlib.asynccontextmanager
async def line(server: PostgresServer, options: str = "") -> AsyncIterator[Line]:
    url = with_fresh_schema(server.url)
    with FaultProxy.to(server.url) as proxy:
        near = PostgresDriver.from_url(proxy.url_for(url) + options)
        async with near, PostgresDriver.from_url(url) as far:
            # A call that fails on a connection nobody has used yet is not repeated: such a server is really gone.
            await near.time()
            yield Line(near, far, proxy)


@contextlib.contextmanager
def table_locked(driver: PostgresDriver, table: str, mode: str) -> Iterator[None]:
    """Whoever needs this table otherwise than the mode allows has to wait until the block ends."""
    name = sql.Identifier(driver.options.schema, table)
    with psycopg.connect(driver.options.conninfo) as other:
        other.execute(sql.SQL("LOCK TABLE {} IN {} MODE").format(name, sql.SQL(mode)))
        yield


def waiting_for_locks(server: PostgresAt) -> int:
    ((count,),) = server.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    return int(count)


@contextlib.contextmanager
def nothing_unhandled() -> Iterator[None]:
    """No callback and no forgotten task of the loop ends with an exception that nobody sees."""
    loop = asyncio.get_running_loop()
    troubles: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
    if troubles:
        raise AssertionError("; ".join(f"{one['message']}: {one.get('exception')!r}" for one in troubles))
