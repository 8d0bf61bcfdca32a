"""Brokers come and go, hang, and pass calls on to their leader: workers and clients get over it, or are told at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.broker_loops import Election
from chaos.story import insist
from drivers.http.http_line import NOW, Line, line, proxy_to, records
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.memory import MemoryDriver, MemoryStore
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.conformance.invariants import check_no_overlap, spans
from taskharbor_testkit.servers import FaultProxy
from taskharbor_testkit.servers.broker import BrokerProcess, broker_process
from taskharbor_testkit.servers.process import free_port
from taskharbor_testkit.waits import waits_of
from worker.stage import eventually, logged, running, stage

SEED = "TASKHARBOR_HTTP_CUT_SEED"


@contextlib.contextmanager
def broker_on(store: MemoryStore, leads: Election | None = None) -> Iterator[str]:
    with running_broker(MemoryDriver(store), leads=leads, trust_client_time=True) as url:
        yield url


async def ready_in(store: MemoryStore) -> int:
    (stats,) = await MemoryDriver(store).stats(now=NOW, queue="q")
    return stats.counts[JobState.READY]


def both(first: str, second: str) -> str:
    return f"{first},{urlsplit(second).netloc}"


async def started(brokers: contextlib.ExitStack, store: str) -> BrokerProcess:
    """Beside the loop, on which a worker goes on."""
    starting = broker_process(store)
    broker = await asyncio.to_thread(starting.__enter__)
    brokers.push(starting)
    return broker


def gone() -> str:
    """Where no broker is."""
    return f"http://127.0.0.1:{free_port()}"


# -- a worker -------------------------------------------------------------------------------------------------


async def test_a_worker_comes_through_brokers_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """What ran when the broker died ends once: its lease is in the store, and so is its end."""
    store = f"sqlite:///{tmp_path}/jobs.db"
    executions: Counter[str] = Counter()

    with contextlib.ExitStack() as brokers:
        broker = await started(brokers, store)
        proxy = brokers.enter_context(proxy_to(broker.url))
        hold, held = asyncio.Event(), asyncio.Event()

        async def handle(job: Job) -> None:
            executions[job.id] += 1
            held.set()
            await hold.wait()

        async with stage(HttpDriver.from_url(proxy.url_for(broker.url))) as here:
            with logged() as said:
                async with running(here.worker(handle, lease=60.0, poll_interval=0.2)):
                    ids: list[str] = []
                    for _ in range(2):
                        held.clear()
                        ids += await here.enqueue_many(40)
                        await asyncio.wait_for(held.wait(), 30)
                        await asyncio.to_thread(broker.kill)
                        hold.set()  # The jobs that run now end while no broker is there.
                        broker = await started(brokers, store)
                        proxy.reroute("127.0.0.1", urlsplit(broker.url).port or 0)
                        proxy.cut()
                        for job_id in ids:
                            assert (await here.ended(job_id)).state is JobState.DONE
                        hold.clear()
                    hold.set()
            assert said.count("answers again") >= 1
        assert executions == dict.fromkeys(ids, 1)
        async with SQLiteDriver.from_url(store) as truth:
            rows = (await truth.read_attempts()).attempts
        assert Counter(row.job_id for row in rows) == dict.fromkeys(ids, 1)
        assert {row.outcome for row in rows} == {Outcome.DONE}
        check_no_overlap(spans(rows, ()))


async def test_nothing_is_lost_or_doubled_on_a_line_that_is_cut_again_and_again() -> None:
    """Before the broker saw the request, or before its answer came: at every few calls, whichever they are."""
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"{SEED}={seed}")
    dice = random.Random(seed)
    executions: Counter[str] = Counter()

    async def handle(job: Job) -> None:
        executions[job.id] += 1

    async def cut(proxy: FaultProxy) -> None:
        while True:
            armed = proxy.cut_before_request if dice.random() < 0.5 else proxy.cut_after_request
            armed(dice.randint(1, 4))
            await asyncio.to_thread(proxy.triggered.wait)

    async with line(trust_client_time=False) as here, stage(here.near.clone()) as theirs:
        await theirs.client.open()
        cutting = asyncio.create_task(cut(here.proxy))
        worker = theirs.worker(handle, concurrency=8, lease=60.0, poll_interval=0.2)
        async with running(worker):
            ids: list[str] = []
            for _ in range(30):
                ids += await insist(lambda: theirs.enqueue_many(5))
            await eventually(lambda: len(executions) >= len(ids))
            cutting.cancel()
            here.proxy.disarm()
            here.proxy.triggered.set()  # The thread that waits for it may go.
            for job_id in ids:
                assert (await theirs.ended(job_id)).state is JobState.DONE
        rows = (await here.far.read_attempts(limit=10_000)).attempts
        (stats,) = await here.far.stats(now=NOW, queue="default")
    # An enqueue that the caller made anew has other ids: those of the lost one may be there too.
    assert set(ids) <= set(executions)
    assert set(executions.values()) == {1}
    assert stats.done_total == len(executions)
    assert Counter(row.job_id for row in rows if row.outcome is Outcome.DONE) == executions
    assert {row.outcome for row in rows} <= {Outcome.DONE, Outcome.RELEASED}
    check_no_overlap(spans(rows, ()))


# -- several brokers ------------------------------------------------------------------------------------------


async def test_a_broker_that_is_away_or_hangs_is_passed_over() -> None:
    store = MemoryStore()
    with broker_on(store) as one, broker_on(store) as two, proxy_to(one) as proxy:
        async with HttpDriver.from_url(both(gone(), two)) as driver:
            assert len(await driver.enqueue(records(1), now=NOW, new_ids=True)) == 1
        async with HttpDriver.from_url(both(proxy.url_for(one), two) + "?timeout=0.3") as driver:
            proxy.stall()
            await driver.enqueue(records(1), now=NOW)
            proxy.flow()
    assert await ready_in(store) == 2


async def test_all_brokers_away_is_told_with_their_addresses_and_no_token() -> None:
    first, second = gone(), gone()
    driver = HttpDriver.from_url(both(first, second).replace("://", "://canary-token@"))
    with pytest.raises(BackendUnavailable) as told:
        await driver.open()
    for url in (first, second):
        assert urlsplit(url).netloc in str(told.value)
    assert "canary-token" not in str(told.value)


async def test_a_standby_sends_its_clients_to_the_leader_it_names() -> None:
    """Also one that no URL named; and the driver stays there."""

    store = MemoryStore()
    with broker_on(store, Election(is_leader=True)) as leader:
        standby = Election(leader)
        with broker_on(MemoryStore(), standby) as url:
            async with HttpDriver.from_url(url) as driver:
                await driver.enqueue(records(1), now=NOW)
                standby.leader_url = None  # Nobody asks it again.
                await driver.enqueue(records(1), now=NOW)
    assert await ready_in(store) == 2


async def test_when_leadership_moves_the_client_moves_too() -> None:
    store = MemoryStore()
    first, second = Election(is_leader=True), Election()
    with broker_on(store, first) as one, broker_on(store, second) as two:
        first.leader_url = second.leader_url = one
        async with HttpDriver.from_url(both(one, two)) as driver:
            await driver.enqueue(records(1), now=NOW)
            first.is_leader, second.is_leader = False, True
            first.leader_url = second.leader_url = two
            await driver.enqueue(records(1), now=NOW)
            # And where nobody knows it any more, each is asked.
            first.is_leader, second.is_leader = True, False
            first.leader_url = second.leader_url = None
            await driver.enqueue(records(1), now=NOW)
    assert await ready_in(store) == 3


async def test_no_leader_at_all_is_unavailable_and_two_that_name_each_other_do_not_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskharbor.drivers.http.broker_connections._ELECTION_PAUSES", (0.01, 0.02))
    first, second = Election(), Election()
    with broker_on(MemoryStore(), first) as one, broker_on(MemoryStore(), second) as two:
        with pytest.raises(BackendUnavailable, match="no leader is known"):
            await HttpDriver.from_url(both(one, two)).open()
        first.leader_url, second.leader_url = two, one
        with pytest.raises(BackendUnavailable, match="standby"):
            await HttpDriver.from_url(one).open()


async def test_a_broker_that_is_about_to_lead_is_waited_for() -> None:
    leads = Election()
    with broker_on(MemoryStore(), leads) as url:
        driver = HttpDriver.from_url(url)
        opening = asyncio.ensure_future(driver.open())
        done, _ = await asyncio.wait({opening}, timeout=0.3)
        assert not done
        leads.is_leader = True
        await opening
        await driver.close()


def test_a_token_never_follows_to_a_leader_on_an_open_line() -> None:
    driver = HttpDriver.from_url("https://secret@jobs.example.com")
    with pytest.raises(InvalidRequest, match="advertise https"):
        driver._brokers._checked("http://elsewhere:7433")


# -- time -----------------------------------------------------------------------------------------------------


async def test_a_broker_that_says_nothing_is_given_up_in_time_and_a_wait_may_take_longer() -> None:
    async with line("?timeout=0.2") as here:
        here.proxy.stall()
        with pytest.raises(BackendUnavailable, match=r"no answer within 0\.2 s"):
            await here.near.enqueue(records(1), now=NOW)
        here.proxy.flow()
        await here.near.enqueue(records(1), now=NOW)
        while await waits_of(here.near)(["q"], now=NOW, timeout=0):
            pass
        waiting = asyncio.ensure_future(waits_of(here.near)(["q"], now=NOW, timeout=20))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        await here.store()
        assert await waiting


async def test_a_client_that_leaves_frees_its_place_among_those_who_wait(here: Line) -> None:
    long_polls = here.broker.app.service.long_polls
    while await waits_of(here.near)(["q"], now=NOW, timeout=0):
        pass
    waiting = asyncio.ensure_future(waits_of(here.near)(["q"], now=NOW, timeout=60))
    await eventually(lambda: long_polls.waiting == 1)
    waiting.cancel()
    await eventually(lambda: long_polls.waiting == 0)


@pytest.mark.parametrize("way", ["greet.enqueue()", "asyncio.run(greet.enqueue_async())", "forget()"])
def test_a_program_that_does_not_close_its_app_ends_without_a_warning(way: str) -> None:
    script = f"""
import asyncio, gc, sys
from taskharbor import Harbor
harbor = Harbor(sys.argv[1])

@harbor.job
def greet() -> None: ...

def forget() -> None:
    other = Harbor(sys.argv[1])
    other.enqueue("greet")
    del other
    gc.collect()

{way}
"""
    with running_broker("memory://") as url:
        command = [sys.executable, "-W", "always", "-c", script, url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_handle_that_is_not_open_says_so() -> None:
    driver = HttpDriver.from_url("http://127.0.0.1:1")
    for call in (driver.time(), driver.enqueue(records(1), now=NOW)):
        with pytest.raises(BackendUnavailable, match="not open"):
            await call
