"""Timeouts on the event loop and on threads (in processes: test_processes)."""

import asyncio
import threading

from records import present
from taskharbor import Job, JobState, Outcome
from worker.stage import PATIENCE, Stage, eventually, running


async def test_an_async_handler_is_cancelled_and_fails(here: Stage) -> None:
    cancelled: list[bool] = []

    async def handler(job: Job) -> None:
        assert job.deadline is not None
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    job_id = await here.enqueue(timeout=0.05, max_attempts=1)
    await here.drain(handler)
    record = await here.get(job_id)
    assert (record.state, record.attempts) == (JobState.DEAD, 1)
    assert record.last_error == "JobTimeout: took longer than its timeout of 0.05 s"
    assert cancelled == [True]


async def test_a_timed_out_job_is_retried_as_usual(here: Stage) -> None:
    async def handler(job: Job) -> str:
        if job.attempt == 1:
            await asyncio.Event().wait()
        return "second time"

    job_id = await here.enqueue(timeout=0.05, backoff=(0, 0))
    await here.drain(handler)
    assert await here.outcomes(job_id) == [Outcome.RETRIED, Outcome.DONE]


async def test_a_thread_keeps_its_lease_until_it_ends_and_then_has_timed_out(here: Stage) -> None:
    told, go_on = threading.Event(), threading.Event()
    reasons: list[str | None] = []

    def handler(job: Job) -> str:
        job.wait_for_stop(PATIENCE)
        reasons.append(job.stop_reason)
        told.set()
        go_on.wait(PATIENCE)
        return "too late"

    job_id = await here.enqueue(timeout=0.05, max_attempts=1)
    worker = here.worker(handler, heartbeat=0.02)
    async with running(worker):
        await eventually(told.is_set)
        first = present((await here.get(job_id)).expires_at_us)
        await here.until(job_id, lambda job: present(job.expires_at_us) > first)
        go_on.set()
        record = await here.ended(job_id)
    assert (record.state, record.attempts, record.stalls) == (JobState.DEAD, 1, 0)
    assert present(record.last_error).startswith("JobTimeout")
    assert reasons == ["timeout"]


async def test_a_timed_out_thread_that_is_stopped_as_well_has_timed_out(here: Stage) -> None:
    told, go_on = threading.Event(), threading.Event()

    def handler(job: Job) -> None:
        job.wait_for_stop(PATIENCE)
        told.set()
        go_on.wait(PATIENCE)

    job_id = await here.enqueue(timeout=0.05, max_attempts=1)
    worker = here.worker(handler)
    async with running(worker):
        await eventually(told.is_set)
        (hold,) = worker._engines[0].holds
        worker.stop(now=True)
        await eventually(lambda: hold.task is None or hold.task.cancelling() >= 2)
        go_on.set()
        record = await here.ended(job_id)
    assert present(record.last_error).startswith("JobTimeout")


async def test_a_thread_that_ends_in_time_is_done(here: Stage) -> None:
    job_id = await here.enqueue(timeout=PATIENCE)
    await here.drain(lambda job: str(job.timeout))
    assert (await here.get(job_id)).state is JobState.DONE
