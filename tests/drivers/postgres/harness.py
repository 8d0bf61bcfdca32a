"""Helpers of the PostgreSQL driver's tests: records, short calls, a look behind the driver's back, and lines that break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import psycopg
from psycopg import sql

from records import NOW, make_record, present
from taskharbor.bulk.stage import wall_clock
from taskharbor.drivers.contract import DAY, Ack, Driver, Enqueued
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.options import NOTIFYING, PostgresOptions
from taskharbor.drivers.postgres.rows import load, rule_values
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.servers import FaultProxy, PostgresServer
from taskharbor_testkit.waits import waits_of

__all__ = ["DAY", "NOW", "SECOND", "make_record", "present"]

LEASE: Micros = 60 * SECOND
Heard = Callable[[], list[str]]


def make_records(count: int, **fields: Any) -> list[JobRecord]:
    return [make_record(**fields) for _ in range(count)]


def held(job: JobRecord) -> tuple[str, str]:
    """The first two fields of a settlement or heartbeat."""
    return job.id, present(job.token)


def ids(jobs: Iterable[JobRecord | Enqueued]) -> list[str]:
    return [job.id for job in jobs]


async def claim(driver: Driver, limit: int = 1, *, lease: int = LEASE, **options: Any) -> list[JobRecord]:
    how: dict[str, Any] = {"queue": "q", "now": NOW, "worker": "w"} | options
    return await driver.reserve(limit=limit, lease_for=lease, **how)


async def ack(driver: Driver, jobs: Sequence[JobRecord], now: Micros = NOW) -> None:
    assert await driver.settle([Ack(*held(job)) for job in jobs], now=now) == [None] * len(jobs)


async def counts(driver: Driver, queue: str = "q") -> dict[JobState, int]:
    """The states of a queue that have any jobs."""
    (stats,) = await driver.stats(now=NOW, queue=queue)
    return {state: count for state, count in stats.counts.items() if count}


async def outcomes(driver: Driver, job_id: str) -> list[Outcome]:
    return [row.outcome for row in await driver.job_attempts(job_id)]


def wait(driver: PostgresDriver, *queues: str, timeout: float = 60.0) -> asyncio.Future[bool]:
    return asyncio.ensure_future(waits_of(driver)(queues, now=NOW, timeout=timeout))


# -- behind the driver's back ---------------------------------------------------------------------------------


class Raw:
    """A connection that is not the driver's, for what the driver would not do. Its search path is the store's schema."""

    def __init__(self, options: PostgresOptions) -> None:
        self.options = options
        self.schema = options.schema
        self.connection: psycopg.Connection[Any] = psycopg.connect(options.conninfo, autocommit=True)
        self(sql.SQL("SET search_path TO {}").format(sql.Identifier(self.schema)))

    def __call__(self, statement: Any, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []

    def one(self, statement: Any, *values: Any) -> Any:
        ((value,),) = self(statement, *values)
        return value

    def locks_awaited(self) -> int:
        return int(self.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

    @contextlib.contextmanager
    def another(self, *statements: str) -> Iterator[Raw]:
        """One more connection, which has begun a transaction with these statements. Its end rolls back."""
        with Raw(self.options) as more:
            for statement in ("BEGIN", *statements):
                more(statement)
            yield more
            # The server notices a closed connection later. What follows relies on the end of the transaction.
            with contextlib.suppress(psycopg.OperationalError):
                more.connection.rollback()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def enqueue_on(raw: Raw, *records: JobRecord) -> None:
    """As the driver does it, in whatever transaction the connection is in."""
    statement = load("enqueue", raw.schema)["by_rules"]
    with psycopg.RawCursor(raw.connection) as cursor:
        cursor.execute(statement.encode(), [*rule_values(records), NOW, NOTIFYING, False])


def log_row(raw: Raw) -> int:
    """Write a row of the log, in whatever transaction the connection is in; its number."""
    statement = (
        "INSERT INTO attempts (fence, created_at, run_at, ended_at, queue_id, payload_size, rank, outcome, state, "
        "job_id, type) SELECT 1, 1, 1, %s, id, 0, 0, 0, 4, 'late', 't' FROM queues LIMIT 1 RETURNING seq"
    )
    return int(raw.one(statement, wall_clock()))


def fold(raw: Raw) -> None:
    """Fold every move that has been committed, however short a while ago. The first call only says how far the next may go."""
    raw("SELECT fold(0)")
    raw("SELECT fold(0)")


# -- lines that break -----------------------------------------------------------------------------------------


def crash_proof_server() -> PostgresServer:
    """What it has answered survives any end of its processes. Nobody cuts the power here, so no disk is waited for."""
    return PostgresServer.start(settings={"synchronous_commit": "on"})


class Line(NamedTuple):
    """A handle by way of a fault proxy, and one that goes straight to the server, to see what is true."""

    near: PostgresDriver
    far: PostgresDriver
    proxy: FaultProxy

    async def store(self, count: int = 1, **fields: Any) -> list[str]:
        return ids(await self.far.enqueue(make_records(count, **fields), now=NOW))

    async def job(self, job_id: str) -> JobRecord:
        return present((await self.far.get([job_id], now=NOW))[0])


@contextlib.asynccontextmanager
async def line(url: str, options: str = "") -> AsyncIterator[Line]:
    with nothing_unhandled(), FaultProxy.to(url) as proxy:
        near = PostgresDriver.from_url(proxy.url_for(url) + options)
        async with near, PostgresDriver.from_url(url) as far:
            # A call that fails on a connection nobody has used yet is not repeated: such a server is really gone.
            await near.time()
            yield Line(near, far, proxy)


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
