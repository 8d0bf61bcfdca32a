"""Vectorised handlers: a batch of jobs in one call, settled row by row, by the ordinary worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pandas as pd
import pyarrow as pa
import pytest

from needing import Entered
from taskharbor import (
    Discard,
    FixedDelays,
    Harbor,
    InvalidRequest,
    Job,
    JobState,
    Outcome,
    Retry,
    Snooze,
    Unrecoverable,
    Worker,
)
from taskharbor.batch_jobs import current_batch
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from worker.stage import PATIENCE, Stage, eventually, finish, running, stage

AT_ONCE = FixedDelays([0])


class Order(msgspec.Struct):
    number: int
    total: float = 0.0
    note: str | None = None


@pytest.fixture(params=["memory", "sqlite"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    if request.param == "postgres":
        return connect(request.getfixturevalue("postgres_url"))
    return MemoryDriver() if request.param == "memory" else connect(f"sqlite:///{tmp_path}/jobs.db")


@pytest.fixture
def here(driver: Driver) -> Entered:
    """A `Stage`."""
    return Entered(stage(driver))


@asynccontextmanager
async def opened(harbor: Harbor) -> AsyncIterator[Harbor]:
    yield harbor
    await harbor.close_async()


@pytest.fixture
def harbor(driver: Driver) -> Entered:
    """A `Harbor`."""
    return Entered(opened(Harbor(driver)))


def worker_of(harbor: Harbor, **options: Any) -> Worker:
    return harbor.worker(**{"concurrency": 4, "grace": PATIENCE, "poll_interval": 0.2, **options})


async def drain(harbor: Harbor, **options: Any) -> Worker:
    worker = worker_of(harbor, until_empty=True, **options)
    await finish(worker.run_async())
    return worker


@pytest.mark.parametrize(
    ("driver", "with_results"), [("memory", True), ("sqlite", True), ("postgres", False)], indirect=["driver"]
)
async def test_thousands_of_jobs_go_into_a_handful_of_calls(
    harbor: Harbor, here: Stage, with_results: bool
) -> None:
    seen: list[pa.Table] = []

    @harbor.batch_job(row=Order, size=4000)
    def price(orders: pa.Table) -> pa.Array | None:
        seen.append(orders)
        return orders["total"] if with_results else None

    handles = await price.enqueue_many_async([{"number": n, "total": n / 2} for n in range(10_000)])
    worker = await drain(harbor)
    assert worker.outcomes == {Outcome.DONE: 10_000}
    assert [len(table) for table in seen] == [4000, 4000, 2000]
    assert seen[0].schema == pa.schema(
        [("number", pa.int64()), ("total", pa.float64()), ("note", pa.string())]
    )
    assert sorted(number for table in seen for number in table["number"].to_pylist()) == list(range(10_000))
    assert await handles[7].result_async() == (3.5 if with_results else None)
    assert await here.outcomes(handles[9_999].id) == [Outcome.DONE]


async def test_each_row_is_settled_by_its_own_outcome(harbor: Harbor, here: Stage) -> None:
    outcomes: list[Any] = [
        None,
        {"price": 3},
        ValueError("no such order"),
        Unrecoverable("never"),
        Retry("busy", delay=3600),
        Discard("not wanted"),
        Snooze(timedelta(hours=1)),
    ]

    @harbor.batch_job(row=Order, max_attempts=2, backoff=(60, 60))
    def price(orders: pa.Table) -> list[Any]:
        return [outcomes[number] for number in orders["number"].to_pylist()]

    handles = await price.enqueue_many_async([(number,) for number in range(len(outcomes))])
    worker = await drain(harbor)
    jobs = [await here.get(handle.id) for handle in handles]
    assert [job.state for job in jobs] == [
        JobState.DONE,
        JobState.DONE,
        JobState.SCHEDULED,
        JobState.DEAD,
        JobState.SCHEDULED,
        JobState.CANCELLED,
        JobState.SCHEDULED,
    ]
    assert [job.attempts for job in jobs] == [0, 0, 1, 1, 1, 0, 0]
    assert jobs[1].result == b'{"price":3}'
    assert (jobs[2].last_error or "").startswith("ValueError: no such order")
    assert worker.outcomes == {
        Outcome.DONE: 2,
        Outcome.RETRIED: 2,
        Outcome.DEAD: 1,
        Outcome.CANCELLED: 1,
        Outcome.RELEASED: 1,
    }


async def test_failed_rows_are_retried_without_the_others_until_their_attempts_are_used_up(
    harbor: Harbor, here: Stage
) -> None:
    calls: list[list[tuple[int, int]]] = []

    @harbor.batch_job(row=Order, max_attempts=3, retry=AT_ONCE, job_columns=["job_id", "attempt"])
    def price(orders: pd.DataFrame) -> pd.Series:
        calls.append(list(zip(orders.number.tolist(), orders.attempt.tolist(), strict=True)))
        return orders.number.map(lambda number: None if number % 2 else OSError("the bank is away"))

    handles = await price.enqueue_many_async([(number,) for number in range(4)])
    await drain(harbor)
    assert calls[0] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert sorted(row for call in calls[1:] for row in call) == [(0, 2), (0, 3), (2, 2), (2, 3)]
    states = [await here.state(handle.id) for handle in handles]
    assert states == [JobState.DEAD, JobState.DONE, JobState.DEAD, JobState.DONE]
    assert await here.outcomes(handles[0].id) == [Outcome.RETRIED, Outcome.RETRIED, Outcome.DEAD]


async def test_a_call_that_raises_fails_all_of_its_rows_with_the_traceback(
    harbor: Harbor, here: Stage
) -> None:
    @harbor.batch_job(max_attempts=1)
    async def price(orders: pa.Table) -> None:
        raise RuntimeError("the model is not loaded")

    handles = await price.enqueue_many_async([{"number": n} for n in range(3)])
    await drain(harbor)
    for handle in handles:
        job = await here.get(handle.id)
        assert (job.state, job.attempts) == (JobState.DEAD, 1)
        assert "RuntimeError: the model is not loaded" in (job.last_error or "")
        assert "test_batch_jobs.py" in (job.last_error or "")


@pytest.mark.parametrize("returned", [[1], {"a": 1}, "done", 5])
async def test_outcomes_that_do_not_match_the_rows_fail_them_and_say_so(
    returned: Any, harbor: Harbor, here: Stage
) -> None:
    @harbor.batch_job(max_attempts=1)
    def price(orders: pa.Table) -> Any:
        return returned

    handles = await price.enqueue_many_async([{"number": 1}, {"number": 2}])
    await drain(harbor)
    job = await here.get(handles[0].id)
    assert job.state is JobState.DEAD
    assert (job.last_error or "").startswith("OutcomesMismatch: the handler returned")


async def test_a_payload_that_does_not_fit_fails_alone(harbor: Harbor, here: Stage) -> None:
    seen: list[int] = []

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> None:
        seen.extend(orders["number"].to_pylist())

    good = await here.enqueue("price", {"number": 1})
    not_an_order = await here.enqueue("price", {"number": "one"})
    not_an_object = await here.enqueue("price", [1, 2])
    too_large_for_arrow = await here.enqueue("price", {"number": 2**63})
    also_good = await here.enqueue("price", {"number": 2, "unknown": True})
    await drain(harbor)
    assert seen == [1, 2]
    assert [await here.state(one) for one in (good, also_good)] == [JobState.DONE] * 2
    for bad in (not_an_order, not_an_object, too_large_for_arrow):
        job = await here.get(bad)
        # The execution never began: no attempt is counted.
        assert (job.state, job.attempts) == (JobState.DEAD, 0)
        assert (job.last_error or "").startswith("PayloadInvalid: the payload does not fit"), job.last_error


async def test_without_a_row_type_the_fields_are_taken_as_they_come_and_the_odd_one_out_fails(
    harbor: Harbor, here: Stage
) -> None:
    seen: list[dict[str, Any]] = []

    @harbor.batch_job
    def price(orders: pa.Table) -> None:
        seen.extend(orders.to_pylist())

    fields: list[Any] = [{"a": 1}, {"a": 2, "b": [1]}, {"a": 2.5}, {"a": "three"}, {}]
    handles = [await price.enqueue_async(**one) for one in fields]
    await drain(harbor)
    states = [await here.state(handle.id) for handle in handles]
    assert states[3] is JobState.DEAD
    assert states.count(JobState.DONE) == len(seen)
    assert {"a": 2.0, "b": [1]} in seen or {"a": 2, "b": [1]} in seen


async def test_row_types_may_be_dataclasses_and_typed_dicts_and_columns_have_their_types(
    harbor: Harbor, here: Stage
) -> None:
    @dataclass
    class Reading:
        at: datetime
        values: list[float]
        sensor: str | None = None

    class Named(TypedDict):
        name: str
        raw: bytes

    tables: dict[str, pa.Table] = {}

    @harbor.batch_job(row=Reading, job_columns=["queue", "created_at", "fence"])
    def read(batch: pa.Table) -> None:
        tables["read"] = batch

    @harbor.batch_job(row=Named)
    def name(batch: pa.Table) -> None:
        tables["name"] = batch

    await read.enqueue_async(datetime(2030, 1, 1, tzinfo=UTC), [1.5])
    await name.enqueue_async(name="x", raw=b"\0")
    await drain(harbor)
    assert tables["read"].schema == pa.schema(
        [
            ("at", pa.timestamp("us", tz="UTC")),
            ("values", pa.list_(pa.float64())),
            ("sensor", pa.string()),
            ("queue", pa.string()),
            ("created_at", pa.timestamp("us", tz="UTC")),
            ("fence", pa.int64()),
        ]
    )
    assert tables["name"].to_pylist() == [{"name": "x", "raw": b"\0"}]


async def test_batch_and_single_jobs_of_one_app_run_in_one_worker(harbor: Harbor, here: Stage) -> None:
    rows: list[int] = []

    @harbor.batch_job(row=Order, queue="orders")
    def price(orders: pa.Table) -> None:
        rows.extend(orders["number"].to_pylist())

    @harbor.job
    async def order(number: int) -> None:
        await price.enqueue_async(number)

    await order.enqueue_many_async([(number,) for number in range(50)])
    unknown = await here.enqueue("nobody knows it")
    # The batches are there only once the single jobs have run: until_empty waits for both.
    worker = await drain(harbor)
    assert sorted(rows) == list(range(50))
    assert worker.outcomes == {Outcome.DONE: 100}
    assert await here.state(unknown) is JobState.READY


async def test_max_jobs_counts_batches_and_single_jobs_together(harbor: Harbor, here: Stage) -> None:
    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> None: ...

    @harbor.job
    async def single() -> None: ...

    await price.enqueue_many_async([(number,) for number in range(30)])
    await single.enqueue_many_async([() for _ in range(30)])
    worker = worker_of(harbor, max_jobs=40)
    await finish(worker.run_async())
    assert worker.outcomes == {Outcome.DONE: 40}


async def test_a_batch_that_runs_longer_than_its_lease_keeps_it(harbor: Harbor, here: Stage) -> None:
    began, go_on = threading.Event(), threading.Event()

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    handles = await price.enqueue_many_async([(number,) for number in range(500)])
    async with running(worker_of(harbor, lease=1.0)):
        await asyncio.to_thread(began.wait, PATIENCE)
        first = [await here.get(handle.id) for handle in (handles[0], handles[-1])]
        ends = [job.expires_at_us or 0 for job in first]

        async def lease_is_over_and_renewed() -> bool:
            now = await here.client.now()
            jobs = [await here.get(handle.id) for handle in (handles[0], handles[-1])]
            return all(
                now > end and (job.expires_at_us or 0) > now and job.fence == 1
                for job, end in zip(jobs, ends, strict=True)
            )

        await eventually(lease_is_over_and_renewed)
        go_on.set()
        for handle in handles:
            assert (await here.ended(handle.id)).state is JobState.DONE
    assert await here.outcomes(handles[3].id) == [Outcome.DONE]


async def test_rows_whose_lease_was_lost_are_not_written_and_the_others_are(
    harbor: Harbor, here: Stage
) -> None:
    began, go_on = threading.Event(), threading.Event()

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> list[str]:
        began.set()
        assert go_on.wait(PATIENCE)
        return ["late"] * len(orders)

    handles = await price.enqueue_many_async([(1,), (2,)])
    worker = worker_of(harbor, lease=60.0, heartbeat=0.02, max_jobs=2)
    task = asyncio.ensure_future(worker.run_async())
    await asyncio.to_thread(began.wait, PATIENCE)
    await here.pause()
    assert await here.take_away(handles[0].id, limit=1) == 1
    await eventually(lambda: any(hold.lost for hold in list(worker._engines[0].holds)))
    go_on.set()
    await finish(task)
    outcomes = [await here.outcomes(handle.id) for handle in handles]
    assert sorted(outcomes) == [[Outcome.DONE], [Outcome.EXPIRED]]
    lost = await here.get(handles[outcomes.index([Outcome.EXPIRED])].id)
    assert (lost.state, lost.result, lost.stalls) == (JobState.READY, None, 1)


async def test_a_batch_with_no_lease_left_is_cancelled_and_nothing_is_written(
    harbor: Harbor, here: Stage
) -> None:
    began, reasons = asyncio.Event(), []

    @harbor.batch_job(row=Order)
    async def price(orders: pa.Table) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(current_batch().stop_reason)

    handles = await price.enqueue_many_async([(1,), (2,)])
    worker = worker_of(harbor, lease=60.0, heartbeat=0.02, max_jobs=2)
    task = asyncio.ensure_future(worker.run_async())
    await began.wait()
    await here.pause()
    assert await here.take_away(handles[0].id) == 2
    await finish(task)
    assert reasons == ["lease lost"]
    for handle in handles:
        assert await here.outcomes(handle.id) == [Outcome.EXPIRED]


async def test_a_graceful_stop_finishes_the_call_and_gives_back_what_waits(
    harbor: Harbor, here: Stage
) -> None:
    began, go_on = threading.Event(), threading.Event()

    @harbor.batch_job(row=Order, size=3)
    def price(orders: pa.Table) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    handles = await price.enqueue_many_async([(number,) for number in range(2)])
    worker = worker_of(harbor)
    task = asyncio.ensure_future(worker.run_async())
    await asyncio.to_thread(began.wait, PATIENCE)
    # There is room for one more, which waits for the call to end.
    late = await price.enqueue_async(9)

    await here.until(late.id, lambda job: job.state is JobState.INFLIGHT)
    worker.stop()
    await here.until(late.id, lambda job: job.state is JobState.READY)
    go_on.set()
    await finish(task)
    assert [await here.state(handle.id) for handle in handles] == [JobState.DONE] * 2
    assert await here.outcomes(late.id) == [Outcome.RELEASED]


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_stop_at_once_gives_all_rows_back(kind: str, harbor: Harbor, here: Stage) -> None:
    began = threading.Event()

    async def on_the_loop(orders: pa.Table) -> None:
        began.set()
        await asyncio.Event().wait()

    def on_a_thread(orders: pa.Table) -> None:
        began.set()
        assert current_batch().wait_for_stop(PATIENCE)

    price = harbor.batch_job(row=Order, name="price")(on_the_loop if kind == "async def" else on_a_thread)
    handles = await price.enqueue_many_async([(number,) for number in range(5)])
    worker = worker_of(harbor)
    task = asyncio.ensure_future(worker.run_async())
    await asyncio.to_thread(began.wait, PATIENCE)
    worker.stop(now=True)
    await finish(task)
    for handle in handles:
        job = await here.get(handle.id)
        assert (job.state, job.attempts, job.stalls) == (JobState.READY, 0, 0)
        assert await here.outcomes(handle.id) == [Outcome.RELEASED]


async def test_the_shortest_timeout_in_a_batch_ends_the_call(harbor: Harbor, here: Stage) -> None:
    @harbor.batch_job(row=Order, timeout=0.05, max_attempts=1)
    async def price(orders: pa.Table) -> None:
        await asyncio.Event().wait()

    handle = await price.enqueue_async(1)
    await drain(harbor)
    job = await here.get(handle.id)
    assert job.state is JobState.DEAD
    assert (job.last_error or "").startswith("JobTimeout: the batch took longer than its timeout of 0.05 s")


async def test_a_row_cancelled_while_it_waits_never_runs_and_one_that_runs_is_not_retried(
    harbor: Harbor, here: Stage
) -> None:
    began, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    @harbor.batch_job(row=Order, size=2, retry=AT_ONCE)
    def price(orders: pa.Table) -> list[Any]:
        seen.extend(orders["number"].to_pylist())
        began.set()
        assert go_on.wait(PATIENCE)
        return [OSError("again, please")] * len(orders)

    runs = await price.enqueue_async(1)
    async with running(worker_of(harbor, lease=60.0, heartbeat=0.02)):
        await asyncio.to_thread(began.wait, PATIENCE)
        waits = await price.enqueue_async(2)
        await here.until(waits.id, lambda job: job.state is JobState.INFLIGHT)
        await here.client.cancel_many([runs.id, waits.id])
        assert (await here.ended(waits.id)).state is JobState.CANCELLED
        go_on.set()
        assert (await here.ended(runs.id)).state is JobState.CANCELLED
    assert seen == [1]


def test_a_batch_job_is_checked_when_it_is_declared_and_when_it_is_enqueued() -> None:
    harbor = Harbor("memory://")
    with pytest.raises(InvalidRequest, match=r"annotated pyarrow\.Table or pandas\.DataFrame"):

        @harbor.batch_job
        def unannotated(batch) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(InvalidRequest, match="no column nonsense of the job"):

        @harbor.batch_job(job_columns=["nonsense"])  # type: ignore[list-item]
        def odd_column(batch: pa.Table) -> None: ...

    with pytest.raises(TypeError, match="unknown option isolation"):
        harbor.batch_job(isolation="process")  # type: ignore[call-overload]

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> int:
        """Prices orders."""
        return len(orders)

    with pytest.raises(InvalidRequest, match="Expected `int`, got `str`"):
        price.enqueue("one")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="declared already"):
        harbor.batch_job(name="price")(price.__wrapped__)
    assert price(pa.table({"number": [1, 2]})) == 2
    assert (price.__name__, price.__doc__) == ("price", "Prices orders.")


def test_a_batch_handler_also_runs_job_by_job_where_a_tool_does_that() -> None:
    harbor = Harbor("memory://")

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> list[Any]:
        return [number * 2 if number else ValueError("zero") for number in orders["number"].to_pylist()]

    handle = price.enqueue(21)
    job = Job(harbor.client.get(handle.id), 0)
    assert harbor.handlers["price"].function(job) == 42
    zero = price.enqueue(0)
    with pytest.raises(ValueError, match="zero"):
        harbor.handlers["price"].function(Job(harbor.client.get(zero.id), 0))
    harbor.close()
