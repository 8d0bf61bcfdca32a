"""A job whose lease ran out before may have killed its worker. It runs where it can take no other job along."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pytest

from records import present
from taskharbor import Client, Harbor, Job, JobRequest, JobState, Outcome
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND
from taskharbor.middleware import Call
from taskharbor_testkit.servers.broker import broker_process
from worker import crashing
from worker.stage import PATIENCE, Gate, Stage, begun, eventually, finish, running, stage

PROGRAM = Path(__file__).with_name("crashing.py")
COMMAND = "-m taskharbor worker worker.crashing:harbor --lease 1s --poll-interval 0.1s --until-empty --wait-for-retries"


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "sqlite":
            yield f"sqlite:///{tmp_path}/jobs.db"
        case "folder":
            yield f"file://{tmp_path}/store"
        case "broker":
            with broker_process(f"sqlite:///{tmp_path}/jobs.db") as broker:
                yield broker.url
        case name:
            yield request.getfixturevalue(f"{name}_url")


def work_off(url: str, *command: str) -> int:
    """Start the worker again for as long as it is killed; how often it was."""
    line = [sys.executable, *command]
    for kills in range(100):
        ended = subprocess.run(line, cwd=PROGRAM.parent.parent, capture_output=True, timeout=300, check=False)
        if ended.returncode != -signal.SIGKILL:
            assert ended.returncode == 0, ended.stderr.decode()
            return kills
    raise AssertionError("it is killed for ever")


EVERYWHERE = [
    "sqlite",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("postgres", "redis", "folder", "broker")),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["in a process", "alone"])
@pytest.mark.parametrize("store_url", EVERYWHERE, indirect=True)
def test_a_job_that_kills_its_worker_takes_nobody_along_twice(store_url: str, way: str) -> None:
    with Client(store_url) as client:
        requests = [JobRequest(type="innocent", payload={"seconds": 0.05}, queue="crashing")] * 100
        requests.insert(
            10, JobRequest(type="guilty", payload={}, queue="crashing", backoff=(0.01, 0.01), max_attempts=3)
        )
        handles = client.enqueue_many(requests)
        if way == "alone":
            kills = work_off(store_url, str(PROGRAM), store_url)
        else:
            kills = work_off(store_url, *COMMAND.split(), "--url", store_url)
        guilty = client.get(handles.pop(10).id)
        innocent = [client.get(handle.id) for handle in handles]
    assert {job.state for job in innocent} == {JobState.DONE}
    assert {(job.attempts, job.stalls) for job in innocent} == {(0, 0), (0, 1)}
    assert guilty.state is JobState.DEAD
    # A process that dies is a failure, and so does not cost the worker.
    expected = (0, 3) if way == "alone" else (2, 1)
    assert (guilty.attempts, guilty.stalls) == expected
    assert kills == guilty.stalls


# -- alone ----------------------------------------------------------------------------------------------------------


async def stall(here: Stage, limit: int, queue: str = "default") -> None:
    """The next jobs are leased by a worker that dies."""
    assert (await here.client.list_jobs()).jobs  # And the driver is open.
    driver = here.client.driver
    now = await driver.time()
    await driver.reserve(queue, limit=limit, lease_for=SECOND, now=now, worker="killed")
    assert await driver.reclaim(now=now + SECOND, queue=queue) == limit


class Watch:
    """A handler that notes what runs beside each job. The first job waits at the gate."""

    def __init__(self) -> None:
        self.gate, self.now = Gate(), set[str]()
        self.beside: dict[str, set[str]] = {}

    async def run(self, job: Job) -> None:
        self.now.add(job.id)
        for one in self.now:
            self.beside[one] = self.beside.get(one, set()) | self.now - {one}
        try:
            if len(self.beside) == 1:
                await self.gate.on_loop(job)
            await asyncio.sleep(0.001)
        finally:
            self.now.remove(job.id)


@pytest.mark.parametrize("meanwhile", ["nothing", "stop", "cancel", "lose"])
async def test_a_suspect_waits_until_it_is_alone_and_can_be_called_off(here: Stage, meanwhile: str) -> None:
    suspect = await here.enqueue(queue="other")
    await stall(here, 1, "other")
    neighbours = [await here.enqueue(queue="other") for _ in range(3)]
    await here.pause("other")
    first = await here.enqueue()
    watch = Watch()
    worker = here.worker(watch.run, queues=["default", "other"], heartbeat=0.02)
    running = await begun(worker, watch.gate)
    await here.client.resume("other")
    await here.until(suspect, lambda job: job.state is JobState.INFLIGHT)
    # Whatever was claimed with it goes back, unspent.
    for job in neighbours:
        await here.until(job, lambda record: record.state is JobState.READY)
    late = await here.enqueue()
    expected, ended = [Outcome.EXPIRED, Outcome.DONE], [first, suspect, late, *neighbours]
    match meanwhile:
        case "stop":
            worker.stop()
            await here.until(suspect, lambda job: job.state is JobState.READY)
            expected, ended = [Outcome.EXPIRED, Outcome.RELEASED], [first]
        case "cancel":
            await here.client.cancel(suspect)
            await here.until(suspect, lambda job: job.state is JobState.CANCELLED)
            expected = [Outcome.EXPIRED, Outcome.CANCELLED]
        case "lose":
            await here.take_away(suspect)
            await here.until(suspect, lambda job: job.stalls == 2)
            expected = [Outcome.EXPIRED, Outcome.EXPIRED, Outcome.DONE]
    assert set(watch.beside) - set(neighbours) - {late} == {first}
    watch.gate.go_on.set()
    for job in ended:
        await here.ended(job)
    worker.stop()
    await finish(running)
    assert await here.outcomes(suspect) == expected
    assert not watch.beside.get(suspect)
    for job in neighbours:
        record = await here.get(job)
        assert (record.attempts, record.stalls) == (0, 0)


async def test_jobs_that_a_suspect_sends_back_do_not_count_as_jobs(here: Stage) -> None:
    jobs = await here.enqueue_many(6)
    await stall(here, 4)
    watch = Watch()
    watch.gate.go_on.set()
    worker = await here.drain(watch.run, max_jobs=5)
    assert worker.outcomes[Outcome.DONE] == len(watch.beside) == 5
    assert not any(watch.beside[job] for job in jobs[:4])
    # The first claim takes what there is. After that it is one at a time for as long as suspects come.
    assert worker.outcomes[Outcome.RELEASED] == 3


class Row(TypedDict):
    n: int


async def test_a_row_of_a_batch_runs_alone_too(here: Stage) -> None:
    harbor = Harbor(here.driver)
    now, calls = set[str](), list[tuple[int, set[str]]]()

    @harbor.batch_job(row=Row)
    async def rows(table: pa.Table) -> None:
        calls.append((len(table), set(now)))

    @harbor.job
    async def single(n: int) -> None:
        now.add(current := f"single {n}")
        await asyncio.sleep(0.001)
        now.remove(current)

    await harbor.enqueue_many_async([rows.request(n=n) for n in range(5)])
    await stall(here, 3)
    await harbor.enqueue_many_async([single.request(n) for n in range(20)])
    await finish(harbor.worker(until_empty=True, concurrency=4).run_async())
    await harbor.close_async()
    assert calls[:3] == [(1, set())] * 3
    assert sum(count for count, _ in calls) == 5


# -- in a process ---------------------------------------------------------------------------------------------------


async def test_a_process_runs_suspects_one_by_one_beside_other_jobs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    layers: list[str] = []

    async def layer(job: Job, call_next: Call) -> Any:
        layers.append(job.id)
        return await call_next(job)

    async with stage(connect(url)) as here:
        crashing.harbor.use(url)
        suspects = [await crashing.innocent.enqueue_async(0.0) for _ in range(3)]
        await stall(here, 3, "crashing")
        ordinary = [await crashing.innocent.enqueue_async(0.0) for _ in range(3)]
        worker = crashing.harbor.worker(concurrency=2, middleware=[layer])
        worker.is_made_by_import = True
        async with running(worker):
            (pid,) = {await handle.result_async(PATIENCE) for handle in suspects}
            assert {await handle.result_async(PATIENCE) for handle in ordinary} == {os.getpid()}
            assert pid != os.getpid()
            # With the last suspect its process goes.
            await eventually(lambda: not present(worker._suspects)._processes)
        assert {handle.id for handle in (*suspects, *ordinary)} == set(layers)
        await crashing.harbor.close_async()


async def test_a_suspect_that_a_process_cannot_begin_runs_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with stage(connect(url)) as here:
        harbor = Harbor(url)

        def late() -> int:
            return os.getpid()

        late.__module__, late.__qualname__ = crashing.__name__, "late"
        crashing.late = harbor.job(late)  # type: ignore[attr-defined]  # A new process does not find it there.
        handles = [await harbor.enqueue_async("late", {}) for _ in range(2)]
        await stall(here, 2)
        worker = harbor.worker(until_empty=True)
        worker.is_made_by_import = True
        await finish(worker.run_async())
        assert [await handle.result_async(PATIENCE) for handle in handles] == [os.getpid()] * 2
        assert (await handles[0].record_async()).attempts == 0
        await harbor.close_async()
