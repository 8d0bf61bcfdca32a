"""inline and run_inline: the handler runs where it is called, by the rules of a worker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from taskharbor import Harbor, InvalidRequest, JobFailed, JobState, Snooze, Unrecoverable
from taskharbor.middleware import Call, Job, current_job
from taskharbor.testing import assert_enqueued, drain, inline, memory_store, run_inline, run_inline_async


@pytest.fixture
def harbor() -> Harbor:
    return Harbor("memory://")


# -- run_inline ----------------------------------------------------------------------------------------------


def test_run_inline_returns_the_result(harbor: Harbor) -> None:
    @harbor.job
    def add(a: int, b: int = 1) -> int:
        return a + b

    @harbor.job
    async def greet(name: str) -> str:
        return f"Hello, {name}"

    assert run_inline(add, 2, b=3) == 5
    assert run_inline(greet, "Ada") == "Hello, Ada"
    assert harbor.client.stats() == []


async def test_run_inline_async_shares_the_loop(harbor: Harbor) -> None:
    @harbor.job
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert await run_inline_async(loop_id) == id(asyncio.get_running_loop())


def test_run_inline_raises_what_the_handler_raises(harbor: Harbor) -> None:
    @harbor.job
    def fragile() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        run_inline(fragile)


def test_run_inline_checks_arguments_like_an_enqueue(harbor: Harbor) -> None:
    @harbor.job
    def add(a: int) -> int:
        return a

    with pytest.raises(InvalidRequest, match="add"):
        run_inline(add, "two")  # type: ignore[arg-type]


def test_run_inline_goes_through_the_codec_and_the_middleware(harbor: Harbor) -> None:
    seen: list[str] = []

    async def trace(job: Job, call_next: Call) -> Any:
        seen.append(job.type)
        return await call_next(job)

    harbor.middleware.append(trace)

    @harbor.job
    def next_day(day: datetime) -> datetime:
        assert current_job().attempt == 1
        return day.replace(day=day.day + 1)

    assert run_inline(next_day, datetime(2030, 1, 1, tzinfo=UTC)) == datetime(2030, 1, 2, tzinfo=UTC)
    assert seen == ["next_day"]


# -- inline --------------------------------------------------------------------------------------------------


def test_an_enqueue_runs_its_job_at_once(harbor: Harbor) -> None:
    @harbor.job
    def add(a: int, b: int) -> int:
        return a + b

    with inline(harbor):
        handle = add.enqueue(1, 2)
        assert handle.state() is JobState.DONE
        assert handle.result() == 3
        assert [one.result() for one in add.enqueue_many([(1, 1), (2, 2)])] == [2, 4]
        assert harbor.enqueue("add", {"a": 5, "b": 5}).result() == 10
    assert harbor.client.stats() == []


def test_jobs_enqueued_by_jobs_run_at_once_too(harbor: Harbor) -> None:
    seen: list[str] = []

    @harbor.job
    async def leaf(name: str) -> None:
        seen.append(name)

    @harbor.job
    def branch() -> None:
        leaf.enqueue("from a plain function")
        seen.append("branch")

    @harbor.job
    async def tree() -> None:
        await leaf.enqueue_async("from a coroutine")
        leaf.enqueue("from a coroutine, synchronously")
        seen.append("tree")

    with inline(harbor):
        branch.enqueue()
        tree.enqueue()

    assert seen == [
        "from a plain function",
        "branch",
        "from a coroutine",
        "from a coroutine, synchronously",
        "tree",
    ]


async def test_async_tests_enqueue_both_ways(harbor: Harbor) -> None:
    @harbor.job
    async def double(number: int) -> int:
        return number * 2

    with inline(harbor):
        handle = await double.enqueue_async(4)
        assert await handle.result_async() == 8
        assert double.enqueue(5).result() == 10
        many = await double.enqueue_many_async([(1,), (2,)])
        assert [await one.result_async() for one in many] == [2, 4]


def test_errors_come_out_of_the_enqueue(harbor: Harbor) -> None:
    @harbor.job
    def fragile() -> None:
        raise ValueError("boom")

    with inline(harbor), pytest.raises(ValueError, match="boom"):
        fragile.enqueue()


def test_without_raising_a_job_is_retried_until_it_ends(harbor: Harbor) -> None:
    attempts: list[int] = []

    @harbor.job(max_attempts=3)
    def fragile(survives: bool) -> str:
        attempts.append(current_job().attempt)
        if survives and current_job().attempt == 2:
            return "at last"
        raise ValueError("boom")

    with inline(harbor, raise_errors=False):
        assert fragile.enqueue(True).result() == "at last"
        with pytest.raises(JobFailed, match="boom"):
            fragile.enqueue(False).result()

    assert attempts == [1, 2, 1, 2, 3]


def test_signals_mean_what_they_mean(harbor: Harbor) -> None:
    @harbor.job
    def dozy() -> int:
        if current_job().fence < 3:
            raise Snooze(60)
        return current_job().fence

    @harbor.job
    def hopeless() -> None:
        raise Unrecoverable("never")

    with inline(harbor):
        assert dozy.enqueue().result() == 3
        with pytest.raises(Unrecoverable):
            hopeless.enqueue()


def test_a_delayed_job_waits(harbor: Harbor) -> None:
    @harbor.job
    def note() -> str:
        return "done"

    with inline(harbor):
        handle = note.options(delay=60).enqueue()
        assert handle.state() is JobState.SCHEDULED
        assert drain(harbor, with_scheduled=True).done == 1
        assert handle.result() == "done"


def test_inline_stays_on_the_store_a_test_already_has(harbor: Harbor) -> None:
    @harbor.job
    def note(what: str) -> None: ...

    with memory_store(harbor):
        note.enqueue("waits")
        with inline(harbor):
            note.enqueue("runs, and so does what waited")
        note.enqueue("waits again")
        assert_enqueued(harbor, note, count=2, states={JobState.DONE})
        assert_enqueued(harbor, note, count=1, states={JobState.READY})


def test_inline_puts_everything_back(harbor: Harbor) -> None:
    client, driver = harbor.client, harbor._driver

    with inline(harbor), inline(harbor, raise_errors=False):
        assert harbor.client is not client

    assert harbor.client is client
    assert harbor._driver is driver
    assert "async_client" not in vars(harbor)
    assert harbor.clock is None


def test_an_endless_snooze_is_noticed(harbor: Harbor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.testing.inlining.LIMIT", 20)

    @harbor.job
    def dozy() -> None:
        raise Snooze(0)

    with inline(harbor), pytest.raises(RuntimeError, match="for ever"):
        dozy.enqueue()
