"""A worker's life: how it starts, how often, where, and when it ends by itself."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskharbor import FakeClock, InvalidRequest, Job, JobState, Outcome, Worker
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import TaskHarborError
from worker.stage import PATIENCE, Gate, Stage, TroubledDriver, eventually, finish, running, stage


async def nothing(job: Job) -> None: ...


async def test_a_worker_can_be_run_twice(here: Stage) -> None:
    worker = here.worker(nothing, until_empty=True)
    for _ in range(2):
        job_id = await here.enqueue()
        await finish(worker.run_async())
        assert await here.state(job_id) is JobState.DONE
    assert worker.outcomes == {Outcome.DONE: 2}


def test_a_worker_can_be_run_on_one_loop_after_another(tmp_path: Any) -> None:
    worker = Worker(f"sqlite:///{tmp_path}/jobs.db", until_empty=True)
    for _ in range(2):
        asyncio.run(finish(worker.run_async()))


async def test_a_worker_runs_once_at_a_time(here: Stage) -> None:
    worker = here.worker(nothing)
    async with running(worker):
        await eventually(lambda: worker.snapshot()["serving"])
        with pytest.raises(RuntimeError, match="running already"):
            await worker.run_async()
        assert worker.snapshot()["serving"]


async def test_a_worker_that_drains_runs_but_does_not_serve(here: Stage) -> None:
    gate = Gate()
    await here.enqueue()
    worker = here.worker(gate.handler)
    async with running(worker):
        await gate.began.wait()
        worker.stop()
        await eventually(lambda: not worker.snapshot()["serving"])
        assert worker.snapshot()["running"]
        assert worker.snapshot()["held"] == 1
        gate.go_on.set()
        await eventually(lambda: not worker.snapshot()["running"])


async def test_stop_before_start_takes_no_job(here: Stage) -> None:
    job_id = await here.enqueue()
    worker = here.worker(nothing)
    worker.stop()
    await finish(worker.run_async())
    assert await here.outcomes(job_id) == []
    again = here.worker(nothing, until_empty=True)
    again.stop()
    await finish(again.run_async())
    await finish(again.run_async())
    assert await here.state(job_id) is JobState.DONE


async def test_max_jobs_takes_so_many_and_finishes_them(here: Stage) -> None:
    ids = await here.enqueue_many(7)
    worker = here.worker(nothing, max_jobs=5, grace=0.0)
    await finish(worker.run_async())
    states = [await here.state(job_id) for job_id in ids]
    assert states == [JobState.DONE] * 5 + [JobState.READY] * 2
    assert await here.outcomes(ids[5]) == []


async def test_max_jobs_waits_for_the_last_one_however_long_it_takes(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    task = asyncio.ensure_future(here.worker(gate.handler, max_jobs=1, grace=0.0).run_async())
    await gate.began.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 0.1)
    gate.go_on.set()
    await finish(task)
    assert await here.state(job_id) is JobState.DONE


async def test_max_seconds(here: Stage) -> None:
    await finish(here.worker(nothing, max_seconds=0.05).run_async())


# -- until empty ----------------------------------------------------------------------------------------------------


async def test_until_empty_leaves_what_is_for_later_and_what_is_paused(here: Stage) -> None:
    now = await here.enqueue()
    later = await here.enqueue(delay=3600)
    paused = await here.enqueue(queue="paused")
    await here.pause("paused")
    await here.drain(nothing, queues=["default", "paused"])
    assert await here.state(now) is JobState.DONE
    assert await here.state(later) is JobState.SCHEDULED
    assert await here.state(paused) is JobState.READY


async def test_until_empty_waits_for_what_another_worker_holds(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    other = here.worker(gate.handler)
    async with running(other):
        await gate.began.wait()
        task = asyncio.ensure_future(here.drain(nothing))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.2)
        other.stop(now=True)
        await finish(task)
    assert await here.outcomes(job_id) == [Outcome.RELEASED, Outcome.DONE]


async def test_until_empty_serves_jobs_that_its_jobs_enqueue(here: Stage) -> None:
    seen: list[bytes] = []

    async def chain(job: Job) -> None:
        seen.append(job.payload)
        if job.payload != b"0":
            await here.enqueue(payload=int(job.payload) - 1)

    await here.enqueue(payload=5)
    await here.drain(chain)
    assert seen == [b"5", b"4", b"3", b"2", b"1", b"0"]


async def test_until_empty_with_types_does_not_wait_for_others_jobs(here: Stage) -> None:
    mine, other = await here.enqueue(), await here.enqueue("somebody else's")
    await here.drain(nothing, types=["work"])
    assert await here.state(mine) is JobState.DONE
    assert await here.state(other) is JobState.READY


# -- what to claim --------------------------------------------------------------------------------------------------


def queues_in_order() -> tuple[list[str], Callable[[Job], Awaitable[None]]]:
    order: list[str] = []

    async def handler(job: Job) -> None:
        order.append(job.queue)

    return order, handler


async def test_queues_are_served_in_turn(here: Stage) -> None:
    order, handler = queues_in_order()
    for queue in ("a", "b", "c"):
        await here.enqueue_many(20, queue=queue)
    await here.drain(handler, queues=["a", "b", "c"], concurrency=1, prefetch=0)
    assert set(order[:3]) == {"a", "b", "c"}
    for start in range(0, 60, 3):
        assert sorted(order[start : start + 3]) == ["a", "b", "c"]


async def test_a_backlog_in_one_queue_does_not_starve_another(here: Stage) -> None:
    order, handler = queues_in_order()
    await here.enqueue_many(500, queue="busy")
    await here.enqueue(queue="quiet")
    await here.drain(handler, queues=["busy", "quiet"], concurrency=2, batch=10)
    assert order.index("quiet") < 100


async def test_slow_jobs_are_not_hoarded(here: Stage) -> None:
    go_on = asyncio.Event()
    taken: dict[str, int] = {"one": 0, "two": 0}

    def blocking(name: str) -> Any:
        async def handler(job: Job) -> None:
            taken[name] += 1
            await go_on.wait()

        return handler

    await here.enqueue_many(10)
    one, two = (
        here.worker(blocking("one"), concurrency=2),
        here.worker(blocking("two"), concurrency=2),
    )
    async with running(one):
        await eventually(lambda: taken["one"] == 2)
        async with running(two):
            await eventually(lambda: taken["two"] == 2)
            assert (one.snapshot()["held"], two.snapshot()["held"]) == (2, 2)
            go_on.set()


# -- time -----------------------------------------------------------------------------------------------------------


async def test_a_given_clock_is_the_only_one() -> None:
    clock = FakeClock()
    async with stage(MemoryDriver(clock=clock), clock) as here:
        job_id = await here.enqueue(delay=3600)
        await here.drain(nothing, clock=clock)
        assert await here.state(job_id) is JobState.SCHEDULED
        clock.advance(3600)
        await here.drain(nothing, clock=clock)
        (attempt,) = await here.log(job_id)
        assert attempt.ended_at_us == attempt.reserved_at_us == clock.now()


# -- when something breaks ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("operation", ["reserve", "settle", "extend_lease"])
async def test_a_driver_that_breaks_ends_the_worker_with_its_error(operation: str) -> None:
    class Bug(TaskHarborError):
        pass

    driver = TroubledDriver()

    async def broken(*args: Any, **options: Any) -> Any:
        raise Bug(operation)

    async with stage(MemoryDriver(driver._store)) as here:

        async def handler(job: Job) -> None:
            if operation == "extend_lease":
                await asyncio.Event().wait()

        await here.enqueue()
        # With all the time in the world: what broke cannot be waited for.
        worker = Worker(driver, heartbeat=0.02, grace=100 * PATIENCE)
        worker.register("work", handler)
        setattr(driver, operation, broken)
        with pytest.raises(Bug, match=operation):
            await finish(worker.run_async())


@pytest.mark.usefixtures("impatient")
async def test_a_loop_that_breaks_while_the_last_job_is_waited_for_ends_the_worker() -> None:
    class Bug(TaskHarborError):
        pass

    class Breaking(MemoryDriver):
        async def settle(self, *args: Any, **options: Any) -> Any:
            raise Bug("settle")

    driver = MemoryDriver()
    async with stage(driver) as here:
        fetched = threading.Event()

        async def handler(job: Job) -> None:
            await eventually(fetched.is_set)

        await here.enqueue()
        worker = Worker(Breaking(driver._store), max_jobs=1, grace=100 * PATIENCE)
        worker.register("work", handler)
        task = asyncio.ensure_future(worker.run_async())
        await eventually(lambda: worker.snapshot()["held"] == 1)
        engine = worker._engines[0]
        assert engine is not None
        # By then the fetch is over and the engine waits for the job, without a limit: a break must end that wait.
        for _ in range(20):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), engine._loop))
        fetched.set()
        with pytest.raises(Bug):
            await finish(task)


@pytest.mark.parametrize(
    "options",
    [
        {"queues": []},
        {"queues": "default"},
        {"types": "work"},
        {"concurrency": 0},
        {"lease": 0.5},
        {"lease": 10, "heartbeat": 6},
        {"heartbeat": 0},
        {"prefetch": -1},
        {"batch": 0},
        {"poll_interval": 0},
        {"grace": -1},
        {"max_jobs": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Worker("memory://", **options)


def test_a_type_has_one_handler() -> None:
    worker = Worker("memory://")
    worker.register("work", nothing)
    with pytest.raises(InvalidRequest, match="registered already"):
        worker.register("work", nothing)
