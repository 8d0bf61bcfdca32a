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
from worker.stage import Stage, eventually

variable: ContextVar[str] = ContextVar("variable", default="clean")


@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_context_variables_do_not_leak_from_job_to_job(kind: str, here: Stage) -> None:
    seen: list[str] = []

    def look(job: Job) -> None:
        seen.append(variable.get())
        variable.set(job.id)

    async def on_loop(job: Job) -> None:
        look(job)

    await here.enqueue_many(5)
    variable.set("clean")
    await here.drain(on_loop if kind == "loop" else look, concurrency=1)
    assert seen == ["clean"] * 5
    assert variable.get() == "clean"


@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_current_job_is_the_one_that_runs_here(kind: str, here: Stage) -> None:
    all_there = threading.Barrier(3)
    on_loop_there: list[str] = []
    pairs: set[tuple[str, str]] = set()

    async def on_loop(job: Job) -> None:
        on_loop_there.append(job.id)
        await eventually(lambda: len(on_loop_there) == 3)
        pairs.add((job.id, current_job().id))
        pairs.add((job.id, await asyncio.ensure_future(in_a_task())))

    async def in_a_task() -> str:
        return current_job().id

    def on_thread(job: Job) -> None:
        all_there.wait(30)
        pairs.add((job.id, current_job().id))

    ids = await here.enqueue_many(3)
    await here.drain(on_loop if kind == "loop" else on_thread, concurrency=3)
    assert pairs == {(job_id, job_id) for job_id in ids}


def test_there_is_no_current_job_outside() -> None:
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


# -- middleware, through a worker -----------------------------------------------------------------------------------


def test_middleware_of_the_app_wraps_every_handler_in_order() -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        async def layer(job: Job, call_next: Any) -> Any:
            seen.append(f"{name}: {job.type} {job.arguments.n}")
            result = await call_next(job)
            seen.append(f"{name}: {result}")
            return result

        return layer

    harbor = Harbor(MemoryDriver(), middleware=[named("outer"), named("inner")])

    @harbor.job
    async def double(n: int) -> int:
        return 2 * n

    @harbor.job
    def triple(n: int) -> int:
        return 3 * n

    double.enqueue(2)
    triple.enqueue(3)
    harbor.worker(until_empty=True, concurrency=1).run()
    assert seen == [
        *("outer: double 2", "inner: double 2", "inner: 4", "outer: 4"),
        *("outer: triple 3", "inner: triple 3", "inner: 9", "outer: 9"),
    ]


def test_middleware_may_answer_fail_or_change_the_result() -> None:
    async def gate(job: Job, call_next: Any) -> Any:
        if job.headers.get("say") == "cached":
            return "from the cache"
        if job.headers.get("say") == "refuse":
            raise PermissionError("not you")
        return (await call_next(job)).upper()

    harbor = Harbor(MemoryDriver(), middleware=[gate], max_attempts=1)
    calls: list[str] = []

    @harbor.job
    async def greet(name: str) -> str:
        calls.append(name)
        return f"hello {name}"

    cached = greet.options(headers={"say": "cached"}).enqueue("a")
    refused = greet.options(headers={"say": "refuse"}).enqueue("b")
    served = greet.enqueue("c")
    harbor.worker(until_empty=True).run()
    assert cached.result(30) == "from the cache"
    assert served.result(30) == "HELLO C"
    assert present(refused.record().last_error).startswith("PermissionError: not you")
    assert calls == ["c"]


def test_middleware_does_not_see_an_invalid_payload() -> None:
    seen: list[str] = []

    async def layer(job: Job, call_next: Any) -> Any:
        seen.append(job.id)
        return await call_next(job)

    harbor = Harbor(MemoryDriver(), middleware=[layer])

    @harbor.job
    async def typed(n: int) -> None: ...

    handle = harbor.enqueue("typed", {"n": "x"})
    harbor.worker(until_empty=True).run()
    assert handle.state() is JobState.DEAD
    assert seen == []
