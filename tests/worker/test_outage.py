"""The backend goes away and comes back: nothing is lost, nothing done twice, and the log says it once."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from drivers.http.http_line import proxy_to
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.servers import FaultProxy
from worker.stage import EVERYTHING, PATIENCE, Stage, Trouble, eventually, logged, running, stage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["open", "time", "reserve", "settle", "extend_lease", "wait"])
async def test_each_operation_may_fail(operation: str, when: str, troubled: Stage, trouble: Trouble) -> None:
    executions: Counter[str] = Counter()
    recovered = asyncio.Event()

    async def handler(job: Job) -> None:
        executions[job.id] += 1
        if operation == "extend_lease":
            await recovered.wait()

    ids = [] if operation == "wait" else await troubled.enqueue_many(10)
    setattr(trouble, when, {operation})
    # Leases that a reserve granted and could not tell of come back when they are over.
    worker = troubled.worker(handler, concurrency=20, lease=1.0, heartbeat=0.1, poll_interval=0.05)
    async with running(worker):
        await eventually(lambda: trouble.refused.count(operation) >= 2)
        setattr(trouble, when, set())
        recovered.set()
        ids = ids or await troubled.enqueue_many(10)
        for job_id in ids:
            assert (await troubled.ended(job_id)).state is JobState.DONE
    assert executions == dict.fromkeys(ids, 1)
    for job_id in ids:
        outcomes = await troubled.outcomes(job_id)
        assert outcomes[-1] is Outcome.DONE
        assert len(outcomes) == 1 or (operation, when) == ("reserve", "after")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_outage_is_ridden_out_and_told_once(when: str, troubled: Stage, trouble: Trouble) -> None:
    """What ended meanwhile is written before its lease is over: pauses between tries are shorter than what is left of it."""
    go_on = asyncio.Event()
    executions: Counter[str] = Counter()

    async def handler(job: Job) -> None:
        executions[job.id] += 1
        await go_on.wait()

    ids = await troubled.enqueue_many(8)
    worker = troubled.worker(handler, concurrency=8, lease=30.0, poll_interval=0.05)
    with logged() as told:
        async with running(worker):
            await eventually(lambda: len(executions) == 8)
            # Between two heartbeats a lease has at least two thirds of its time left.
            assert worker._engines[0]._settle._longest_pause <= 10.0
            setattr(trouble, when, set(EVERYTHING))
            go_on.set()
            await eventually(lambda: trouble.refused.count("settle") >= 2)
            assert not worker.snapshot()["backend_answers"]
            setattr(trouble, when, set())
            for job_id in ids:
                assert (await troubled.ended(job_id)).state is JobState.DONE
            await eventually(lambda: worker.snapshot()["backend_answers"])
        assert told.count("does not answer") == 1
        assert told.count("answers again") == 1
    assert executions == dict.fromkeys(ids, 1)
    for job_id in ids:
        assert await troubled.outcomes(job_id) == [Outcome.DONE]


async def test_a_retry_whose_answer_got_lost_is_not_written_twice(troubled: Stage, trouble: Trouble) -> None:
    fences: list[int] = []

    async def handler(job: Job) -> str:
        fences.append(job.fence)
        if job.attempt == 1:
            raise ValueError("once")
        return "twice"

    trouble.after.add("settle")
    job_id = await troubled.enqueue(backoff=(0, 0))
    async with running(troubled.worker(handler)):
        await eventually(lambda: "settle" in trouble.refused)
        trouble.after.clear()
        record = await troubled.ended(job_id)
    assert (record.attempts, record.stalls, fences) == (1, 0, [1, 2])
    assert await troubled.outcomes(job_id) == [Outcome.RETRIED, Outcome.DONE]


# -- bounded runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "redis", "http"])
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "http":
        with running_broker(MemoryDriver()) as url:
            yield url
    else:
        yield request.getfixturevalue(f"{request.param}_url")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "when", ["before the start", "before a stop", "idle", "at work", "after the last job"]
)
async def test_a_bounded_run_ends_although_the_backend_hangs(server_url: str, when: str) -> None:
    """`run` returns, by the bound of its time or by a stop. What was not written runs again when its lease is over."""
    began, go_on = threading.Event(), threading.Event()

    async def handler(job: Job) -> None:
        began.set()
        await eventually(go_on.is_set)

    async with stage(connect(server_url)) as here:
        to = proxy_to if server_url.startswith("http") else FaultProxy.to
        with contextlib.closing(to(server_url)) as proxy:
            at_start = when.startswith("before")
            limits = {"max_jobs": 1} if when == "after the last job" else {"until_empty": False}
            bound = None if when == "before a stop" else 0.5 if at_start else 2.0
            url = proxy.url_for(server_url)
            here.driver = connect(f"{url}{'&' if '?' in url else '?'}connect_timeout=2")
            worker = here.worker(handler, max_seconds=bound, grace=0.5, **limits)
            if at_start:
                proxy.stall()
            elif when != "idle":
                await here.enqueue()
            thread = threading.Thread(target=worker.run, daemon=True)
            thread.start()
            if when == "before a stop":
                await eventually(lambda: proxy.connections > 0)
                worker.stop()
            elif not at_start:
                await eventually(began.is_set if when != "idle" else lambda: worker.snapshot()["serving"])
                proxy.stall()
                go_on.set()
            await asyncio.to_thread(thread.join, PATIENCE)
            assert not thread.is_alive()
