"""The backend goes away and comes back: nothing is lost, nothing done twice, and the log says it once."""

import asyncio
from collections import Counter

import pytest

from taskharbor import Job, JobState, Outcome
from worker.stage import EVERYTHING, Stage, Trouble, eventually, logged, running


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["open", "time", "reserve", "settle", "extend_lease", "wait"])
async def test_each_operation_may_fail_for_a_while(
    operation: str, when: str, troubled: Stage, trouble: Trouble
) -> None:
    executions: Counter[str] = Counter()
    recovered = asyncio.Event()

    async def handler(job: Job) -> None:
        executions[job.id] += 1
        if operation == "extend_lease":
            await recovered.wait()

    if operation == "wait":
        ids = []
    else:
        ids = await troubled.enqueue_many(10)
    failing = trouble.before if when == "before" else trouble.after
    failing.add(operation)
    # Leases that a reserve granted and could not tell of come back when they are over.
    worker = troubled.worker(handler, concurrency=20, lease=2.0, heartbeat=0.1, poll_interval=0.05)
    async with running(worker):
        await eventually(lambda: trouble.refused.count(operation) >= 2)
        failing.clear()
        recovered.set()
        ids = ids or await troubled.enqueue_many(10)
        for job_id in ids:
            assert (await troubled.ended(job_id)).state is JobState.DONE
    assert executions == dict.fromkeys(ids, 1)
    for job_id in ids:
        outcomes = await troubled.outcomes(job_id)
        lost_on_the_way = operation == "reserve" and when == "after"
        assert outcomes[-1] is Outcome.DONE
        assert len(outcomes) == 1 or lost_on_the_way


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_outage_of_everything_is_ridden_out_and_announced_once(
    when: str, troubled: Stage, trouble: Trouble
) -> None:
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


async def test_what_ended_during_an_outage_is_written_before_its_lease_is_over(
    troubled: Stage, trouble: Trouble
) -> None:
    """However long the outage was: the pauses between tries stay shorter than what is left of a lease."""

    pauses: list[float] = []
    worker = troubled.worker(lease=3.0)
    settle = None

    async def handler(job: Job) -> None:
        nonlocal settle
        settle = worker._engines[0]._settle

    worker.register("work", handler)
    job_id = await troubled.enqueue()
    async with running(worker):
        await troubled.ended(job_id)
    assert settle is not None
    pauses.append(settle._longest_pause)
    # Between two heartbeats a lease has at least two thirds of its time left.
    assert pauses[0] <= 1.0
