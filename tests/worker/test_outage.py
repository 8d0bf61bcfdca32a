"""The backend goes away and comes back: nothing is lost, nothing done twice, and the log says it once."""

import asyncio
from collections import Counter

import pytest

from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.memory import MemoryDriver
from worker.stage import EVERYTHING, TroubledDriver, eventually, logged, running, stage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["open", "time", "reserve", "settle", "extend_lease", "wait"])
async def test_each_operation_may_fail_for_a_while(operation: str, when: str) -> None:
    driver = TroubledDriver()
    async with stage(MemoryDriver(driver._store)) as here:
        here.driver = driver
        executions: Counter[str] = Counter()
        recovered = asyncio.Event()

        async def handler(job: Job) -> None:
            executions[job.id] += 1
            if operation == "extend_lease":
                await recovered.wait()

        if operation == "wait":
            ids = []
        else:
            ids = await here.enqueue_many(10)
        failing = driver.trouble.before if when == "before" else driver.trouble.after
        failing.add(operation)
        # Leases that a reserve granted and could not tell of come back when they are over.
        worker = here.worker(handler, concurrency=20, lease=2.0, heartbeat=0.1, poll_interval=0.05)
        async with running(worker):
            await eventually(lambda: driver.trouble.refused.count(operation) >= 2)
            failing.clear()
            recovered.set()
            ids = ids or await here.enqueue_many(10)
            for job_id in ids:
                assert (await here.ended(job_id)).state is JobState.DONE
        assert executions == dict.fromkeys(ids, 1)
        for job_id in ids:
            outcomes = await here.outcomes(job_id)
            lost_on_the_way = operation == "reserve" and when == "after"
            assert outcomes[-1] is Outcome.DONE
            assert len(outcomes) == 1 or lost_on_the_way


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_outage_of_everything_is_ridden_out_and_announced_once(when: str) -> None:
    driver = TroubledDriver()
    async with stage(MemoryDriver(driver._store)) as here:
        here.driver = driver
        go_on = asyncio.Event()
        executions: Counter[str] = Counter()

        async def handler(job: Job) -> None:
            executions[job.id] += 1
            await go_on.wait()

        ids = await here.enqueue_many(8)
        worker = here.worker(handler, concurrency=8, lease=30.0, poll_interval=0.05)
        with logged() as told:
            async with running(worker):
                await eventually(lambda: len(executions) == 8)
                setattr(driver.trouble, when, set(EVERYTHING))
                go_on.set()
                await eventually(lambda: driver.trouble.refused.count("settle") >= 2)
                assert not worker.snapshot()["backend_answers"]
                setattr(driver.trouble, when, set())
                for job_id in ids:
                    assert (await here.ended(job_id)).state is JobState.DONE
                await eventually(lambda: worker.snapshot()["backend_answers"])
            assert told.count("does not answer") == 1
            assert told.count("answers again") == 1
        assert executions == dict.fromkeys(ids, 1)
        for job_id in ids:
            assert await here.outcomes(job_id) == [Outcome.DONE]


async def test_a_retry_whose_answer_got_lost_is_not_written_twice() -> None:
    driver = TroubledDriver()
    async with stage(MemoryDriver(driver._store)) as here:
        here.driver = driver
        fences: list[int] = []

        async def handler(job: Job) -> str:
            fences.append(job.fence)
            if job.attempt == 1:
                raise ValueError("once")
            return "twice"

        driver.trouble.after.add("settle")
        job_id = await here.enqueue(backoff=(0, 0))
        async with running(here.worker(handler)):
            await eventually(lambda: "settle" in driver.trouble.refused)
            driver.trouble.after.clear()
            record = await here.ended(job_id)
        assert (record.attempts, record.stalls, fences) == (1, 0, [1, 2])
        assert await here.outcomes(job_id) == [Outcome.RETRIED, Outcome.DONE]


async def test_what_ended_during_an_outage_is_written_before_its_lease_is_over() -> None:
    """However long the outage was: the pauses between tries stay shorter than what is left of a lease."""

    driver = TroubledDriver()
    async with stage(driver) as here:
        pauses: list[float] = []
        worker = here.worker(lease=3.0)
        settle = None

        async def handler(job: Job) -> None:
            nonlocal settle
            settle = worker._engines[0]._settle

        worker.register("work", handler)
        job_id = await here.enqueue()
        async with running(worker):
            await here.ended(job_id)
        assert settle is not None
        pauses.append(settle._longest_pause)
        # Between two heartbeats a lease has at least two thirds of its time left.
        assert pauses[0] <= 1.0
