"""Two brokers as processes over one store: one leads, and the other takes over when it is frozen, killed or stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from chaos.brokers import BrokerPair, wait_until
from chaos.story import insist, until
from records import make_record
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.jobs import SECOND, Outcome
from taskharbor_testkit.servers.broker import broker_process
from taskharbor_testkit.servers.s3 import fresh_s3_url
from taskharbor_testkit.waits import waits_of

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")

TERM = 1.0


async def become(is_so: Callable[[], bool], what: str) -> None:
    """Wait in another thread: the loop goes on."""
    await asyncio.to_thread(wait_until, is_so, what)


class Work:
    """A producer that insists on an answer, whatever happens to the brokers. (The storm in `chaos` has workers too.)"""

    def __init__(self, driver: HttpDriver) -> None:
        self._driver = driver
        self._accepted: list[str] = []

    async def store(self) -> None:
        now = await insist(self._driver.time)
        batch = [make_record(now=now) for _ in range(20)]
        self._accepted += [one.id for one in await insist(partial(self._driver.enqueue, batch, now=now))]

    async def check(self) -> None:
        """Nothing that was accepted is lost or there twice, and nothing else is there."""
        now = await insist(self._driver.time)
        page = await insist(partial(self._driver.list_jobs, JobFilter(), now=now, limit=1000))
        assert sorted(job.id for job in page.jobs) == sorted(self._accepted)


@asynccontextmanager
async def work_at(pair: BrokerPair) -> AsyncIterator[Work]:
    async with HttpDriver.from_url(pair.url) as driver:
        yield Work(driver)


async def ask(method: str, address: str, job_type: str = "t") -> tuple[int, str]:
    """One request at one broker, which is not repeated: status, and the problem's code."""
    job = {"queue": "q", "type": job_type} if method == "POST" else None
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{address}/v1/jobs", json=job) as answer,
    ):
        return answer.status, (await answer.json(content_type=None)).get("code", "")


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.slow)])
async def test_a_frozen_leader_is_replaced_steps_down_and_leads_again_when_the_other_is_killed(
    tmp_path: Path, kind: str
) -> None:
    """(With many clients at work all the time: `chaos/test_objectstore_chaos.py`.)"""
    pair = BrokerPair(f"file://{tmp_path}/store" if kind == "file" else fresh_s3_url(), term=TERM)
    with pair.at_work():
        first = await asyncio.to_thread(pair.leader)
        second = 1 - first
        async with work_at(pair) as work:
            await work.store()
            await asyncio.to_thread(pair.freeze, first)
            # They lie in the frozen one's sockets, and are read when that one goes on. What it knows is old by then.
            stale = asyncio.ensure_future(ask("GET", pair.address(first)))
            late = asyncio.ensure_future(ask("POST", pair.address(first), "late"))
            await work.store()
            assert await asyncio.to_thread(pair.leads, second)

            pair.thaw(first)
            assert await stale == (421, "not_leader")
            assert await late == (421, "not_leader")
            await become(lambda: pair.steps_down(first) == 1, "it says that it stands by")
            said = await asyncio.to_thread(pair.says, first)
            assert (said.is_leader, said.leader_url) in {(False, pair.address(second)), (False, None)}
            await work.store()

            await asyncio.to_thread(pair.kill, second)
            await work.store()
            assert await asyncio.to_thread(pair.leads, first)
            await work.check()


async def test_the_write_of_a_leader_that_was_frozen_in_the_middle_of_it_is_refused(tmp_path: Path) -> None:
    pair = BrokerPair(f"file://{tmp_path}/store", term=TERM)
    with pair.at_work():
        first = await asyncio.to_thread(pair.leader)
        async with work_at(pair) as work:
            await work.store()
            unfinished = tmp_path / "store" / ".taskharbor" / "unfinished"
            # With the lock in our hands its write is prepared, and goes no further.
            with LocalFiles(tmp_path / "store")._locked(state_name("q", 0)):
                late = asyncio.ensure_future(ask("POST", pair.address(first), "late"))
                await until(lambda: any(unfinished.iterdir()), "a write under way")
                pair.freeze_now(first)
            await become(lambda: pair.leads(1 - first), "the standby leads")
            pair.thaw(first)
            assert await late == (421, "not_leader")
            await become(lambda: pair.steps_down(first) == 1, "it says that it stands by")
            await work.check()


async def test_of_two_that_start_at_once_one_leads_and_a_clean_stop_hands_over_before_the_term_is_over(
    tmp_path: Path,
) -> None:
    term = 9.0
    pair = BrokerPair(f"file://{tmp_path}/store", term=term)
    with pair.alive():
        with ThreadPoolExecutor(2) as starters:
            list(starters.map(pair.start, (0, 1)))
        first = await asyncio.to_thread(pair.leader)
        other, address = 1 - first, pair.address(first)
        await become(lambda: pair.says(other).leader_url == address, "the other one knows the leader")
        assert sum(pair.lines(one).count("leading from now on") for one in (0, 1)) == 1
        assert await ask("POST", pair.address(other)) == (421, "not_leader")
        async with work_at(pair) as work:
            await work.store()
            began = time.monotonic()
            assert await asyncio.to_thread(pair.stop, first) == 0
            await work.store()
            assert time.monotonic() - began < term - 2
            await work.check()


async def test_a_leader_hands_out_what_is_stored_beside_it_and_ends_leases_with_every_write(
    tmp_path: Path,
) -> None:
    store = f"file://{tmp_path}/store"
    with broker_process(store, "--term", f"{TERM:g}s") as broker:
        async with HttpDriver.from_url(broker.url) as driver, ObjectStoreDriver.from_url(store) as beside:
            now = await insist(driver.time)

            async def reserve(lease_for: int) -> list[str]:
                jobs = await driver.reserve("q", limit=9, lease_for=lease_for, now=now, worker="w")
                return [job.id for job in jobs]

            await driver.enqueue([make_record("first", now=now)], now=now)
            assert await reserve(1) == ["first"]
            # By nobody's wish: the write that stores another job ends the lease as well.
            await driver.enqueue([make_record("second", now=now)], now=now)
            assert [row.outcome for row in await driver.job_attempts("first")] == [Outcome.EXPIRED]
            assert await reserve(60 * SECOND) == ["first", "second"]
            # The broker's memory says that nothing waits, and no write of its own will tell it otherwise.
            await beside.enqueue([make_record("third", now=now)], now=now)

            async def is_handed_out() -> bool:
                await waits_of(driver)(["q"], now=now, timeout=TERM)
                return await reserve(60 * SECOND) == ["third"]

            await until(is_handed_out, "the job is handed out")
