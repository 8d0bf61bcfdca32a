"""What a handler sees of its job, and what it must not see of another's."""

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from records import present
from taskharbor import Harbor, InvalidRequest, Job, JobState, current_job
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import SECOND, to_micros
from worker.stage import Stage

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
        assert to_micros(present(job.deadline)) - job.started_at_us == 20 * SECOND
        with pytest.raises(InvalidRequest, match="progress of"):
            job.progress("x" * 5000)

    job_id = await here.enqueue(payload=[1], headers={"trace": "abc"}, key="k", timeout=20, max_attempts=7)
    await here.drain(handler)
    record = await here.get(job_id)
    assert record.state is JobState.DONE, record.last_error


def test_middleware_wraps_every_handler_in_order_and_may_answer_fail_or_change_the_result() -> None:
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

    @harbor.job
    def triple(n: int) -> Any:
        return 3 * n

    invalid = harbor.enqueue("double", {"n": "x"})
    handles = [double.enqueue(2), triple.enqueue(3), double.options(headers={"say": "cached"}).enqueue(4)]
    refused = double.options(headers={"say": "refuse"}).enqueue(5)
    harbor.worker(until_empty=True, concurrency=1).run()
    assert [handle.result(30) for handle in handles] == ["outer inner 4", "outer inner 9", "from the cache"]
    assert present(refused.record().last_error).startswith("PermissionError: not you")
    # No middleware sees an invalid payload.
    assert invalid.state() is JobState.DEAD
    assert seen == [
        *("outer: double 2", "inner: double 2", "outer: triple 3", "inner: triple 3"),
        *("outer: double 4", "outer: double 5"),
    ]
