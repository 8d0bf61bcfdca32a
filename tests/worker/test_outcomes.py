"""What becomes of a job by what its handler does and how long it takes, and what the handler sees of it."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

import taskharbor.signals as signals
from records import present
from taskharbor import (
    FixedDelays,
    Harbor,
    InvalidRequest,
    Job,
    JobRequest,
    JobState,
    Outcome,
    ThreadsLost,
    current_job,
)
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import MAX_RESULT_BYTES, to_datetime
from taskharbor.worker.run import MOST_LOST
from worker.stage import PATIENCE, Gate, Stage, begun, eventually, finish, logged, never, running


class Abort(BaseException):
    pass


def raising(error: BaseException | type[BaseException]) -> Callable[[Job], Any]:
    def handler(job: Job) -> Any:
        raise error

    return handler


UNUSUAL: tuple[type[BaseException], ...] = (ValueError, KeyboardInterrupt, StopAsyncIteration, TimeoutError)
UNUSUAL += (asyncio.CancelledError, GeneratorExit, Abort)
OUTCOMES: list[tuple[Callable[[Job], Any], Outcome, JobState, int, str | None]] = [
    (lambda job: {"seen": job.attempt}, Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: "x" * (MAX_RESULT_BYTES + 1), Outcome.DONE, JobState.DONE, 0, None),
    (lambda job: sys.exit(7), Outcome.DEAD, JobState.DEAD, 1, "SystemExit: 7"),
    (raising(OSError("caf\udce9\0")), Outcome.DEAD, JobState.DEAD, 1, "OSError: caf\\udce9\\0"),
    (raising(StopIteration), Outcome.DEAD, JobState.DEAD, 1, "RuntimeError"),
    *((raising(error), Outcome.DEAD, JobState.DEAD, 1, error.__name__) for error in UNUSUAL),
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
    waits = await here.enqueue("of another app")
    await here.drain(on_loop if way == "loop" else on_thread)
    assert {await here.state(waits), await here.state(unknown)} == {JobState.READY}
    await here.drain(every_type=True)
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
    record, error = await here.get(last), "JobTimeout: took longer than its timeout of 0.05 s"
    assert (record.state, record.attempts, record.last_error) == (JobState.DEAD, 1, error)
    assert await here.outcomes(job_id) == [Outcome.RETRIED, Outcome.DONE]


@pytest.mark.parametrize("is_stopped_as_well", [False, True])
async def test_a_timed_out_thread_keeps_its_lease_till_it_ends(here: Stage, is_stopped_as_well: bool) -> None:
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


async def test_threads_that_hang_past_timeout_and_grace_fail_their_jobs_and_are_replaced(here: Stage) -> None:
    """One may come back. With one more lost than it may lose the worker stops, and says that only a new process helps."""
    gates, returned = [Gate() for _ in range(MOST_LOST + 2)], threading.Event()

    def hangs(job: Job) -> None:
        if (number := int(job.payload)) < len(gates):
            gates[number].on_thread(job)
            returned.set()

    worker = here.worker(hangs, concurrency=1, grace=0.02, heartbeat=0.02)
    try:
        with logged() as told:
            for number, gate in enumerate(gates):
                job_id = await here.enqueue(payload=number, timeout=0.05, max_attempts=1)
                if number == 0:
                    task = await begun(worker, gate)
                record = await here.ended(job_id)
                assert (record.state, record.attempts, record.stalls) == (JobState.DEAD, 1, 0)
                assert present(record.last_error).startswith("JobTimeout")
                if number == 0:
                    overdue, lost = [one for one in told.buffer if job_id in one.getMessage()][:2]
                    assert "is overdue" in overdue.getMessage()
                    assert "its thread is lost" in lost.getMessage()
                    assert all("in on_thread" in present(one.exc_text) for one in (overdue, lost))
                    gate.go_on.set()
                    await eventually(returned.is_set)
                # Its place, the only one, is free, except in a worker that stops.
                if number <= MOST_LOST:
                    assert (await here.ended(await here.enqueue(payload=99))).state is JobState.DONE
            with pytest.raises(ThreadsLost, match="4 threads did not come back"):
                await finish(task)
    finally:
        for gate in gates:
            gate.go_on.set()


# -- what a handler sees of its job, and what it must not see of another's --------------------------------------------

variable: ContextVar[str] = ContextVar("variable", default="clean")


@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_a_context_and_the_current_job_last_as_long_as_the_job(kind: str, here: Stage) -> None:
    on_loop_there, on_threads_there, over = asyncio.Barrier(3), threading.Barrier(3), asyncio.Event()
    seen: list[tuple[str, str, str]] = []
    orphans: list[asyncio.Task[tuple[str, str]]] = []

    async def orphan() -> tuple[str, str]:
        await over.wait()
        return variable.get(), current_job().id

    async def on_loop(job: Job) -> None:
        before = variable.get()
        variable.set(job.id)
        await on_loop_there.wait()
        seen.append((before, variable.get(), current_job().id))
        orphans.append(asyncio.create_task(orphan()))

    def on_thread(job: Job) -> None:
        before = variable.get()
        variable.set(job.id)
        on_threads_there.wait(30)
        seen.append((before, variable.get(), current_job().id))

    ids = await here.enqueue_many(6)
    await here.drain(on_loop if kind == "loop" else on_thread, concurrency=3)
    assert sorted(seen) == [("clean", job_id, job_id) for job_id in ids]
    over.set()
    # What a handler leaves behind on the loop is still its job's.
    assert sorted(await asyncio.gather(*orphans)) == [(one, one) for one in (ids if kind == "loop" else [])]
    assert variable.get() == "clean"
    with pytest.raises(RuntimeError, match="inside a handler only"):
        current_job()


async def test_what_a_job_says_of_itself(here: Stage) -> None:
    async def handler(job: Job) -> None:
        assert (job.headers, job.key, job.payload) == ({"trace": "abc"}, "k", b"[1]")
        assert (job.fence, job.attempt, job.max_attempts, job.should_stop) == (1, 1, 7, False)
        assert present(job.deadline) - job.started_at == timedelta(seconds=20)
        assert job.started_at == to_datetime(job.started_at_us)

    job_id = await here.enqueue(payload=[1], headers={"trace": "abc"}, key="k", timeout=20, max_attempts=7)
    await here.drain(handler)
    record = await here.get(job_id)
    assert record.state is JobState.DONE, record.last_error


def test_middleware_wraps_handlers_in_order_and_may_answer_fail_or_change_the_result() -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        async def layer(job: Job, call_next: Any) -> Any:
            seen.append(f"{name}: {job.type} {job.arguments.n}")
            if job.headers.get("say") == "cached":
                return "from the cache"
            if job.headers.get("say") == "refuse":
                raise PermissionError("not you")
            return f"{name} {await call_next(job)}"

        return layer

    harbor = Harbor(MemoryDriver(), middleware=[named("outer"), named("inner")], max_attempts=1)

    @harbor.job
    async def double(n: int) -> Any:
        return 2 * n

    invalid = harbor.client.enqueue(JobRequest(type="double", payload={"n": "x"}))
    handles = [double.enqueue(2), double.options(headers={"say": "cached"}).enqueue(4)]
    refused = double.options(headers={"say": "refuse"}).enqueue(5)
    harbor.worker(until_empty=True, concurrency=1).run()
    assert [handle.result(30) for handle in handles] == ["outer inner 4", "from the cache"]
    assert present(refused.record().last_error).startswith("PermissionError: not you")
    # No middleware sees an invalid payload.
    assert invalid.state() is JobState.DEAD
    assert seen == ["outer: double 2", "inner: double 2", "outer: double 4", "outer: double 5"]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_worker_enters_the_lifespan_before_its_first_job_and_leaves_it_after_the_last(way: str) -> None:
    seen: list[object] = []

    @contextmanager
    def pool() -> Iterator[str]:
        seen.append("opened")
        yield "the pool"
        seen.append("closed")

    @asynccontextmanager
    async def async_pool() -> AsyncIterator[str]:
        with pool() as opened:
            yield opened

    harbor = Harbor(MemoryDriver(), lifespan=pool if way == "sync" else async_pool)

    @harbor.job
    async def on_loop() -> None:
        await asyncio.sleep(0)
        seen.append(current_job().state)

    @harbor.job
    def on_thread() -> None:
        seen.append(current_job().state)

    on_loop.enqueue()
    on_thread.enqueue()
    harbor.worker(until_empty=True).run()
    assert seen == ["opened", "the pool", "the pool", "closed"]
    with pytest.raises(InvalidRequest, match="returns a context manager"):
        Harbor("memory://", lifespan=dict).worker(every_type=True).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["start", "end", ""])
def test_the_log_names_a_lifespan_that_fails_and_where(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    @contextmanager
    def pool() -> Iterator[None]:
        for here in ("start", "end"):
            if here == place:
                raise KeyError("NOPE")
            if here == "start":
                yield

    def refuse() -> None:
        raise KeyError("NOPE")

    worker = Harbor("memory://", lifespan=pool).worker(every_type=True, until_empty=True)
    if not place:  # An error that passes through is not the lifespan's.
        monkeypatch.setattr(worker, "_run_async", refuse)
    with pytest.raises(KeyError, match="NOPE"):
        worker.run()
    told = [one for one in caplog.records if "lifespan" in one.message]
    assert [one.message for one in told] == ([f"the lifespan pool failed at its {place}"] if place else [])
    assert [(one.levelname, one.exc_info and one.exc_info[0]) for one in told] == [("ERROR", KeyError)] * len(
        told
    )
