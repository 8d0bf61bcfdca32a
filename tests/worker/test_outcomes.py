"""What becomes of a job by what its handler does, through a whole worker."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import taskharbor.signals as signals
from records import present
from taskharbor import FixedDelays, Harbor, Job, JobState, Outcome, QueueSettings
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import LATEST, MAX_RESULT_BYTES, SECOND
from worker.stage import Stage, stage


def in_both_ways(function: Callable[[Job], Any]) -> list[Callable[[Job], Any]]:
    """The same handler on the event loop and on a thread."""

    async def on_loop(job: Job) -> Any:
        return function(job)

    def on_thread(job: Job) -> Any:
        return function(job)

    return [on_loop, on_thread]


def run_once(function: Callable[[Job], Any], check: Callable[[Stage, str], Any], **options: Any) -> None:
    async def main(handler: Callable[[Job], Any]) -> None:
        async with stage() as here:
            job_id = await here.enqueue(**options)
            await here.drain(handler)
            await check(here, job_id)

    for handler in in_both_ways(function):
        asyncio.run(main(handler))


def test_a_result_is_kept() -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.result) == (JobState.DONE, b'{"seen":1}')
        assert await here.outcomes(job_id) == [Outcome.DONE]

    run_once(lambda job: {"seen": job.attempt}, check)


@pytest.mark.parametrize("result", ["x" * (MAX_RESULT_BYTES + 1), object()], ids=["large", "odd"])
def test_a_result_that_cannot_be_kept_still_means_done(result: Any) -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.result) == (JobState.DONE, None)

    run_once(lambda job: result, check)


def raising(error: BaseException | type[BaseException]) -> Callable[[Job], Any]:
    def handler(job: Job) -> Any:
        raise error

    return handler


class Abort(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError, "ValueError"),
        (SystemExit, "SystemExit"),
        (KeyboardInterrupt, "KeyboardInterrupt"),
        (Abort, "Abort"),
        (StopIteration, "RuntimeError"),
        (StopAsyncIteration, "StopAsyncIteration"),
        (asyncio.CancelledError, "CancelledError"),
        (TimeoutError, "TimeoutError"),
        (GeneratorExit, "GeneratorExit"),
    ],
)
def test_whatever_is_raised_fails_the_job_and_not_the_worker(error: type[BaseException], kind: str) -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.attempts) == (JobState.DEAD, 1)
        (attempt,) = await here.log(job_id)
        assert (attempt.outcome, attempt.error_type) == (Outcome.DEAD, kind)

    run_once(raising(error), check, max_attempts=1)


def test_sys_exit_fails_the_job_and_not_the_worker() -> None:
    async def check(here: Stage, job_id: str) -> None:
        assert present((await here.get(job_id)).last_error).startswith("SystemExit: 7")

    run_once(lambda job: sys.exit(7), check, max_attempts=1)


def test_a_failure_is_retried_within_the_jobs_backoff() -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.attempts, record.stalls) == (JobState.SCHEDULED, 1, 0)
        error = present(record.last_error)
        assert error.startswith("ValueError")
        assert "Traceback" in error
        assert 0.9 * 300 * SECOND <= record.run_at_us - present(record.failed_at_us) <= 1.1 * 300 * SECOND
        assert await here.outcomes(job_id) == [Outcome.RETRIED]

    run_once(raising(ValueError), check, backoff=(300, 3000))


async def test_retry_by_the_handlers_own_delay_and_policy_until_attempts_are_spent() -> None:
    async with stage() as here:
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


def test_snooze_spends_nothing() -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.attempts, record.stalls) == (JobState.SCHEDULED, 0, 0)
        (attempt,) = await here.log(job_id)
        assert attempt.outcome is Outcome.RELEASED
        assert record.run_at_us == pytest.approx(attempt.ended_at_us + 60 * SECOND, abs=10 * SECOND)

    run_once(raising(signals.Snooze(60)), check, max_attempts=1)


def test_discard_ends_the_job_as_cancelled_with_the_reason() -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.last_error) == (JobState.CANCELLED, "Discard: out of date")

    run_once(raising(signals.Discard("out of date")), check)


def test_unrecoverable_is_dead_at_once() -> None:
    async def check(here: Stage, job_id: str) -> None:
        record = await here.get(job_id)
        assert (record.state, record.attempts) == (JobState.DEAD, 1)
        assert record.last_error == "Unrecoverable: account closed"

    run_once(raising(signals.Unrecoverable("account closed")), check)


async def test_no_handler_is_dead_with_that_reason_and_the_failure_queue_hears_of_it() -> None:
    async with stage() as here:
        await here.client.configure("default", QueueSettings(failure_queue="failures"))
        job_id = await here.enqueue("unheard of")
        await here.drain(lambda job: None)
        record = await here.get(job_id)
        assert (record.state, record.attempts) == (JobState.DEAD, 0)
        assert record.last_error == "HandlerMissing: no handler for type 'unheard of'"
        (stats,) = await here.client.stats("failures")
        assert stats.counts[JobState.READY] == 1


async def test_a_function_that_hands_back_a_coroutine_has_not_done_its_work() -> None:
    async def late() -> None: ...

    async with stage() as here:
        job_id = await here.enqueue(max_attempts=1)
        await here.drain(lambda job: late())
        assert present((await here.get(job_id)).last_error).startswith("NotAwaited")


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


def test_an_unknown_codec_is_dead_even_where_invalid_payloads_are_completed() -> None:
    class Secret:
        name = "secret"

        def encode(self, value: Any) -> bytes:
            return b"?"

    driver = MemoryDriver()
    producer = Harbor(driver)
    producer.codecs.register(Secret())  # type: ignore[arg-type]
    consumer = Harbor(driver)

    @consumer.job(on_invalid="complete")
    async def lenient(n: int) -> None:
        raise AssertionError("never called")

    handle = producer.enqueue("lenient", {"n": 1}, codec="secret")
    consumer.worker(until_empty=True).run()
    record = handle.record()
    assert (record.state, record.attempts) == (JobState.DEAD, 0)
    assert present(record.last_error).startswith("CodecError: unknown codec 'secret'")


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
