"""Stopping: finish what runs, give back what does not, write everything; and at once where that is asked for."""

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.memory import MemoryDriver
from worker.stage import (
    EVERYTHING,
    PATIENCE,
    Gate,
    Stage,
    Trouble,
    begun,
    eventually,
    finish,
    logged,
    running,
)


async def untouched(here: Stage, *job_ids: str) -> bool:
    """The jobs are as they were before they were leased, but for the fence."""
    records = [await here.get(job_id) for job_id in job_ids]
    seen = {(record.state, record.attempts, record.stalls, record.token) for record in records}
    return seen == {(JobState.READY, 0, 0, None)}


async def test_a_graceful_stop_finishes_what_runs_and_gives_back_what_waits(here: Stage) -> None:
    gate = Gate("finished")
    running_job, *waiting = await here.enqueue_many(4)
    task = await begun(worker := here.worker(gate.on_loop, concurrency=1), gate)
    # Leased ahead, as after a spell of quick jobs.
    fetch = worker._engines[0]._fetch
    fetch._pace.per_second = 1e6
    fetch._loop.call_soon_threadsafe(fetch._room.set)
    await eventually(lambda: worker.snapshot()["held"] == 4)
    worker.stop()
    await eventually(lambda: untouched(here, *waiting))
    late = await here.enqueue()
    assert not task.done()
    gate.go_on.set()
    await finish(task)
    assert (await here.get(running_job)).result == b'"finished"'
    assert [await here.outcomes(job_id) for job_id in waiting] == [[Outcome.RELEASED]] * 3
    assert await here.outcomes(late) == []


@pytest.mark.parametrize("how", ["stop now", "second stop", "no grace", "cancel", "a thread that heeds it"])
async def test_an_immediate_stop_cancels_handlers_and_gives_their_jobs_back(how: str, here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    handler = gate.until_stopped if how == "a thread that heeds it" else gate.on_loop
    worker = here.worker(handler, grace=0.0 if how == "no grace" else PATIENCE)
    task = await begun(worker, gate)
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finish(task)
    else:
        worker.stop(now=how in ("stop now", "a thread that heeds it"))
        if how == "second stop":
            worker.stop(now=True)
        await finish(task)
    assert gate.reasons == ["shutdown"]
    assert await untouched(here, job_id)
    assert await here.outcomes(job_id) == [Outcome.RELEASED]


@pytest.mark.usefixtures("impatient")
async def test_a_handler_that_swallows_its_cancellation_does_not_keep_its_lease(here: Stage) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def deaf(job: Job) -> str:
        began.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue
        return "who asked?"

    job_id = await here.enqueue()
    worker = here.worker(deaf, grace=0.0)
    task = asyncio.ensure_future(worker.run_async())
    await began.wait()
    worker.stop()
    with logged() as told:
        await finish(task)
    assert told.count("1 handlers did not stop in time") == 1
    assert await untouched(here, job_id)
    # What it still does changes nothing, even for the next run of the same worker on the same loop.
    async with running(worker):
        await eventually(lambda: worker.snapshot()["held"] == 1)
        go_on.set()
        await here.ended(job_id)
    assert await here.outcomes(job_id) == [Outcome.RELEASED, Outcome.DONE]


# -- `run`: on a thread, and in the main thread with a signal from inside a handler ---------------------------------


@pytest.fixture
def there() -> Stage:
    """Of no event loop: a test gives it one call at a time."""
    return Stage(MemoryDriver())


@pytest.mark.usefixtures("impatient")
def test_a_stuck_thread_holds_up_neither_the_worker_nor_its_process(there: Stage) -> None:
    """Its job is given back, and `run` returns: asyncio's own cleaning up must not wait for the thread either."""
    gate = Gate()
    job_id = asyncio.run(there.enqueue())
    worker = there.worker(gate.on_thread, grace=0.05)
    thread = threading.Thread(target=worker.run)
    thread.start()
    asyncio.run(gate.began())
    worker.stop()
    thread.join(PATIENCE / 2)
    is_over = not thread.is_alive()
    gate.go_on.set()
    thread.join(PATIENCE)
    assert is_over
    assert asyncio.run(untouched(there.again(), job_id))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_gracefully_although_the_loop_is_blocked(number: signal.Signals, there: Stage) -> None:
    before = signal.getsignal(number)
    stopping = threading.Event()

    async def blocks(job: Job) -> None:
        fetch = worker._engines[0]._fetch
        os.kill(os.getpid(), number)
        # The loop is blocked until the worker's other side has heard of it.
        while not fetch._stopping:
            stopping.wait(0.001)

    first, *others = asyncio.run(there.enqueue_many(3))
    worker = there.worker(blocks, concurrency=1)
    worker.run()
    assert signal.getsignal(number) is before
    assert asyncio.run(there.again().state(first)) is JobState.DONE
    assert asyncio.run(untouched(there.again(), *others))


def test_a_second_signal_is_immediate(there: Stage) -> None:
    async def handler(job: Job) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    job_id = asyncio.run(there.enqueue())
    there.worker(handler).run()
    assert asyncio.run(untouched(there.again(), job_id))


async def test_a_signal_in_the_middle_of_a_stop_does_not_lock_up(here: Stage) -> None:
    worker = here.worker(lambda job: None)
    with worker._lock:
        worker.stop()  # As a signal handler does, in a main thread that was inside `stop` already.
    await finish(worker.run_async())


# -- outages --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stops", [1, 2])
async def test_a_stop_during_an_outage_ends(stops: int, troubled: Stage, trouble: Trouble) -> None:
    gate = Gate("never written")
    job_id = await troubled.enqueue()
    task = await begun(worker := troubled.worker(gate.on_loop, grace=0.2), gate)
    trouble.before = set(EVERYTHING)
    gate.go_on.set()
    await eventually(lambda: "settle" in trouble.refused)
    for stop in range(stops):
        worker.stop(now=stop == 1)
    with logged() as told:
        await finish(task)
    assert told.count("could not be written") == 1
    assert await troubled.state(job_id) is JobState.INFLIGHT
    assert await troubled.take_away(job_id) == 1
    assert (await troubled.get(job_id)).stalls == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["never answered", "hangs", "max_seconds"])
async def test_a_stop_while_the_backend_is_away_ends(how: str, troubled: Stage, trouble: Trouble) -> None:
    trouble.hang, trouble.before = ({"reserve"}, set()) if how == "hangs" else (set(), {"open"})
    worker = troubled.worker(lambda job: None, grace=0.05, max_seconds=0.01 if how == "max_seconds" else None)
    task = asyncio.ensure_future(worker.run_async())
    await eventually(lambda: trouble.hanging == 1 or len(trouble.refused) > 1)
    if how != "max_seconds":
        worker.stop()
    await finish(task)


async def test_a_stop_during_a_fetch_does_not_wait_for_the_next_poll(here: Stage) -> None:
    worker = here.worker(lambda job: None, poll_interval=10 * PATIENCE)

    class Stops(MemoryDriver):
        async def reserve(self, queue: str, **options: Any) -> Any:
            worker.stop()
            # Until the engine has heard it, as when the backend takes its time.
            await eventually(lambda: worker._engines[0]._fetch._stopping)
            return await super().reserve(queue, **options)

    worker.driver = Stops()
    await finish(worker.run_async())
