"""What becomes of a job by what its handler does, through a whole worker."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import taskharbor.signals as signals
from records import present
from taskharbor import FixedDelays, Harbor, Job, JobRecord, JobState, Outcome, QueueSettings
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import LATEST, MAX_RESULT_BYTES, SECOND
from worker.stage import Stage


class Abort(BaseException):
    pass


def raising(error: BaseException | type[BaseException]) -> Callable[[Job], Any]:
    def handler(job: Job) -> Any:
        raise error

    return handler


async def run_once(here: Stage, function: Callable[[Job], Any], way: str, **options: Any) -> JobRecord:
    """The job's record after one run of its handler, on the event loop or on a thread."""

    async def on_loop(job: Job) -> Any:
        return function(job)

    job_id = await here.enqueue(**options)
    await here.drain(on_loop if way == "loop" else function)
    return await here.get(job_id)


both_ways = pytest.mark.parametrize("way", ["loop", "thread"])

OUTCOMES: list[tuple[Callable[[Job], Any], Outcome, JobState, int, str | None]] = [
    (lambda job: {"seen": job.attempt}, Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: "x" * (MAX_RESULT_BYTES + 1), Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: sys.exit(7), Outcome.DEAD, JobState.DEAD, 1, "SystemExit: 7"),
    (raising(ValueError), Outcome.DEAD, JobState.DEAD, 1, "ValueError"),
    (raising(KeyboardInterrupt), Outcome.DEAD, JobState.DEAD, 1, "KeyboardInterrupt"),
    (raising(Abort), Outcome.DEAD, JobState.DEAD, 1, "Abort"),
    (raising(StopIteration), Outcome.DEAD, JobState.DEAD, 1, "RuntimeError"),
    (raising(StopAsyncIteration), Outcome.DEAD, JobState.DEAD, 1, "StopAsyncIteration"),
    (raising(asyncio.CancelledError), Outcome.DEAD, JobState.DEAD, 1, "CancelledError"),
    (raising(TimeoutError), Outcome.DEAD, JobState.DEAD, 1, "TimeoutError"),
    (raising(GeneratorExit), Outcome.DEAD, JobState.DEAD, 1, "GeneratorExit"),
    (raising(signals.Snooze(60)), Outcome.RELEASED, JobState.SCHEDULED, 0, None),
    (raising(signals.Discard("old")), Outcome.CANCELLED, JobState.CANCELLED, 0, "Discard: old"),
    (raising(signals.Unrecoverable("closed")), Outcome.DEAD, JobState.DEAD, 1, "Unrecoverable: closed"),
]


@both_ways
@pytest.mark.parametrize(("function", "outcome", "state", "attempts", "error"), OUTCOMES)
async def test_how_a_handler_ends_decides_and_never_harms_the_worker(
    here: Stage,
    way: str,
    function: Callable[[Job], Any],
    outcome: Outcome,
    state: JobState,
    attempts: int,
    error: str | None,
) -> None:
    """What is written in each case: tests/test_decide.py."""
    record = await run_once(here, function, way, max_attempts=1)
    assert (record.state, record.attempts, record.stalls) == (state, attempts, 0)
    assert (record.last_error or "").startswith(error or "")
    (attempt,) = await here.log(record.id)
    assert attempt.outcome is outcome
    assert attempt.error_type == (error and error.partition(":")[0])


@both_ways
async def test_a_failure_is_retried_within_the_jobs_backoff(here: Stage, way: str) -> None:
    record = await run_once(here, raising(ValueError), way, backoff=(300, 3000))
    assert (record.state, record.attempts, record.stalls) == (JobState.SCHEDULED, 1, 0)
    error = present(record.last_error)
    assert error.startswith("ValueError")
    assert "Traceback" in error
    assert 0.9 * 300 * SECOND <= record.run_at_us - present(record.failed_at_us) <= 1.1 * 300 * SECOND
    assert await here.outcomes(record.id) == [Outcome.RETRIED]


async def test_retry_by_the_handlers_own_delay_and_policy_until_attempts_are_spent(here: Stage) -> None:
    seen: list[int] = []

    async def handler(job: Job) -> None:
        seen.append(job.attempt)
        raise signals.Retry("not yet", delay=0) if job.attempt < 3 else ValueError("no")

    worker = here.worker(until_empty=True)
    worker.register("work", handler, retry=FixedDelays([0]))
    job_id = await here.enqueue(max_attempts=4)
    await worker.run_async()
    record = await here.get(job_id)
    assert (record.state, record.attempts) == (JobState.DEAD, 4)
    assert seen == [1, 2, 3, 4]
    assert await here.outcomes(job_id) == [Outcome.RETRIED] * 3 + [Outcome.DEAD]
    assert [attempt.fence for attempt in await here.log(job_id)] == [1, 2, 3, 4]
    assert worker.outcomes == {Outcome.RETRIED: 3, Outcome.DEAD: 1}


async def test_no_handler_is_dead_with_that_reason_and_the_failure_queue_hears_of_it(here: Stage) -> None:
    await here.client.configure("default", QueueSettings(failure_queue="failures"))
    job_id = await here.enqueue("unheard of")
    await here.drain(lambda job: None)
    record = await here.get(job_id)
    assert (record.state, record.attempts) == (JobState.DEAD, 0)
    assert record.last_error == "HandlerMissing: no handler for type 'unheard of'"
    (stats,) = await here.client.stats("failures")
    assert stats.counts[JobState.READY] == 1


def test_invalid_payloads() -> None:
    harbor = Harbor(MemoryDriver())

    @harbor.job
    async def strict(n: int) -> None:
        raise AssertionError("never called")

    @harbor.job(on_invalid="complete")
    async def lenient(n: int) -> None:
        raise AssertionError("never called")

    bad = harbor.enqueue("strict", {"n": "one"})
    tolerated = harbor.enqueue("lenient", {"n": "one"})
    harbor.worker(until_empty=True).run()
    record = bad.record()
    assert (record.state, record.attempts) == (JobState.DEAD, 0)
    assert present(record.last_error).startswith("PayloadInvalid: the payload does not fit")
    assert tolerated.record().state is JobState.DONE


def test_an_error_with_text_no_backend_stores_spoils_nothing(tmp_path: Any) -> None:
    harbor = Harbor(f"sqlite:///{tmp_path}/jobs.db")

    @harbor.job(max_attempts=1)
    async def odd() -> None:
        raise OSError("no such file: caf\udce9\0")

    @harbor.job(max_attempts=2)
    async def late() -> None:
        raise signals.Retry(delay=1e15)

    one, two = odd.enqueue(), late.enqueue()
    harbor.worker(until_empty=True).run()
    assert present(one.record().last_error).startswith("OSError: no such file: caf\\udce9")
    assert two.record().state is JobState.SCHEDULED
    assert two.record().run_at_us == LATEST
    harbor.close()
