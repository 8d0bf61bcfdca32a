"""Stopping: finish what runs, give back what does not, write everything; and at once where that is asked for."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from records import present
from taskharbor import Job, JobState, Outcome
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND
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
    stage,
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
@pytest.mark.parametrize("timeout", [0, 0.5])
def test_the_job_of_a_stuck_thread_is_kept_although_the_worker_has_ended(
    there: Stage, timeout: float
) -> None:
    """`run` returns. The lease is extended until the thread ends, so that nothing overlaps; past its timeout it runs out."""
    gate = Gate()
    job_id = asyncio.run(there.enqueue(timeout=timeout))
    worker = there.worker(gate.on_thread, grace=0.05, heartbeat=0.02, lease=1.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    asyncio.run(gate.began())
    worker.stop()
    thread.join(PATIENCE / 2)
    is_over = not thread.is_alive()
    again = there.again()
    if timeout:
        # Charged, as a lease that ran out or, on a slow machine, as a failure before the stop.
        asyncio.run(eventually(lambda: reclaimed(again, job_id)))
    else:
        first = present(asyncio.run(again.get(job_id)).expires_at_us)
        asyncio.run(again.until(job_id, lambda job: present(job.expires_at_us) > first + SECOND))
        # The worker may run again meanwhile: it takes another handle.
        worker.stop()
        worker.run()
    gate.go_on.set()
    thread.join(PATIENCE)
    assert is_over
    asyncio.run(again.until(job_id, lambda job: job.state.is_waiting))
    record = asyncio.run(again.get(job_id))
    assert record.attempts + record.stalls == (1 if timeout else 0)


async def reclaimed(here: Stage, job_id: str) -> bool:
    await here.client.driver.reclaim(now=await here.client.now(), limit=1)
    return (await here.get(job_id)).state is not JobState.INFLIGHT


STUCK = """
import asyncio, sys, threading
from taskharbor import Worker

def stuck(job):
    print("began", flush=True)
    threading.Event().wait()

async def main():
    task = asyncio.ensure_future(worker.run_async())
    await asyncio.to_thread(sys.stdin.readline)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

worker = Worker(sys.argv[1], grace=0.05)
worker.register("work", stuck)
worker.run() if sys.argv[2] == "run" else asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["run", "run_async"])
async def test_a_process_that_ends_gives_back_the_jobs_of_stuck_threads(how: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with stage(connect(url)) as here:
        job_id = await here.enqueue()
        command, pipe = [sys.executable, "-c", STUCK, url, how], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert await finish(asyncio.to_thread(present(process.stdout).readline)) == "began\n"
                if how == "run":
                    process.send_signal(signal.SIGTERM)
                process.communicate("cancel\n", timeout=PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 0
        assert await untouched(here, job_id)


@pytest.mark.usefixtures("impatient")
def test_a_job_that_blocks_the_loop_is_not_given_back_while_it_runs(there: Stage) -> None:
    gate = Gate("done")

    async def blocks(job: Job) -> Any:
        return gate.on_thread(job)

    job_id = asyncio.run(there.enqueue())
    worker = there.worker(blocks, grace=0.05, heartbeat=0.02)
    thread = threading.Thread(target=worker.run)
    thread.start()
    asyncio.run(gate.began())
    worker.stop(now=True)
    again = there.again()
    first = present(asyncio.run(again.get(job_id)).expires_at_us)
    # Long past the grace.
    asyncio.run(again.until(job_id, lambda job: present(job.expires_at_us) > first + SECOND))
    gate.go_on.set()
    thread.join(PATIENCE)
    assert asyncio.run(again.outcomes(job_id)) == [Outcome.DONE]


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
    await eventually(lambda: trouble.hanging >= 1 or len(trouble.refused) > 1)
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
