"""Batches that lock the same jobs in different orders: nobody waits for PostgreSQL to find out that two wait for each other.

It would look only after a second, and undo one of the two calls: right in the end, but as long as half a lease may last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql

from drivers.postgres.outage_stage import (
    LEASE,
    NOW,
    Line,
    crash_proof_server,
    line,
    records,
    waiting_for_locks,
)
from taskharbor.drivers.contract import Ack, Extension, Failure, Release, Retry, Settlement
from taskharbor.errors import JobNotInflight
from taskharbor.jobs import JobRecord, JobState, Lease
from taskharbor_testkit.servers import PostgresServer
from worker.stage import eventually, finish

KINDS: dict[str, Callable[[JobRecord], Settlement]] = {
    "ack": lambda job: Ack(job.id, job.token or ""),
    "ack with a result": lambda job: Ack(job.id, job.token or "", b"1"),
    "retry": lambda job: Retry(job.id, job.token or "", NOW, 1, Failure("E", "no")),
    "release": lambda job: Release(job.id, job.token or ""),
}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with crash_proof_server() as server:
        yield server


KEYED = ("a", "b", "c")


async def three_running(here: Line, keys: Sequence[str | None] = KEYED) -> list[JobRecord]:
    for key in keys:
        await here.store(key=key)
    jobs = await here.claim(3)
    assert len(jobs) == 3
    return jobs


async def meet(
    server: PostgresServer,
    here: Line,
    stop: JobRecord,
    first: Callable[[], Awaitable[Any]],
    second: Callable[[], Awaitable[Any]],
) -> tuple[Any, Any]:
    """The answers of two calls, of which the first is held up at a job until the second has come to meet it."""
    deadlocks = server.log.read_text().count("deadlock detected")
    table = sql.Identifier(here.far.options.schema, "jobs")
    with psycopg.connect(here.far.options.conninfo) as other:
        other.execute(sql.SQL("SELECT FROM {} WHERE id = %s FOR UPDATE").format(table), [stop.id])
        one = asyncio.ensure_future(first())
        await eventually(lambda: waiting_for_locks(server) == 1)
        two = asyncio.ensure_future(second())
        # One that does not wait for locks asks again until the first is over.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await eventually(lambda: two.done() or waiting_for_locks(server) == 2)
    answers = await finish(one), await finish(two)
    assert server.log.read_text().count("deadlock detected") == deadlocks
    return answers


@pytest.mark.parametrize("keys", [KEYED, (None, None, None), ("a", None, None), (None, "b", "c")])
@pytest.mark.parametrize("kind", list(KINDS))
async def test_settlements_and_heartbeats(
    server: PostgresServer, kind: str, keys: Sequence[str | None]
) -> None:
    async with line(server) as here:
        a, b, c = await three_running(here, keys)
        ends = [KINDS[kind](job) for job in (b, c, a)]
        beats = [Extension(job.id, job.token or "") for job in (a, b)]
        settled, leases = await meet(
            server,
            here,
            c,
            lambda: here.near.settle(ends, now=NOW),
            lambda: here.near.extend_lease(beats, lease_for=LEASE, now=NOW + 1),
        )
        assert settled == [None] * 3
        # Whichever came first, job by job: a heartbeat that held, or one of what had ended.
        assert all(isinstance(lease, (Lease, JobNotInflight)) for lease in leases)


@pytest.mark.parametrize("kind", list(KINDS))
async def test_settlements_and_enqueues_onto_their_keys(server: PostgresServer, kind: str) -> None:
    async with line(server) as here:
        a, b, c = await three_running(here)
        ends = [KINDS[kind](job) for job in (b, c, a)]
        more = [*records(1, key="a"), *records(1, key="b")]
        settled, answers = await meet(
            server,
            here,
            c,
            lambda: here.near.settle(ends, now=NOW),
            lambda: here.far.enqueue(more, now=NOW),
        )
        assert settled == [None] * 3
        assert len(answers) == 2


async def test_enqueues_onto_keys_and_heartbeats(server: PostgresServer) -> None:
    async with line(server) as here:
        a, b, c = await three_running(here)
        more = [record for key in "bca" for record in records(1, key=key)]
        beats = [Extension(job.id, job.token or "") for job in (a, b)]
        answers, leases = await meet(
            server,
            here,
            c,
            lambda: here.far.enqueue(more, now=NOW),
            lambda: here.near.extend_lease(beats, lease_for=LEASE, now=NOW + 1),
        )
        assert [one.existed for one in answers] == [False] * 3
        assert all(isinstance(lease, Lease) for lease in leases)


@pytest.mark.parametrize("keys", [KEYED, (None, None, None), ("a", None, None)])
async def test_cancels_and_heartbeats(server: PostgresServer, keys: Sequence[str | None]) -> None:
    async with line(server) as here:
        a, b, c = await three_running(here, keys)
        beats = [Extension(job.id, job.token or "") for job in (a, b)]
        states, leases = await meet(
            server,
            here,
            c,
            lambda: here.far.cancel([b.id, c.id, a.id], now=NOW),
            lambda: here.near.extend_lease(beats, lease_for=LEASE, now=NOW + 1),
        )
        assert states == [JobState.INFLIGHT] * 3
        assert all(isinstance(lease, Lease) for lease in leases)
