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

from drivers.postgres.outage_stage import LEASE, NOW, crash_proof_server, records
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, QueueSettings, Release
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import SECOND, Failure, JobRecord, Lease
from taskharbor_testkit.conformance import CASES
from taskharbor_testkit.conformance.backend import as_backend
from taskharbor_testkit.conformance.case import run_case
from taskharbor_testkit.conformance.invariants import most_at_once, spans
from taskharbor_testkit.servers import PgBouncer, PostgresServer, with_fresh_schema
from taskharbor_testkit.waits import waits_of
from worker.stage import Stage, eventually, finish, running, stage

SESSIONS = 2
OPTIONS = "&prepare=off&notify=off&poll=0.02"
FAMILIES = ("concurrency", "crash", "limits", "waiting")
"""The kit's cases that lean on sessions, locks and wake-ups more than others."""

pytestmark = pytest.mark.installed


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with crash_proof_server() as server:
        yield server


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


def sessions(server: PostgresServer) -> int:
    """How many the server sees of ours."""
    ((count,),) = server.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    return int(count)


# -- what holds -------------------------------------------------------------------------------------------


async def work_off(driver: PostgresDriver, name: str, ended: Counter[str], count: int) -> None:
    """Claim, extend, and end jobs of queue `q` until as many have ended, by anybody."""
    while ended.total() < count:
        jobs = await driver.reserve("q", limit=5, lease_for=LEASE, now=NOW, worker=name)
        beats = [Extension(job.id, job.token or "") for job in jobs]
        leases = await driver.extend_lease(beats, lease_for=LEASE, now=NOW + SECOND)
        assert all(isinstance(lease, Lease) for lease in leases)
        acks = [Ack(lease.job_id, lease.token) for lease in leases if isinstance(lease, Lease)]
        assert await driver.settle(acks, now=NOW + SECOND) == [None] * len(jobs)
        ended.update(job.id for job in jobs)


async def test_many_handles_share_a_few_sessions_and_do_everything_once(
    server: PostgresServer, url: str
) -> None:
    async def produce(driver: PostgresDriver, batches: list[list[JobRecord]]) -> None:
        for batch in batches:
            answers = await driver.enqueue(batch, now=NOW)
            assert [one.id for one in answers] == [record.id for record in batch]

    async with handles(url, 8) as all_of_them:
        batches = [records(10) if n % 2 else records(1, key=f"k{n}") for n in range(60)]
        ids = [record.id for batch in batches for record in batch]
        ended: Counter[str] = Counter()
        producing = [produce(driver, batches[place::4]) for place, driver in enumerate(all_of_them[:4])]
        working = [work_off(driver, f"w{place}", ended, len(ids)) for place, driver in enumerate(all_of_them)]
        await finish(asyncio.gather(*producing, *working))
        assert ended == dict.fromkeys(ids, 1)
        (stats,) = await all_of_them[0].stats(now=NOW, queue="q")
        assert stats.counts[JobState.DONE] == stats.done_total == len(ids)
        attempts = (await all_of_them[1].read_attempts(limit=1000)).attempts
        assert Counter(row.job_id for row in attempts) == ended
        assert sessions(server) <= SESSIONS


async def test_a_limit_holds_across_shared_sessions(url: str) -> None:
    """Its lock ends with the transaction, and so cannot be left behind in a session that goes to somebody else."""

    async with handles(url, 4) as all_of_them:
        first = all_of_them[0]
        await first.configure("q", QueueSettings(max_inflight=3), now=NOW)
        await first.enqueue(records(90), now=NOW)
        ended: Counter[str] = Counter()
        held: set[str] = set()
        most = 0

        async def work(driver: PostgresDriver, name: str) -> None:
            nonlocal most
            while ended.total() < 90:
                jobs = await driver.reserve("q", limit=2, lease_for=LEASE, now=NOW, worker=name)
                held.update(job.id for job in jobs)
                most = max(most, len(held))
                held.difference_update(job.id for job in jobs)
                acks = [Ack(job.id, job.token or "") for job in jobs]
                assert await driver.settle(acks, now=NOW) == [None] * len(jobs)
                ended.update(job.id for job in jobs)

        await finish(asyncio.gather(*(work(one, f"w{n}") for n, one in enumerate(all_of_them))))
        assert most <= 3
        assert set(ended.values()) == {1}
        attempts = (await first.read_attempts(limit=1000)).attempts
        assert most_at_once(spans(attempts, ())) <= 3


async def test_the_operators_calls(url: str) -> None:
    async with handles(url, 2) as (driver, other):
        one, two, three = (record.id for record in records(3))
        batch = [
            JobRecord(
                id=job_id, type="t", queue="q", run_at_us=NOW, created_at_us=NOW, idempotency_key=job_id
            )
            for job_id in (one, two, three)
        ]
        await driver.enqueue(batch, now=NOW)
        assert [answer.existed for answer in await other.enqueue(batch, now=NOW)] == [True] * 3
        assert await other.cancel([three], now=NOW) == [JobState.CANCELLED]
        jobs = await driver.reserve("q", limit=3, lease_for=LEASE, now=NOW, worker="w")
        assert [job.id for job in jobs] == [one, two]
        ends = [
            Fail(one, jobs[0].token or "", 1, Failure("E", "no")),
            Release(two, jobs[1].token or ""),
        ]
        assert await other.settle(ends, now=NOW) == [None, None]
        assert await other.requeue([one], now=NOW) == [JobState.READY]
        listed = await driver.list_jobs(JobFilter(queue="q", states=frozenset({JobState.READY})), now=NOW)
        assert {job.id for job in listed.jobs} == {one, two}
        outcomes = [row.outcome for row in await driver.job_attempts(one)]
        assert outcomes == [Outcome.DEAD, Outcome.REQUEUED]
        await driver.reserve("q", limit=3, lease_for=LEASE, now=NOW, worker="w")
        assert await other.reclaim(now=NOW + LEASE) == 2
        assert await driver.purge(JobFilter(queue="q")) == 1
        await driver.prune(now=NOW)


async def test_who_waits_finds_work_by_looking(url: str) -> None:
    async with handles(url, 2) as (driver, other):
        await other.enqueue(records(1), now=NOW)
        while await waits_of(driver)(["q"], now=NOW, timeout=0.05):
            pass
        for _ in range(3):
            waiting = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=600.0))
            await asyncio.wait([waiting], timeout=0.05)
            assert not waiting.done()
            await other.enqueue(records(1), now=NOW)
            assert await finish(waiting)


async def is_all_done(here: Stage) -> bool:
    try:
        (stats,) = await here.client.stats("default")
    except BackendUnavailable:
        return False
    return sum(stats.counts.values()) == stats.counts[JobState.DONE]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_worker_works_and_comes_through_a_restart_behind_it(
    server: PostgresServer, url: str, is_restarted: bool
) -> None:
    async with stage(PostgresDriver.from_url(url)) as here:
        executions: Counter[str] = Counter()

        async def handler(job: Job) -> None:
            executions[job.id] += 1

        async with running(here.worker(handler, poll_interval=0.2, lease=60.0)):
            ids = await here.enqueue_many(100)
            if is_restarted:
                await eventually(lambda: len(executions) > 10)
                await asyncio.to_thread(server.restart, "immediate")
            # PgBouncer itself says no for a while: "server login has been failing".
            await eventually(lambda: is_all_done(here))
        assert executions == dict.fromkeys(ids, 1)
        for job_id in ids:
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


def test_prepared_statements_are_refused_with_advice(forgetful: PgBouncer) -> None:
    """Handles prepare under the same names, in the one session there is."""

    async def main() -> None:
        async with handles(with_fresh_schema(forgetful.url), 4) as all_of_them:
            for driver in all_of_them:
                await driver.time()

    with pytest.raises(TaskHarborError, match="prepare=off"):
        asyncio.run(main())


async def test_nothing_is_heard_through_it_so_news_waits_for_the_next_look(bouncer: PgBouncer) -> None:
    """LISTEN seems to work and stays behind in a session. A wait lasts its whole time-out, and loses nothing."""

    async with handles(with_fresh_schema(bouncer.url) + "&prepare=off", 2) as (driver, other):
        await other.enqueue(records(1), now=NOW)
        while await waits_of(driver)(["q"], now=NOW, timeout=0.1):
            pass
        waiting = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=0.5))
        await asyncio.wait([waiting], timeout=0.1)
        await other.enqueue(records(1), now=NOW)
        assert not await finish(waiting)
        assert await finish(waits_of(driver)(["q"], now=NOW, timeout=600.0))
