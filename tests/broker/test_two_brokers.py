"""Two brokers as processes over one store: one leads, and the other takes over when it is frozen, killed or stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from chaos.brokers import BrokerPair, wait_until
from chaos.story import insist, until
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Outcome
from taskharbor.requests import new_ids
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.servers.s3 import fresh_s3_url
from taskharbor_testkit.waits import waits_of

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")

QUEUE = "mail"
TERM = 1.0
PRODUCERS = 4
BATCH = 5


@contextmanager
def two_brokers(folder: Path, *, kind: str = "file", term: float = TERM) -> Iterator[BrokerPair]:
    pair = BrokerPair(f"file://{folder}/store" if kind == "file" else fresh_s3_url(), term=term)
    with pair.at_work():
        yield pair


class Traffic:
    """Producers and a worker that go on whatever happens to the brokers, each with a handle of its own."""

    def __init__(self, url: str) -> None:
        self.accepted: set[str] = set()
        self.begun: Counter[tuple[str, int]] = Counter()
        self._url = url
        self._is_over = False

    async def produce(self) -> None:
        async with HttpDriver.from_url(self._url) as driver:
            while not self._is_over:
                now = await insist(driver.time)
                batch = [_record(job_id, now) for job_id in new_ids(BATCH)]
                answers = await insist(lambda batch=batch, now=now: driver.enqueue(batch, now=now))
                self.accepted |= {one.id for one in answers}

    async def work(self, name: str) -> None:
        """Until nothing is left of what was accepted."""
        async with HttpDriver.from_url(self._url) as driver:
            while True:
                was_over = self._is_over
                now = await insist(driver.time)
                jobs: list[JobRecord] = await insist(
                    lambda now=now: driver.reserve(
                        QUEUE, limit=20, lease_for=3 * SECOND, now=now, worker=name
                    )
                )
                self.begun.update((job.id, job.fence) for job in jobs)
                ends = [Ack(job.id, job.token or "") for job in jobs]
                if ends:
                    # One whose lease went by while no broker led is refused, and the job runs again.
                    await insist(lambda ends=ends, now=now: driver.settle(ends, now=now))
                elif was_over and not await _unfinished(driver):
                    return
                else:
                    await insist(lambda now=now: waits_of(driver)([QUEUE], now=now, timeout=0.2))

    async def more(self, count: int) -> None:
        """Wait until so many more jobs are accepted than there are now."""
        enough = len(self.accepted) + count
        await until(lambda: len(self.accepted) >= enough, f"{enough} accepted jobs")

    def end(self) -> None:
        self._is_over = True


async def _unfinished(driver: HttpDriver) -> int:
    [stats] = await insist(lambda: _stats(driver))
    return sum(count for state, count in stats.counts.items() if not state.is_terminal)


async def _stats(driver: HttpDriver) -> list:  # type: ignore[type-arg]
    return await driver.stats(now=await driver.time(), queue=QUEUE)


def _record(job_id: str, now: int) -> JobRecord:
    return JobRecord(
        id=job_id,
        type="send",
        queue=QUEUE,
        payload=b"null",
        run_at_us=now,
        created_at_us=now,
        max_attempts=100,
    )


async def check_everything(url: str, traffic: Traffic) -> None:
    """Nothing that was accepted is lost, and each job has ended once, under leases that never overlapped."""
    async with HttpDriver.from_url(url) as driver:
        attempts: list[Attempt] = []
        cursor: str | None = None
        while (page := await driver.read_attempts(after=cursor, limit=5000)).attempts:
            attempts += page.attempts
            cursor = page.cursor
        jobs: list[JobRecord] = []
        cursor = None
        now = await driver.time()
        while True:
            found = await driver.list_jobs(JobFilter(), now=now, limit=1000, cursor=cursor)
            jobs += found.jobs
            cursor = found.cursor
            if cursor is None:
                break
    assert {job.id for job in jobs} == traffic.accepted
    assert len(jobs) == len(traffic.accepted)
    assert {job.state for job in jobs} == {JobState.DONE}
    ends = Counter(row.job_id for row in attempts if row.state.is_terminal)
    assert ends == Counter(traffic.accepted)
    check_no_overlap(spans(attempts, ()))
    assert [lease for lease, times in traffic.begun.items() if times > 1] == []
    assert {(row.job_id, row.fence) for row in attempts if row.state is JobState.DONE} <= traffic.begun.keys()


async def ask_to_store_a_job(address: str, job_type: str) -> tuple[int, str]:
    """One request at one broker, which is not repeated: status, and the problem's code."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{address}/v1/jobs", json={"queue": QUEUE, "type": job_type, "payload": None}
        ) as answer,
    ):
        return answer.status, (await answer.json(content_type=None)).get("code", "")


async def ask_for_stats(address: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{address}/v1/stats") as answer:
        return answer.status, (await answer.json(content_type=None)).get("code", "")


async def jobs_of_type(url: str, job_type: str) -> int:
    async with HttpDriver.from_url(url) as driver:
        selection = JobFilter(types=frozenset({job_type}))
        return len((await driver.list_jobs(selection, now=await driver.time())).jobs)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_frozen_leader_is_replaced_steps_down_and_can_lead_again(tmp_path: Path, kind: str) -> None:
    async def scenario(pair: BrokerPair) -> None:
        traffic = Traffic(pair.url)
        first = await asyncio.to_thread(pair.leader)
        second = 1 - first
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PRODUCERS):
                tasks.create_task(traffic.produce())
            tasks.create_task(traffic.work("worker-1"))
            await traffic.more(100)

            await asyncio.to_thread(pair.freeze, first)
            # They lie in the frozen one's sockets, and are read when that one goes on. What it knows is old by then.
            stale = tasks.create_task(ask_for_stats(pair.address(first)))
            late = tasks.create_task(ask_to_store_a_job(pair.address(first), "late"))
            await asyncio.to_thread(wait_until, lambda: pair.leads(second), "the standby leads")
            await traffic.more(100)

            pair.thaw(first)
            assert await stale == (421, "not_leader")
            assert await late == (421, "not_leader")
            await asyncio.to_thread(
                wait_until, lambda: pair.steps_down(first) == 1, "it says that it stands by"
            )
            said = await asyncio.to_thread(pair.says, first)
            assert (said.is_leader, said.leader_url) in {(False, pair.address(second)), (False, None)}
            await traffic.more(100)

            await asyncio.to_thread(pair.kill, second)
            await asyncio.to_thread(wait_until, lambda: pair.leads(first), "the first one leads again")
            await traffic.more(100)
            traffic.end()
        assert await jobs_of_type(pair.url, "late") == 0
        await check_everything(pair.url, traffic)
        print(f"{len(traffic.accepted)} jobs, {len(traffic.begun)} executions")

    with two_brokers(tmp_path, kind=kind) as pair:
        asyncio.run(scenario(pair))


def test_the_write_of_a_leader_that_was_frozen_in_the_middle_of_it_is_refused(tmp_path: Path) -> None:
    async def scenario(pair: BrokerPair) -> None:
        first = await asyncio.to_thread(pair.leader)
        assert (await ask_to_store_a_job(pair.address(first), "early"))[0] == 201
        unfinished = tmp_path / "store" / ".taskharbor" / "unfinished"
        # With the lock in our hands its write is prepared, and goes no further.
        with LocalFiles(tmp_path / "store")._locked(state_name(QUEUE, 0)):
            late = asyncio.ensure_future(ask_to_store_a_job(pair.address(first), "late"))
            await until(lambda: any(unfinished.iterdir()), "a write under way")
            pair.freeze_now(first)
        await asyncio.to_thread(wait_until, lambda: pair.leads(1 - first), "the standby leads")
        pair.thaw(first)
        assert await late == (421, "not_leader")
        await asyncio.to_thread(wait_until, lambda: pair.steps_down(first) == 1, "it says that it stands by")
        assert await jobs_of_type(pair.url, "early") == 1
        assert await jobs_of_type(pair.url, "late") == 0

    with two_brokers(tmp_path) as pair:
        asyncio.run(scenario(pair))


def test_a_clean_stop_hands_over_before_the_term_is_over(tmp_path: Path) -> None:
    term = 9.0

    async def scenario(pair: BrokerPair) -> None:
        traffic = Traffic(pair.url)
        first = await asyncio.to_thread(pair.leader)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PRODUCERS):
                tasks.create_task(traffic.produce())
            tasks.create_task(traffic.work("worker-1"))
            await traffic.more(100)
            began = time.monotonic()
            assert await asyncio.to_thread(pair.stop, first) == 0
            await traffic.more(100)
            assert time.monotonic() - began < term - 2
            traffic.end()
        await check_everything(pair.url, traffic)

    with two_brokers(tmp_path, term=term) as pair:
        asyncio.run(scenario(pair))


def test_of_two_that_start_at_the_same_moment_one_leads(tmp_path: Path) -> None:
    pair = BrokerPair(f"file://{tmp_path}/store", term=TERM)
    with pair.alive(), ThreadPoolExecutor(2) as starters:
        for started in [starters.submit(pair.start, one) for one in (0, 1)]:
            started.result()
        leader = pair.leader()
        wait_until(
            lambda: pair.says(1 - leader).leader_url == pair.address(leader), "the other one knows the leader"
        )
        assert sum(pair.lines(one).count("leading from now on") for one in (0, 1)) == 1


def test_what_is_stored_beside_a_leading_broker_is_handed_out_by_it(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"

    async def scenario(pair: BrokerPair) -> None:
        await asyncio.to_thread(pair.leader)
        async with HttpDriver.from_url(pair.url) as driver, ObjectStoreDriver.from_url(store) as beside:
            now = await driver.time()
            first, second = new_ids(2)
            await driver.enqueue([_record(first, now)], now=now)
            reserved = await driver.reserve(QUEUE, limit=9, lease_for=60 * SECOND, now=now, worker="worker-1")
            assert [job.id for job in reserved] == [first]
            # The broker's memory says that nothing waits, and no write of its own will tell it otherwise.
            await beside.enqueue([_record(second, now)], now=now)

            async def is_handed_out() -> bool:
                await waits_of(driver)([QUEUE], now=now, timeout=TERM)
                found = await driver.reserve(
                    QUEUE, limit=9, lease_for=60 * SECOND, now=now, worker="worker-2"
                )
                return [job.id for job in found] == [second]

            await until(is_handed_out, "the job is handed out")

    with two_brokers(tmp_path) as pair:
        asyncio.run(scenario(pair))


def test_a_leader_ends_leases_that_are_over_with_every_write(tmp_path: Path) -> None:
    async def scenario(pair: BrokerPair) -> None:
        await asyncio.to_thread(pair.leader)
        async with HttpDriver.from_url(pair.url) as driver:
            now = await driver.time()
            first, second = new_ids(2)
            await driver.enqueue([_record(first, now)], now=now)
            await driver.reserve(QUEUE, limit=1, lease_for=1, now=now, worker="worker-1")
            # By nobody's wish: the write that stores another job ends the lease as well.
            await driver.enqueue([_record(second, now)], now=now)
            assert [row.outcome for row in await driver.job_attempts(first)] == [Outcome.EXPIRED]

    with two_brokers(tmp_path) as pair:
        asyncio.run(scenario(pair))
