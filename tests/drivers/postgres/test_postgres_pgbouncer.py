"""Through PgBouncer in transaction mode: what holds with `prepare=off&notify=off`, and what one gives up without them.

Behind it every transaction may run in another session, which others have used before: few sessions here, many handles.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from drivers.postgres.harness import NOW, make_record, wait
from drivers.postgres.test_postgres_migrations import work
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor_testkit.conformance import CASES
from taskharbor_testkit.conformance.backend import as_backend
from taskharbor_testkit.conformance.case import run_case
from taskharbor_testkit.servers import PgBouncer, PostgresServer, with_fresh_schema
from worker.stage import Stage, eventually, finish, running, stage

SESSIONS = 2
OPTIONS = "&prepare=off&notify=off&poll=0.02"
FAMILIES = ("concurrency", "crash", "limits", "waiting")
"""The kit's cases that lean on sessions, locks and wake-ups more than others."""

pytestmark = pytest.mark.installed


@pytest.fixture(scope="module")
def bouncer(server: PostgresServer) -> Iterator[PgBouncer]:
    with PgBouncer.start(server, settings={"default_pool_size": str(SESSIONS)}) as bouncer:
        yield bouncer


@pytest.fixture
def url(bouncer: PgBouncer) -> str:
    return with_fresh_schema(bouncer.url) + OPTIONS


@contextlib.asynccontextmanager
async def handles(url: str, count: int) -> AsyncIterator[list[PostgresDriver]]:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(PostgresDriver.from_url(url))
        others = [await stack.enter_async_context(first.clone()) for _ in range(count - 1)]
        yield [first, *others]


OURS = "SELECT FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
"""The sessions that the server sees of ours."""


# -- what holds -------------------------------------------------------------------------------------------


async def test_everything_that_a_handle_does(server: PostgresServer, url: str) -> None:
    """By many handles, in few sessions."""
    async with handles(url, 8) as all_of_them:
        for driver in all_of_them:
            await work(driver)
        assert len(server.execute(OURS)) <= SESSIONS


async def is_all_done(here: Stage) -> bool:
    try:
        (stats,) = await here.client.stats("default")
    except BackendUnavailable:
        return False
    return sum(stats.counts.values()) == stats.counts[JobState.DONE]


async def test_a_worker_works_and_comes_through_a_restart_behind_it(server: PostgresServer, url: str) -> None:
    async with stage(PostgresDriver.from_url(url)) as here:
        executions: Counter[str] = Counter()

        async def handler(job: Job) -> None:
            executions[job.id] += 1

        async with running(here.worker(handler, poll_interval=0.2, lease=60.0)):
            stored = await here.enqueue_many(50)
            await eventually(lambda: len(executions) > 10)
            await asyncio.to_thread(server.restart, "immediate")
            # PgBouncer itself says no for a while: "server login has been failing".
            await eventually(lambda: is_all_done(here))
        assert executions == dict.fromkeys(stored, 1)
        for job_id in stored:
            assert await here.outcomes(job_id) == [Outcome.DONE]


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(".")[0] in FAMILIES])
def test_conformance(url: str, name: str, tmp_path: Path) -> None:
    run_case(CASES[name], as_backend(url), tmp_path)


# -- what does not ----------------------------------------------------------------------------------------


@pytest.fixture
def forgetful(server: PostgresServer, bouncer: PgBouncer) -> Iterator[PgBouncer]:
    """One that knows nothing of prepared statements, as all did before 1.21."""
    settings = {"default_pool_size": "1"}
    if bouncer.version >= (1, 21):
        settings["max_prepared_statements"] = "0"
    with PgBouncer.start(server, settings=settings) as bouncer:
        yield bouncer


async def test_prepared_statements_are_refused_with_advice(forgetful: PgBouncer) -> None:
    """Handles prepare under the same names, in the one session there is."""

    async def use() -> None:
        async with handles(with_fresh_schema(forgetful.url), 4) as all_of_them:
            for driver in all_of_them:
                await driver.time()

    with pytest.raises(TaskHarborError, match="prepare=off"):
        await use()


async def test_nothing_is_heard_through_it_so_news_waits_for_the_next_look(bouncer: PgBouncer) -> None:
    """LISTEN seems to work and stays behind in a session. A wait lasts its whole time-out, and loses nothing."""
    async with handles(with_fresh_schema(bouncer.url) + "&prepare=off", 2) as (driver, other):
        await other.enqueue([make_record()], now=NOW)
        while await wait(driver, "q", timeout=0.1):
            pass
        waiting = wait(driver, "q", timeout=0.5)
        await asyncio.wait([waiting], timeout=0.1)
        await other.enqueue([make_record()], now=NOW)
        assert not await finish(waiting)
        assert await finish(wait(driver, "q"))
