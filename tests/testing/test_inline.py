"""inline and run_inline: the handler runs where it is called, by the rules of a worker. And the private store that it needs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from taskharbor import (
    Cancel,
    Harbor,
    InvalidRequest,
    JobFailed,
    JobState,
    Retry,
    Snooze,
    Unrecoverable,
    WaitTimeout,
)
from taskharbor.client import portal
from taskharbor.clock import FakeClock, SystemClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.middleware import Call, Job, current_job
from taskharbor.testing import (
    assert_enqueued,
    drain,
    drain_async,
    inline,
    memory_store,
    run_inline,
    run_inline_async,
)

harbor = Harbor("memory://")


@harbor.job
def add(a: int, b: int = 1) -> int:
    return a + b


@harbor.job
async def double(number: int) -> int:
    return number * 2


@harbor.job(max_attempts=3)
def fragile(survives: bool = False) -> str:
    if survives and current_job().attempt == 2:
        return "at last"
    raise KeyError("boom")


@harbor.job
async def loop_id() -> int:
    return id(asyncio.get_running_loop())


@harbor.job
def next_day(day: datetime) -> datetime:
    assert current_job().attempt == 1
    return day.replace(day=day.day + 1)


@harbor.job
def dozy(until: int) -> int:
    if current_job().fence < until:
        raise Snooze(60)
    return current_job().fence


@harbor.job
def hopeless() -> None:
    raise Unrecoverable("never")


@harbor.job
def signalling(signal: str) -> None:
    if current_job().fence == 1:
        raise {"retry": Retry("busy"), "cancel": Cancel("not needed"), "snooze": Snooze(60)}[signal]


# -- run_inline ----------------------------------------------------------------------------------------------


def test_run_inline_returns_the_result_or_raises_what_the_handler_raises() -> None:
    assert run_inline(add, 2, b=3) == 5
    assert run_inline(double, 4) == 8
    with pytest.raises(KeyError, match="boom"):
        run_inline(fragile)
    with pytest.raises(InvalidRequest, match="add"):
        run_inline(add, "two")  # type: ignore[arg-type]
    assert harbor.client.stats() == []


async def test_run_inline_async_shares_the_loop() -> None:
    assert await run_inline_async(loop_id) == id(asyncio.get_running_loop())


def test_run_inline_goes_through_the_codec_and_the_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def trace(job: Job, call_next: Call) -> Any:
        seen.append(job.type)
        return await call_next(job)

    monkeypatch.setattr(harbor, "middleware", [trace])
    assert run_inline(next_day, datetime(2030, 1, 1, tzinfo=UTC)) == datetime(2030, 1, 2, tzinfo=UTC)
    assert seen == ["next_day"]


# -- inline --------------------------------------------------------------------------------------------------


async def test_an_enqueue_runs_its_job_at_once_from_plain_code_and_from_a_coroutine() -> None:
    with inline(harbor):
        handle = add.enqueue(1, 2)
        assert (handle.state(), await handle.result_async()) == (JobState.DONE, 3)
        assert [await one.result_async() for one in add.enqueue_many([(1, 1), (2, 2)])] == [2, 4]
        assert await harbor.enqueue("add", {"a": 5, "b": 5}).result_async() == 10
        assert await (await double.enqueue_async(4)).result_async() == 8
        many = await double.enqueue_many_async([(1,), (2,)])
        assert [await one.result_async() for one in many] == [2, 4]
    assert harbor.client.stats() == []


def test_jobs_enqueued_by_jobs_run_at_once_too() -> None:
    seen: list[str] = []
    family = Harbor("memory://")

    @family.job
    async def leaf(name: str) -> None:
        seen.append(name)

    @family.job
    def branch() -> None:
        leaf.enqueue("from a plain function")
        seen.append("branch")

    @family.job
    async def tree() -> None:
        await leaf.enqueue_async("from a coroutine")
        leaf.enqueue("from a coroutine, synchronously")
        seen.append("tree")

    with inline(family):
        branch.enqueue()
        tree.enqueue()
    later = ["from a coroutine", "from a coroutine, synchronously", "tree"]
    assert seen == ["from a plain function", "branch", *later]


def test_errors_come_out_of_the_enqueue_or_the_job_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with inline(harbor):
        with pytest.raises(KeyError, match="boom"):
            fragile.enqueue()
        with pytest.raises(Unrecoverable):
            hopeless.enqueue()
        with pytest.raises(Retry):
            signalling.enqueue("retry")
        # These are no failures.
        assert signalling.enqueue("cancel").state() is JobState.CANCELLED
        assert signalling.enqueue("snooze").state() is JobState.DONE
    with inline(harbor, raise_errors=False):
        survivor, victim = fragile.enqueue(survives=True), fragile.enqueue()
        assert survivor.result() == "at last"
        with pytest.raises(JobFailed, match="boom"):
            victim.result()
        assert [handle.record().attempts for handle in (survivor, victim)] == [1, 3]
        assert dozy.enqueue(3).result() == 3
        monkeypatch.setattr("taskharbor.testing.inlining.LIMIT", 20)
        with pytest.raises(RuntimeError, match="for ever"):
            dozy.enqueue(30)


def test_inline_stays_on_the_store_a_test_already_has_and_a_delayed_job_waits() -> None:
    with memory_store(harbor):
        add.enqueue(1)
        with inline(harbor):
            delayed = add.options(delay=60).enqueue(2)
            assert delayed.state() is JobState.SCHEDULED
        add.enqueue(3)
        assert_enqueued(harbor, add, count=1, states={JobState.DONE})
        assert_enqueued(harbor, add, count=1, states={JobState.READY})
        assert drain(harbor, with_scheduled=True).done == 2
        assert delayed.result() == 3


def test_inline_puts_everything_back() -> None:
    client, driver = harbor.client, harbor._driver
    with inline(harbor), inline(harbor, raise_errors=False):
        assert harbor.client is not client
    assert (harbor.client, harbor._driver, harbor.clock) == (client, driver, None)


# -- memory_store: a private store for a while, then everything as it was ---------------------------------------------


async def test_the_apps_own_store_clients_and_clock_come_back_untouched() -> None:
    harbor = Harbor("memory://", clock=(clock := FakeClock()))
    harbor.enqueue("note")
    client, async_client, before = harbor.client, harbor.async_client(), SystemClock().now()
    with memory_store(harbor) as same:
        assert same is harbor
        assert harbor.client is not client
        assert harbor.async_client() is not async_client
        assert isinstance(harbor.clock, FakeClock)
        # Time stands still at the present.
        assert before <= harbor.clock.now() <= SystemClock().now()
        assert harbor.client.list_jobs().jobs == []
        harbor.enqueue("note")
    assert (harbor.client, harbor.async_client(), harbor.clock) == (client, async_client, clock)
    assert len(client.list_jobs().jobs) == 1


def test_they_come_back_after_an_error_too_and_are_not_opened_meanwhile() -> None:
    class NeverOpened(MemoryDriver):
        async def open(self) -> None:
            raise AssertionError("the app's own store was opened")

    driver, clock = NeverOpened(), FakeClock(1_000_000)
    harbor = Harbor(driver)
    with memory_store(harbor, clock=clock):
        harbor.enqueue("note")
        clock.advance(5)
        assert harbor.client.now() == 6_000_000
    with pytest.raises(ValueError, match="oops"), memory_store(harbor):
        raise ValueError("oops")
    assert harbor._driver is driver


def test_waiting_for_a_job_that_nothing_runs_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [threading.current_thread(), portal()._thread]
    monkeypatch.setattr(threading, "enumerate", lambda: own)
    with memory_store(harbor):
        handle = add.enqueue(1)
        for wait in (handle.result, handle.wait, partial(harbor.handle(handle.id).result, timeout=60)):
            with pytest.raises(WaitTimeout, match=f"{handle.id} is ready, and nothing.*call drain"):
                wait()
        drain(harbor)
        assert handle.result() == 2
        # A worker on another thread may run it.
        handle = add.enqueue(2)
        worker = harbor.worker(until_empty=True, name="other")
        other = threading.Thread(target=lambda: asyncio.run(worker.run_async()))
        monkeypatch.setattr(threading, "enumerate", lambda: [*own, other])
        other.start()
        assert handle.result(timeout=60) == 3
        other.join()


# -- within a transaction ------------------------------------------------------------------------------------


class Session:
    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class AsyncSession:
    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


async def test_a_private_store_keeps_the_jobs_of_a_transaction_at_once() -> None:
    with memory_store(harbor):
        handle = add.within(Session()).enqueue(1, 2)
        (other,) = await double.within(AsyncSession()).enqueue_many([(4,)])
        assert_enqueued(add, args=(1, 2))
        await drain_async(harbor)
        assert (await handle.result_async(), await other.result_async()) == (3, 8)
        with pytest.raises(InvalidRequest, match="'x' is not a transaction: give a connection"):
            add.within("x")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match=r"^Memory does not join.*only postgresql://"):
        add.within(Session())


def test_a_broker_without_its_extra_names_the_pip_line() -> None:
    code = "import sys; sys.modules['starlette'] = None; import taskharbor.testing.broker"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in ended.stderr.splitlines()[-1]
    assert "pip install 'taskharbor[broker]'" in ended.stderr
