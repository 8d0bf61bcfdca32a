"""Vectorised handlers: a batch of jobs in one call, settled row by row, by the ordinary worker."""

from __future__ import annotations

import asyncio
import sys
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

import taskharbor.batch_jobs as batch_jobs
import taskharbor.signals as signals
from needing import Entered
from taskharbor import FixedDelays, Harbor, InvalidRequest, Job, JobState, MissingExtra, Outcome, Worker
from taskharbor.batch_jobs import current_batch
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from worker.stage import PATIENCE, Gate, Stage, begun, eventually, finish, logged, never, running, stage

AT_ONCE = FixedDelays([0])


class Order(msgspec.Struct):
    number: int
    total: float = 0.0
    note: str | None = None


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    if (kind := getattr(request, "param", "memory")) == "memory":
        return MemoryDriver()
    sqlite = f"sqlite:///{tmp_path}/jobs.db"
    return connect(sqlite if kind == "sqlite" else request.getfixturevalue("postgres_url"))


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
    await finish((worker := worker_of(harbor, until_empty=True, **options)).run_async())
    return worker


def held_by(harbor: Harbor, gate: Gate, **options: Any) -> Any:
    """A batch job of type `price` whose handler waits at the gate."""

    def price(orders: pa.Table) -> Any:
        return gate.on_thread(orders)

    return harbor.batch_job(row=Order, **options)(price)


@pytest.mark.parametrize(
    ("driver", "with_results"),
    [("memory", True), ("sqlite", True), pytest.param("postgres", False, marks=pytest.mark.slow)],
    indirect=["driver"],
)
async def test_thousands_of_jobs_go_into_few_calls(harbor: Harbor, here: Stage, with_results: bool) -> None:
    seen: list[pa.Table] = []

    @harbor.batch_job(row=Order, size=2000)
    def price(orders: pa.Table) -> pa.Array | None:
        seen.append(orders)
        return orders["total"] if with_results else None

    handles = await price.enqueue_many_async([{"number": n, "total": n / 2} for n in range(5000)])
    assert (await drain(harbor)).outcomes == {Outcome.DONE: 5000}
    assert [len(table) for table in seen] == [2000, 2000, 1000]
    assert seen[0].schema == pa.schema({"number": pa.int64(), "total": pa.float64(), "note": pa.string()})
    assert sorted(number for table in seen for number in table["number"].to_pylist()) == list(range(5000))
    assert await handles[7].result_async() == (3.5 if with_results else None)
    assert await here.outcomes(handles[4999].id) == [Outcome.DONE]


async def test_each_row_is_settled_by_its_own_outcome(harbor: Harbor, here: Stage) -> None:
    cases: list[tuple[Any, JobState, int]] = [
        (None, JobState.DONE, 0),
        ({"price": 3}, JobState.DONE, 0),
        (ValueError("no such order"), JobState.SCHEDULED, 1),
        (signals.Unrecoverable("never"), JobState.DEAD, 1),
        (signals.Retry("busy", delay=3600), JobState.SCHEDULED, 1),
        (signals.Cancel("not wanted"), JobState.CANCELLED, 0),
        (signals.Snooze(timedelta(hours=1)), JobState.SCHEDULED, 0),
    ]

    @harbor.batch_job(row=Order, max_attempts=2, backoff=(60, 60))
    def price(orders: pa.Table) -> list[Any]:
        return [cases[number][0] for number in orders["number"].to_pylist()]

    handles = await price.enqueue_many_async([(number,) for number in range(len(cases))])
    await drain(harbor)
    jobs = [await here.get(handle.id) for handle in handles]
    assert [(job.state, job.attempts) for job in jobs] == [case[1:] for case in cases]
    assert jobs[1].result == b'{"price":3}'
    assert (jobs[2].last_error or "").startswith("ValueError: no such order")


async def test_failed_rows_are_retried_alone_until_no_attempt_is_left(harbor: Harbor, here: Stage) -> None:
    calls: list[list[tuple[int, int]]] = []

    @harbor.batch_job(row=Order, max_attempts=3, retry=AT_ONCE, job_columns=["job_id", "attempt"])
    def price(orders: pd.DataFrame) -> pd.Series:
        calls.append(list(zip(orders.number.tolist(), orders.attempt.tolist(), strict=True)))
        return orders.number.map(lambda number: None if number % 2 else OSError("the bank is away"))

    handles = await price.enqueue_many_async([(number,) for number in range(4)])
    await drain(harbor)
    assert calls[0] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert sorted(row for call in calls[1:] for row in call) == [(0, 2), (0, 3), (2, 2), (2, 3)]
    assert await here.outcomes(handles[0].id) == [Outcome.RETRIED, Outcome.RETRIED, Outcome.DEAD]
    assert await here.outcomes(handles[1].id) == [Outcome.DONE]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (RuntimeError("not loaded"), "RuntimeError: not loaded"),
        *((wrong, "OutcomesMismatch: the handler returned") for wrong in ([1], {"a": 1}, "done", 5)),
        (never, "JobTimeout: the batch took longer than its timeout of 0.05 s"),
    ],
)
async def test_a_failed_call_fails_its_rows(returned: Any, error: str, harbor: Harbor, here: Stage) -> None:
    @harbor.batch_job(max_attempts=1, timeout=PATIENCE)
    async def price(orders: pa.Table) -> Any:
        if returned is never:
            await never()
        if isinstance(returned, Exception):
            raise returned
        return returned

    handles = await price.enqueue_many_async([{"number": n} for n in range(3)])
    if returned is never:
        # The shortest timeout of its rows counts.
        handles.append(await price.options(timeout=0.05).enqueue_async(number=3))
    await drain(harbor)
    for handle in handles:
        job = await here.get(handle.id)
        assert (job.state, job.attempts) == (JobState.DEAD, 1)
        assert (job.last_error or "").startswith(error)
        assert ("test_batch_jobs.py" in (job.last_error or "")) is isinstance(returned, Exception)


async def test_a_call_that_hangs_on_its_thread_past_timeout_and_grace_fails_its_rows(
    harbor: Harbor, here: Stage
) -> None:
    gate = Gate()

    @harbor.batch_job(max_attempts=1, timeout=0.05)
    def price(orders: pa.Table) -> None:
        if gate.calls == 0:
            gate.on_thread(orders)

    with logged() as told:
        async with running(harbor.worker(grace=0.05)):
            first = await price.enqueue_async(number=1)
            await gate.began()
            second = await price.enqueue_async(number=2)
            states = [(await here.ended(one.id)).state for one in (first, second)]
            gate.go_on.set()
    assert states == [JobState.DEAD, JobState.DONE]
    assert told.count("<Batch of 1 price> did not stop within 0.05 s of its timeout") == 1


async def test_a_payload_that_does_not_fit_fails_alone(harbor: Harbor, here: Stage) -> None:
    seen: list[int] = []

    @harbor.batch_job(row=Order)
    def price(orders: pa.Table) -> None:
        seen.extend(orders["number"].to_pylist())

    numbers: list[Any] = [{"number": number} for number in (1, "one", 2**63)]
    payloads = [*numbers, [1, 2], {"number": 2, "unknown": True}]
    good, *bad, also_good = [await here.enqueue("price", payload) for payload in payloads]
    await drain(harbor)
    assert seen == [1, 2]
    assert [await here.state(one) for one in (good, also_good)] == [JobState.DONE] * 2
    for one in bad:
        job = await here.get(one)
        # The execution never began: no attempt is counted.
        assert (job.state, job.attempts) == (JobState.DEAD, 0)
        assert (job.last_error or "").startswith("PayloadInvalid: the payload does not fit"), job.last_error


async def test_without_a_row_type_any_fields_are_taken_and_odd_ones_fail(harbor: Harbor, here: Stage) -> None:
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
    assert {"a": 2, "b": [1]} in seen


async def test_row_types_are_dataclasses_or_typed_dicts_and_columns_have_types(harbor: Harbor) -> None:
    @dataclass
    class Reading:
        at: datetime
        values: list[float]
        sensor: str | None = None

    class Named(TypedDict):
        name: str
        raw: bytes

    tables: list[pa.Table] = []

    def keep(batch: pa.Table) -> None:
        tables.append(batch)

    read = harbor.batch_job(row=Reading, type="read", job_columns=["queue", "created_at", "fence"])(keep)
    await read.enqueue_async(datetime(2030, 1, 1, tzinfo=UTC), [1.5])
    await drain(harbor)
    await harbor.batch_job(row=Named, type="name")(keep).enqueue_async(name="x", raw=b"\0")
    await drain(harbor)
    instant = pa.timestamp("us", tz="UTC")
    columns = [("at", instant), ("values", pa.list_(pa.float64())), ("sensor", pa.string())]
    columns += [("queue", pa.string()), ("created_at", instant), ("fence", pa.int64())]
    assert tables[0].schema == pa.schema(columns)
    assert tables[1].to_pylist() == [{"name": "x", "raw": b"\0"}]


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
    assert (await drain(harbor)).outcomes == {Outcome.DONE: 100}
    assert sorted(rows) == list(range(50))
    assert await here.state(unknown) is JobState.READY
    # And max_jobs counts both.
    for job in (price, order):
        await job.enqueue_many_async([(number,) for number in range(30)])
    bounded = worker_of(harbor, max_jobs=40)
    await finish(bounded.run_async())
    assert bounded.outcomes == {Outcome.DONE: 40}


@pytest.mark.parametrize("lost", [1, 2])
async def test_rows_are_not_written_without_a_lease(lost: int, harbor: Harbor, here: Stage) -> None:
    began, go_on, reasons = asyncio.Event(), asyncio.Event(), []

    @harbor.batch_job(row=Order)
    async def price(orders: pa.Table) -> list[str]:
        began.set()
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            reasons.append(current_batch().stop_reason)
            raise
        return ["late", "late"]

    handles = await price.enqueue_many_async([(1,), (2,)])
    worker = worker_of(harbor, lease=60.0, heartbeat=0.02, max_jobs=2)
    task = asyncio.ensure_future(worker.run_async())
    await began.wait()
    await here.pause()
    assert await here.take_away(handles[0].id, limit=lost) == lost
    if lost == 1:
        await eventually(lambda: any(hold.lost for hold in list(worker._engines[0].assignment.holds)))
        go_on.set()
    await finish(task)
    assert reasons == (["lease lost"] if lost == 2 else [])
    outcomes = {handle.id: await here.outcomes(handle.id) for handle in handles}
    assert sorted(outcomes.values()) == [[Outcome.DONE]] * (2 - lost) + [[Outcome.EXPIRED]] * lost
    for job in [await here.get(job_id) for job_id in outcomes if outcomes[job_id] == [Outcome.EXPIRED]]:
        assert (job.state, job.result, job.stalls) == (JobState.READY, None, 1)


async def test_a_graceful_stop_ends_the_call_and_gives_back_what_waits(harbor: Harbor, here: Stage) -> None:
    gate = Gate()
    price = held_by(harbor, gate, size=3)
    handles = await price.enqueue_many_async([(number,) for number in range(2)])
    task = await begun(worker := worker_of(harbor), gate)
    # There is room for one more, which waits for the call to end.
    late = await price.enqueue_async(9)
    await here.until(late.id, lambda job: job.state is JobState.INFLIGHT)
    worker.stop()
    await here.until(late.id, lambda job: job.state is JobState.READY)
    gate.go_on.set()
    await finish(task)
    assert [await here.state(handle.id) for handle in handles] == [JobState.DONE] * 2
    assert await here.outcomes(late.id) == [Outcome.RELEASED]


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_stop_at_once_gives_all_rows_back(kind: str, harbor: Harbor, here: Stage) -> None:
    began = threading.Event()

    async def on_the_loop(orders: pa.Table) -> None:
        began.set()
        await never()

    def on_a_thread(orders: pa.Table) -> None:
        began.set()
        assert current_batch().wait_for_stop(PATIENCE)

    price = harbor.batch_job(row=Order, type="price")(on_the_loop if kind == "async def" else on_a_thread)
    handles = await price.enqueue_many_async([(number,) for number in range(5)])
    worker = worker_of(harbor)
    task = asyncio.ensure_future(worker.run_async())
    await eventually(began.is_set)
    worker.stop(now=True)
    await finish(task)
    for handle in handles:
        job = await here.get(handle.id)
        assert (job.state, job.attempts, job.stalls) == (JobState.READY, 0, 0)
        assert await here.outcomes(handle.id) == [Outcome.RELEASED]


async def test_a_cancelled_row_never_runs_or_is_not_retried(harbor: Harbor, here: Stage) -> None:
    gate = Gate([OSError("again, please")])
    price = held_by(harbor, gate, size=2, retry=AT_ONCE)
    runs = await price.enqueue_async(1)
    async with running(worker_of(harbor, lease=60.0, heartbeat=0.02)):
        await gate.began()
        waits = await price.enqueue_async(2)
        await here.until(waits.id, lambda job: job.state is JobState.INFLIGHT)
        await here.client.cancel_many([runs.id, waits.id])
        assert (await here.ended(waits.id)).state is JobState.CANCELLED
        gate.go_on.set()
        assert (await here.ended(runs.id)).state is JobState.CANCELLED
    assert await here.outcomes(runs.id) == [Outcome.CANCELLED]
    assert gate.calls == 1


def test_without_arrow_jobs_can_be_enqueued_and_a_worker_of_them_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "taskharbor.batch_jobs.columns", raising=False)
    monkeypatch.delattr(batch_jobs, "columns", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    harbor = Harbor("memory://")

    @harbor.batch_job
    def count(table: pa.Table) -> None: ...

    @harbor.job
    def other() -> None: ...

    count.enqueue(n=1)
    with pytest.raises(MissingExtra, match=r"pip install 'taskharbor\[spark\]'"):
        harbor.worker()
    harbor.worker(types=["other"], until_empty=True).run()


def test_a_batch_job_is_checked_when_it_is_declared_and_when_it_is_enqueued() -> None:
    harbor = Harbor("memory://")

    def unannotated(batch) -> None: ...  # type: ignore[no-untyped-def]

    def price(orders: pa.Table) -> list[Any]:
        """Prices orders."""
        return [number * 2 if number else ValueError("zero") for number in orders["number"].to_pylist()]

    with pytest.raises(InvalidRequest, match=r"annotated pyarrow\.Table or pandas\.DataFrame"):
        harbor.batch_job(unannotated)
    with pytest.raises(InvalidRequest, match="no column nonsense of the job"):
        harbor.batch_job(job_columns=["nonsense"])(price)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="unknown option isolation"):
        harbor.batch_job(isolation="process")  # type: ignore[call-overload]
    declared = harbor.batch_job(row=Order)(price)
    with pytest.raises(InvalidRequest, match="Expected `int`, got `str`"):
        declared.enqueue("one")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="declared already"):
        harbor.batch_job(price)
    assert declared(pa.table({"number": [1, 2]})) == [2, 4]
    assert (declared.__name__, declared.__doc__) == ("price", "Prices orders.")
    # It also runs job by job, where a tool does that.
    one_by_one = harbor.handlers["price"].function
    assert one_by_one(Job(declared.enqueue(21).record(), 0)) == 42
    with pytest.raises(ValueError, match="zero"):
        one_by_one(Job(declared.enqueue(0).record(), 0))
    harbor.close()
