"""What becomes of a job by what its handler does and how long it takes, through a whole worker."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import taskharbor.signals as signals
from records import present
from taskharbor import FixedDelays, Job, JobState, Outcome
from taskharbor.jobs import MAX_RESULT_BYTES
from worker.stage import PATIENCE, Gate, Stage, eventually, never, running


class Abort(BaseException):
    pass


def raising(error: BaseException | type[BaseException]) -> Callable[[Job], Any]:
    def handler(job: Job) -> Any:
        raise error

    return handler


OUTCOMES: list[tuple[Callable[[Job], Any], Outcome, JobState, int, str | None]] = [
    (lambda job: {"seen": job.attempt}, Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: "x" * (MAX_RESULT_BYTES + 1), Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: sys.exit(7), Outcome.DEAD, JobState.DEAD, 1, "SystemExit: 7"),
    (raising(ValueError), Outcome.DEAD, JobState.DEAD, 1, "ValueError"),
    (
        raising(OSError("no file caf\udce9\0")),
        Outcome.DEAD,
        JobState.DEAD,
        1,
        "OSError: no file caf\\udce9\\0",
    ),
    (raising(KeyboardInterrupt), Outcome.DEAD, JobState.DEAD, 1, "KeyboardInterrupt"),
    (raising(Abort), Outcome.DEAD, JobState.DEAD, 1, "Abort"),
    (raising(StopIteration), Outcome.DEAD, JobState.DEAD, 1, "RuntimeError"),
    (raising(StopAsyncIteration), Outcome.DEAD, JobState.DEAD, 1, "StopAsyncIteration"),
    (raising(asyncio.CancelledError), Outcome.DEAD, JobState.DEAD, 1, "CancelledError"),
    (raising(TimeoutError), Outcome.DEAD, JobState.DEAD, 1, "TimeoutError"),
    (raising(GeneratorExit), Outcome.DEAD, JobState.DEAD, 1, "GeneratorExit"),
    (raising(signals.Snooze(60)), Outcome.RELEASED, JobState.SCHEDULED, 0, None),
    (raising(signals.Cancel("old")), Outcome.CANCELLED, JobState.CANCELLED, 0, "Cancel: old"),
    (raising(signals.Unrecoverable("closed")), Outcome.DEAD, JobState.DEAD, 1, "Unrecoverable: closed"),
]


@pytest.mark.parametrize("way", ["loop", "thread"])
async def test_how_a_handler_ends_decides_and_never_harms_the_worker(here: Stage, way: str) -> None:
    """What is written in each case: tests/test_decide.py."""
    functions = [case[0] for case in OUTCOMES]

    def on_thread(job: Job) -> Any:
        return functions[int(job.payload)](job)

    async def on_loop(job: Job) -> Any:
        return on_thread(job)

    ids = await here.enqueue_many(len(OUTCOMES), max_attempts=1, timeout=PATIENCE)
    unknown = await here.enqueue("unheard of")
    await here.drain(on_loop if way == "loop" else on_thread)
    for job_id, (_, outcome, state, attempts, error) in zip(ids, OUTCOMES, strict=True):
        record = await here.get(job_id)
        assert (record.state, record.attempts, record.stalls) == (state, attempts, 0)
        assert (record.last_error or "").startswith(error or "")
        (attempt,) = await here.log(record.id)
        assert attempt.outcome is outcome
        assert attempt.error_type == (error and error.partition(":")[0])
    record = await here.get(unknown)
    assert (record.state, record.attempts) == (JobState.DEAD, 0)
    assert record.last_error == "HandlerMissing: no handler for type 'unheard of'"


async def test_retry_by_the_handlers_own_delay_and_policy_until_attempts_are_spent(here: Stage) -> None:
    seen: list[int] = []

    async def handler(job: Job) -> None:
        seen.append(job.attempt)
        raise signals.Retry("not yet", delay=0) if job.attempt < 3 else ValueError("no")

    worker = here.worker(until_empty=True)
    worker.register("work", handler, retry=FixedDelays([0]))
    job_id = await here.enqueue(max_attempts=4)
    await worker.run_async()
    assert seen == [1, 2, 3, 4]
    assert await here.outcomes(job_id) == [Outcome.RETRIED] * 3 + [Outcome.DEAD]
    assert [attempt.fence for attempt in await here.log(job_id)] == [1, 2, 3, 4]
    assert worker.outcomes == {Outcome.RETRIED: 3, Outcome.DEAD: 1}


# -- timeouts on the event loop and on threads (in processes: test_processes) ---------------------------------------


async def test_an_async_handler_is_cancelled_by_its_timeout_and_retried_as_usual(here: Stage) -> None:
    async def handler(job: Job) -> str:
        if job.attempt == 1:
            await never()
        return "second time"

    last, job_id = [await here.enqueue(timeout=0.05, backoff=(0, 0), max_attempts=n) for n in (1, 2)]
    await here.drain(handler)
    record = await here.get(last)
    assert (record.state, record.attempts) == (JobState.DEAD, 1)
    assert record.last_error == "JobTimeout: took longer than its timeout of 0.05 s"
    assert await here.outcomes(job_id) == [Outcome.RETRIED, Outcome.DONE]


@pytest.mark.parametrize("is_stopped_as_well", [False, True])
async def test_a_thread_keeps_its_lease_until_it_ends_too_late(here: Stage, is_stopped_as_well: bool) -> None:
    gate = Gate("too late")

    def handler(job: Job) -> Any:
        gate.until_stopped(job)
        return gate.on_thread(job)

    job_id = await here.enqueue(timeout=0.05, max_attempts=1)
    worker = here.worker(handler, heartbeat=0.02)
    async with running(worker):
        await eventually(lambda: gate.reasons == ["timeout"])
        first = present((await here.get(job_id)).expires_at_us)
        await here.until(job_id, lambda job: present(job.expires_at_us) > first)
        if is_stopped_as_well:
            (hold,) = worker._engines[0].assignment.holds
            worker.stop(now=True)
            await eventually(lambda: hold.task is None or hold.task.cancelling() >= 2)
        gate.go_on.set()
        record = await here.ended(job_id)
    assert (record.state, record.attempts, record.stalls) == (JobState.DEAD, 1, 0)
    assert present(record.last_error).startswith("JobTimeout")
