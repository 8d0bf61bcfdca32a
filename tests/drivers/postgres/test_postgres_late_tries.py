"""A single enqueue whose first try comes after its second, when the job has already run and is gone: it stores nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest

from drivers.postgres.outage_stage import LEASE, NOW, crash_proof_server, records, waiting_for_locks
from taskharbor.drivers.contract import Ack
from taskharbor.drivers.postgres import PostgresDriver, enqueue
from taskharbor.drivers.postgres.connections import Row, Session
from taskharbor.drivers.postgres.options import NOTIFYING
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, JobState
from taskharbor_testkit.servers import PostgresServer, with_fresh_schema
from worker.stage import eventually, finish

_GATE = """
CREATE FUNCTION {0}.stop_here() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('test.stops', true) = 'on' THEN
        PERFORM pg_advisory_xact_lock_shared(4711);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER stop_here BEFORE INSERT ON {0}.jobs FOR EACH ROW EXECUTE FUNCTION {0}.stop_here();
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with crash_proof_server() as server:
        yield server


def on_two_handles(
    server: PostgresServer, story: Callable[[PostgresDriver, PostgresDriver], Awaitable[None]], options: str
) -> None:
    async def main() -> None:
        url = with_fresh_schema(server.url) + options
        async with PostgresDriver.from_url(url) as first, PostgresDriver.from_url(url) as second:
            for driver in (first, second, first, second):
                # The queue is there, and what the store says of repetitions is known.
                await driver.enqueue(records(1), now=NOW, new_ids=True)
            await run_all(second, 4)
            await story(first, second)

    asyncio.run(main())


async def store_again(driver: PostgresDriver, job: JobRecord) -> None:
    """As a driver does whose first try got no answer."""

    async def again(session: Session) -> None:
        session.is_repeated = True
        await enqueue.enqueue(session, [job], NOW, NOTIFYING, new_ids=True)

    await driver._query(again)


async def run_all(driver: PostgresDriver, count: int) -> None:
    held = await driver.reserve("q", limit=10, lease_for=LEASE, now=NOW, worker="w")
    assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=NOW) == [None] * count


async def counts(driver: PostgresDriver) -> dict[JobState, int]:
    (stats,) = await driver.stats(now=NOW, queue="q")
    return {state: count for state, count in stats.counts.items() if count}


WAYS = pytest.mark.parametrize("options", ["", "&prepare=off"])


@WAYS
def test_a_first_try_that_the_server_reads_last_stores_nothing(
    server: PostgresServer, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = records(1)
    job_id = job.id
    asked: list[tuple[str, list[Any]]] = []
    rows = Session.rows

    async def remembering(session: Session, statement: str, values: Any = ()) -> list[Row]:
        if job_id not in values:
            return await rows(session, statement, values)
        asked.append((statement, list(values)))
        raise psycopg.OperationalError("the answer was lost")

    async def story(first: PostgresDriver, second: PostgresDriver) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "rows", remembering)
            with contextlib.suppress(BackendUnavailable):
                await first.enqueue([job], now=NOW, new_ids=True)
        await store_again(second, job)
        await run_all(second, 1)
        ((statement, values),) = asked
        with pytest.raises(Exception, match="a later try has stored this job"):
            await first._query(lambda session: rows(session, statement, values))
        assert await counts(second) == {JobState.DONE: 5}

    on_two_handles(server, story, options)


@WAYS
def test_a_first_try_that_was_stopped_before_it_could_store_stores_nothing(
    server: PostgresServer, options: str
) -> None:
    """Its view of the store is older than the second try, and the job's end: what it checks by must not be."""

    async def story(first: PostgresDriver, second: PostgresDriver) -> None:
        server.execute(_GATE.format(first.options.schema))
        await first._query(lambda session: session.rows("SELECT set_config('test.stops', 'on', false)"))
        (job,) = records(1)
        with psycopg.connect(first.options.conninfo, autocommit=True) as gate:
            gate.execute("SELECT pg_advisory_lock(4711)")
            late = asyncio.ensure_future(first.enqueue([job], now=NOW, new_ids=True))
            await eventually(lambda: waiting_for_locks(server) == 1)
            await store_again(second, job)
            await run_all(second, 1)
        (answer,) = await finish(late)
        assert (answer.id, answer.existed) == (job.id, True)
        assert await counts(second) == {JobState.DONE: 5}

    on_two_handles(server, story, options)
