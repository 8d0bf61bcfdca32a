"""inline and run_inline: the handler runs where it is called, by the rules of a worker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from taskharbor import Harbor, InvalidRequest, JobFailed, JobState, Snooze, Unrecoverable
from taskharbor.harbor import AsyncJobType, SyncJobType
from taskharbor.middleware import Call, Job, current_job
from taskharbor.testing import assert_enqueued, drain, inline, memory_store, run_inline, run_inline_async


class App:
    """Jobs that add, greet and fail."""

    def __init__(self) -> None:
        self.harbor = harbor = Harbor("memory://")
        self.attempts: list[int] = []

        @harbor.job
        def add(a: int, b: int = 1) -> int:
            return a + b

        @harbor.job
        async def double(number: int) -> int:
            return number * 2

        @harbor.job(max_attempts=3)
        def fragile(survives: bool = False) -> str:
            self.attempts.append(current_job().attempt)
            if survives and current_job().attempt == 2:
                return "at last"
            raise KeyError("boom")

        self.add: SyncJobType[..., int] = add
        self.double: AsyncJobType[..., int] = double
        self.fragile: SyncJobType[..., str] = fragile


@pytest.fixture
def app() -> App:
    return App()


# -- run_inline ----------------------------------------------------------------------------------------------


def test_run_inline_returns_the_result_or_raises_what_the_handler_raises(app: App) -> None:
    assert run_inline(app.add, 2, b=3) == 5
    assert run_inline(app.double, 4) == 8
    with pytest.raises(KeyError, match="boom"):
        run_inline(app.fragile)
    with pytest.raises(InvalidRequest, match="add"):
        run_inline(app.add, "two")
    assert app.harbor.client.stats() == []


async def test_run_inline_async_shares_the_loop(app: App) -> None:
    @app.harbor.job
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert await run_inline_async(loop_id) == id(asyncio.get_running_loop())


def test_run_inline_goes_through_the_codec_and_the_middleware(app: App) -> None:
    seen: list[str] = []

    async def trace(job: Job, call_next: Call) -> Any:
        seen.append(job.type)
        return await call_next(job)

    app.harbor.middleware.append(trace)

    @app.harbor.job
    def next_day(day: datetime) -> datetime:
        assert current_job().attempt == 1
        return day.replace(day=day.day + 1)

    assert run_inline(next_day, datetime(2030, 1, 1, tzinfo=UTC)) == datetime(2030, 1, 2, tzinfo=UTC)
    assert seen == ["next_day"]


# -- inline --------------------------------------------------------------------------------------------------


def test_an_enqueue_runs_its_job_at_once(app: App) -> None:
    with inline(app.harbor):
        handle = app.add.enqueue(1, 2)
        assert handle.state() is JobState.DONE
        assert handle.result() == 3
        assert [one.result() for one in app.add.enqueue_many([(1, 1), (2, 2)])] == [2, 4]
        assert app.harbor.enqueue("add", {"a": 5, "b": 5}).result() == 10
    assert app.harbor.client.stats() == []


def test_jobs_enqueued_by_jobs_run_at_once_too(app: App) -> None:
    seen: list[str] = []

    @app.harbor.job
    async def leaf(name: str) -> None:
        seen.append(name)

    @app.harbor.job
    def branch() -> None:
        leaf.enqueue("from a plain function")
        seen.append("branch")

    @app.harbor.job
    async def tree() -> None:
        await leaf.enqueue_async("from a coroutine")
        leaf.enqueue("from a coroutine, synchronously")
        seen.append("tree")

    with inline(app.harbor):
        branch.enqueue()
        tree.enqueue()
    assert seen[:2] == ["from a plain function", "branch"]
    assert seen[2:] == ["from a coroutine", "from a coroutine, synchronously", "tree"]


async def test_async_tests_enqueue_both_ways(app: App) -> None:
    with inline(app.harbor):
        handle = await app.double.enqueue_async(4)
        assert await handle.result_async() == 8
        assert app.double.enqueue(5).result() == 10
        many = await app.double.enqueue_many_async([(1,), (2,)])
        assert [await one.result_async() for one in many] == [2, 4]


def test_errors_come_out_of_the_enqueue_or_the_job_is_retried_until_it_ends(app: App) -> None:
    with inline(app.harbor), pytest.raises(KeyError, match="boom"):
        app.fragile.enqueue()
    app.attempts.clear()
    with inline(app.harbor, raise_errors=False):
        assert app.fragile.enqueue(True).result() == "at last"
        with pytest.raises(JobFailed, match="boom"):
            app.fragile.enqueue(False).result()
    assert app.attempts == [1, 2, 1, 2, 3]


def test_signals_mean_what_they_mean(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.harbor.job
    def dozy(until: int) -> int:
        if current_job().fence < until:
            raise Snooze(60)
        return current_job().fence

    @app.harbor.job
    def hopeless() -> None:
        raise Unrecoverable("never")

    with inline(app.harbor):
        assert dozy.enqueue(3).result() == 3
        with pytest.raises(Unrecoverable):
            hopeless.enqueue()
        monkeypatch.setattr("taskharbor.testing.inlining.LIMIT", 20)
        with pytest.raises(RuntimeError, match="for ever"):
            dozy.enqueue(30)


def test_a_delayed_job_waits(app: App) -> None:
    with inline(app.harbor):
        handle = app.add.options(delay=60).enqueue(1)
        assert handle.state() is JobState.SCHEDULED
        assert drain(app.harbor, with_scheduled=True).done == 1
        assert handle.result() == 2


def test_inline_stays_on_the_store_a_test_already_has(app: App) -> None:
    with memory_store(app.harbor):
        app.add.enqueue(1)
        with inline(app.harbor):
            app.add.enqueue(2)
        app.add.enqueue(3)
        assert_enqueued(app.harbor, app.add, count=2, states={JobState.DONE})
        assert_enqueued(app.harbor, app.add, count=1, states={JobState.READY})


def test_inline_puts_everything_back(app: App) -> None:
    client, driver = app.harbor.client, app.harbor._driver
    with inline(app.harbor), inline(app.harbor, raise_errors=False):
        assert app.harbor.client is not client
    assert app.harbor.client is client
    assert app.harbor._driver is driver
    assert "async_client" not in vars(app.harbor)
    assert app.harbor.clock is None
