"""A lane runs many jobs in one asyncio task: none of them may notice."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from taskharbor import Job, JobState
from worker.stage import Stage, eventually

seen: ContextVar[str] = ContextVar("seen", default="nothing")


async def test_cancelling_one_job_does_not_touch_the_next_in_its_lane(here: Stage) -> None:
    started = asyncio.Event()

    async def work(job: Job) -> None:
        if job.payload == b"0":
            started.set()
            await asyncio.Event().wait()
        # Looks at the task's cancel count: one left over from another job would strike here.
        async with asyncio.timeout(30):
            await asyncio.sleep(0)

    first = await here.enqueue(payload=0)
    others = [await here.enqueue(payload=n) for n in (1, 2)]
    worker = here.worker(work, concurrency=1, heartbeat=0.02, until_empty=True)
    running = asyncio.create_task(worker.run_async())
    await started.wait()
    await here.client.cancel(first)
    assert (await here.ended(first)).state is JobState.CANCELLED
    for other in others:
        assert (await here.ended(other)).state is JobState.DONE
    await running


async def test_a_job_that_waits_has_its_task_to_itself(here: Stage) -> None:
    bound: dict[object, str] = {}  # What a session registry scoped by task would hold.

    async def work(job: Job) -> None:
        await asyncio.sleep(0)
        assert bound.setdefault(asyncio.current_task(), job.id) == job.id

    await here.enqueue_many(50)
    await here.drain(work, concurrency=2)
    assert len(bound) == 50


async def test_jobs_that_never_wait_leave_turns_to_the_rest_of_the_loop(here: Stage) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def work(job: Job) -> None:
        for _ in range(2000):
            pass

    await here.enqueue_many(2000)
    counting = asyncio.create_task(count_turns())
    await here.drain(work, concurrency=1)
    counting.cancel()
    assert turns > 10


async def test_a_context_lasts_as_long_as_its_job_and_no_longer(here: Stage) -> None:
    found: list[str] = []
    later: list[str] = []
    orphans: list[asyncio.Task[None]] = []
    done = asyncio.Event()

    async def orphan() -> None:
        await done.wait()
        later.append(seen.get())

    async def work(job: Job) -> None:
        found.append(seen.get())
        seen.set(job.id)
        await asyncio.sleep(0)
        assert seen.get() == job.id
        orphans.append(asyncio.create_task(orphan()))

    jobs = await here.enqueue_many(3)
    await here.drain(work, concurrency=1)
    done.set()
    await eventually(lambda: len(later) == 3)
    assert found == ["nothing"] * 3
    assert later == jobs
