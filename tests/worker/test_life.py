"""A worker's life: how it starts, how often, where, and when it ends by itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from taskharbor import InvalidRequest, Job, JobState, Outcome, Worker
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import SchemaMismatch
from worker.stage import PATIENCE, Gate, Stage, begun, eventually, finish, running, stage


async def nothing(job: Job) -> None: ...


def test_a_worker_can_be_run_again_and_on_one_loop_after_another(tmp_path: Path) -> None:
    driver = connect(f"sqlite:///{tmp_path}/jobs.db")
    worker = Stage(driver).worker(nothing, until_empty=True)

    async def run_twice() -> None:
        async with stage(driver) as here:
            for _ in range(2):
                job_id = await here.enqueue()
                await finish(worker.run_async())
                assert await here.state(job_id) is JobState.DONE

    asyncio.run(run_twice())
    asyncio.run(run_twice())
    assert worker.outcomes == {Outcome.DONE: 4}


async def test_a_worker_runs_once_at_a_time_and_drains_without_serving(here: Stage) -> None:
    gate = Gate()
    await here.enqueue()
    worker = here.worker(gate.on_loop)
    async with running(worker):
        await gate.began()
        with pytest.raises(RuntimeError, match="running already"):
            await worker.run_async()
        with pytest.raises(InvalidRequest, match="is running: register 'late' before it starts"):
            worker.register("late", nothing)
        assert worker.snapshot()["serving"]
        worker.stop()
        await eventually(lambda: not worker.snapshot()["serving"])
        assert (worker.snapshot()["running"], worker.snapshot()["held"]) == (True, 1)
        gate.go_on.set()
        await eventually(lambda: not worker.snapshot()["running"])


async def test_a_stop_before_the_start_takes_no_job_and_holds_for_one_run(here: Stage) -> None:
    job_id = await here.enqueue()
    worker = here.worker(nothing, until_empty=True)
    worker.stop()
    await finish(worker.run_async())
    assert await here.outcomes(job_id) == []
    await finish(worker.run_async())
    assert await here.state(job_id) is JobState.DONE


async def test_max_jobs_takes_so_many_and_waits_for_the_last_however_long_it_takes(here: Stage) -> None:
    gate = Gate()
    ids = await here.enqueue_many(7)
    task = await begun(here.worker(gate.on_loop, max_jobs=5, grace=0.0), gate)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 0.1)
    gate.go_on.set()
    await finish(task)
    assert [await here.state(job_id) for job_id in ids] == [JobState.DONE] * 5 + [JobState.READY] * 2
    assert await here.outcomes(ids[5]) == []
    await finish(here.worker(nothing, max_seconds=0.05).run_async())


# -- until empty ----------------------------------------------------------------------------------------------------


async def test_until_empty_serves_what_its_jobs_enqueue_and_leaves_what_is_not_for_now(here: Stage) -> None:
    seen: list[bytes] = []

    async def chain(job: Job) -> None:
        seen.append(job.payload)
        if job.payload != b"0":
            await here.enqueue(payload=int(job.payload) - 1)

    await here.enqueue(payload=3)
    later = await here.enqueue(delay=3600)
    paused = await here.enqueue(queue="paused")
    await here.pause("paused")
    other = await here.enqueue("somebody else's")
    await here.drain(chain, queues=["default", "paused"], types=["work"])
    assert seen == [b"3", b"2", b"1", b"0"]
    assert await here.state(later) is JobState.SCHEDULED
    assert [await here.state(job_id) for job_id in (paused, other)] == [JobState.READY] * 2


async def test_until_empty_waits_for_what_another_worker_holds(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    other = here.worker(gate.on_loop)
    async with running(other):
        await gate.began()
        task = asyncio.ensure_future(here.drain(nothing))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.2)
        other.stop(now=True)
        await finish(task)
    assert await here.outcomes(job_id) == [Outcome.RELEASED, Outcome.DONE]


# -- what to claim --------------------------------------------------------------------------------------------------


async def test_queues_are_served_in_turn_and_a_backlog_starves_none(here: Stage) -> None:
    order: list[str] = []

    async def handler(job: Job) -> None:
        order.append(job.queue)

    for queue in ("a", "b", "c"):
        await here.enqueue_many(20, queue=queue)
    await here.drain(handler, queues=["a", "b", "c"], concurrency=1, prefetch=0)
    assert all(sorted(order[start : start + 3]) == ["a", "b", "c"] for start in range(0, 60, 3))
    order.clear()
    await here.enqueue_many(500, queue="a")
    await here.enqueue(queue="b")
    await here.drain(handler, queues=["a", "b"], concurrency=2, batch=10)
    assert order.index("b") < 100


async def test_slow_jobs_are_not_hoarded(here: Stage) -> None:
    gates = [Gate(), Gate()]
    one, two = (here.worker(gate.on_loop, concurrency=2) for gate in gates)
    await here.enqueue_many(10)
    async with running(one):
        await eventually(lambda: one.snapshot()["held"] == 2)
        async with running(two):
            await gates[1].began()
            await eventually(lambda: two.snapshot()["held"] == 2)
            assert one.snapshot()["held"] == 2
            for gate in gates:
                gate.go_on.set()


# -- when something breaks ------------------------------------------------------------------------------------------


async def mismatched(*args: Any, **options: Any) -> Any:
    raise SchemaMismatch("the store was migrated by a later version")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("operation", ["reserve", "settle", "extend_lease", "settle the last"])
async def test_a_store_of_another_version_ends_the_worker(operation: str) -> None:
    driver, go_on = MemoryDriver(), asyncio.Event()

    async def handler(job: Job) -> None:
        await go_on.wait()

    async with stage(driver.clone()) as here:
        await here.enqueue()
        # With all the time in the world: what broke cannot be waited for.
        is_last = operation == "settle the last"
        worker = Worker(driver, heartbeat=0.02, grace=100 * PATIENCE, max_jobs=1 if is_last else None)
        worker.register("work", handler)
        setattr(driver, operation.removesuffix(" the last"), mismatched)
        task = asyncio.ensure_future(worker.run_async())
        if is_last:
            await eventually(lambda: worker.snapshot()["held"] == 1)
            # By then the fetch is over and the engine waits for the job, without a limit: a break must end that wait.
            for _ in range(20):
                turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), worker._engines[0]._loop)
                await asyncio.wrap_future(turn)
        if "settle" in operation:
            go_on.set()
        with pytest.raises(SchemaMismatch):
            await finish(task)


@pytest.mark.parametrize(
    "options",
    [
        *({"queues": []}, {"queues": "default"}, {"types": "work"}),
        *({"lease": 0.5}, {"lease": 10, "heartbeat": 6}, {"grace": -1}, {"prefetch": -1}),
        *({name: 0} for name in ("concurrency", "heartbeat", "batch", "poll_interval", "max_jobs")),
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
