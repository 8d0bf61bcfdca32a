"""drain: everything that can run does, in order, and the report says how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from taskharbor import (
    Discard,
    FakeClock,
    Harbor,
    Job,
    JobState,
    JobTimeout,
    QueueSettings,
    Snooze,
    current_job,
)
from taskharbor.clock import SystemClock
from taskharbor.errors import HandlerMissing, PayloadInvalid
from taskharbor.middleware import Call
from taskharbor.testing import drain, drain_async, memory_store


class Stage:
    """An app whose jobs leave traces."""

    def __init__(self) -> None:
        self.harbor = Harbor("memory://")
        self.seen: list[Any] = []


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    with memory_store(stage.harbor):
        yield stage


def test_plain_and_async_jobs_run_and_keep_their_results(stage: Stage) -> None:
    @stage.harbor.job
    def double(number: int) -> int:
        return number * 2

    @stage.harbor.job
    async def greet(name: str) -> str:
        await asyncio.sleep(0)
        return f"Hello, {name}"

    doubled, greeted = double.enqueue(4), greet.enqueue("Ada")
    report = drain(stage.harbor)

    assert (report.done, report.total) == (2, 2)
    assert doubled.result(timeout=0) == 8
    assert greeted.result(timeout=0) == "Hello, Ada"


def test_nothing_to_do_is_no_error(stage: Stage) -> None:
    assert drain(stage.harbor).total == 0
    assert "nothing to do" in repr(drain(stage.harbor))


def test_order_is_priority_then_age(stage: Stage) -> None:
    @stage.harbor.job
    def note(what: str) -> None:
        stage.seen.append(what)

    note.enqueue("first")
    note.enqueue("second")
    note.options(priority=5).enqueue("urgent")
    drain(stage.harbor)

    assert stage.seen == ["urgent", "first", "second"]


def test_what_a_job_enqueues_runs_too(stage: Stage) -> None:
    @stage.harbor.job
    def child(number: int) -> None:
        stage.seen.append(number)

    @stage.harbor.job
    async def parent() -> None:
        await child.options(queue="elsewhere").enqueue_async(1)
        child.enqueue(2)

    parent.enqueue()

    assert drain(stage.harbor).done == 3
    assert sorted(stage.seen) == [1, 2]


def test_only_the_queues_asked_for(stage: Stage) -> None:
    @stage.harbor.job
    def note(what: str) -> None:
        stage.seen.append(what)

    note.options(queue="a").enqueue("in a")
    note.options(queue="b").enqueue("in b")

    assert drain(stage.harbor, ["b"]).done == 1
    assert stage.seen == ["in b"]


def test_errors_are_in_the_report_as_they_were_raised(stage: Stage) -> None:
    boom = ValueError("boom")

    @stage.harbor.job(max_attempts=2)
    def fragile() -> None:
        raise boom

    handle = fragile.enqueue()
    report = drain(stage.harbor)

    assert (report.retried, report.dead) == (1, 0)
    assert report.errors == [boom]
    assert "ValueError: boom" in repr(report)
    with pytest.raises(ValueError, match="boom") as raised:
        report.raise_errors()
    assert raised.value is boom
    assert handle.state() is JobState.SCHEDULED


def test_several_errors_come_as_a_group(stage: Stage) -> None:
    @stage.harbor.job
    def fragile(text: str) -> None:
        raise RuntimeError(text)

    fragile.enqueue_many([("one",), ("two",)])

    with pytest.raises(ExceptionGroup) as raised:
        drain(stage.harbor).raise_errors()
    assert [str(error) for error in raised.value.exceptions] == ["one", "two"]
    drain(stage.harbor).raise_errors()


def test_scheduled_jobs_wait_unless_asked_for(stage: Stage) -> None:
    @stage.harbor.job
    def note(what: str) -> None:
        assert isinstance(stage.harbor.clock, FakeClock)
        stage.seen.append((what, stage.harbor.clock.now() - began))

    assert isinstance(stage.harbor.clock, FakeClock)
    began = stage.harbor.clock.now()
    note.options(delay=timedelta(days=2)).enqueue("later")
    note.options(delay=60).enqueue("soon")

    assert drain(stage.harbor).total == 0
    assert drain(stage.harbor, with_scheduled=True).done == 2
    assert stage.seen == [("soon", 60_000_000), ("later", 172_800_000_000)]


def test_retries_are_stepped_over_to_the_end(stage: Stage) -> None:
    @stage.harbor.job(max_attempts=3)
    def fragile() -> None:
        stage.seen.append(current_job().attempt)
        raise ValueError("no")

    handle = fragile.enqueue()
    report = drain(stage.harbor, with_scheduled=True)

    assert stage.seen == [1, 2, 3]
    assert (report.retried, report.dead) == (2, 1)
    assert handle.state() is JobState.DEAD


def test_a_snooze_and_a_discard_are_no_errors(stage: Stage) -> None:
    @stage.harbor.job
    def dozy() -> None:
        stage.seen.append("dozy")
        if len(stage.seen) == 1:
            raise Snooze(30)
        raise Discard("no longer needed")

    dozy.enqueue()
    report = drain(stage.harbor, with_scheduled=True)

    assert (report.released, report.cancelled) == (1, 1)
    assert report.errors == []


def test_the_rules_of_a_worker_hold(stage: Stage) -> None:
    @stage.harbor.job
    def double(number: int) -> int:
        return number * 2

    @stage.harbor.job(timeout=0.01)
    async def slow() -> None:
        await asyncio.sleep(60)

    @stage.harbor.job
    async def quitter() -> None:
        raise asyncio.CancelledError

    stage.harbor.enqueue("unheard_of", {"a": 1})
    stage.harbor.enqueue("double", {"number": "four"})
    slow.enqueue()
    quitter.enqueue()
    report = drain(stage.harbor)

    assert (report.dead, report.retried) == (2, 2)
    assert [type(error) for error in report.errors] == [
        HandlerMissing,
        PayloadInvalid,
        JobTimeout,
        asyncio.CancelledError,
    ]


def test_middleware_and_the_current_job_are_there(stage: Stage) -> None:
    async def trace(job: Job, call_next: Call) -> Any:
        stage.seen.append("before")
        result = await call_next(job)
        stage.seen.append("after")
        return result

    stage.harbor.middleware.append(trace)

    @stage.harbor.job
    def note() -> None:
        stage.seen.append(current_job().type)

    note.enqueue()
    drain(stage.harbor)

    assert stage.seen == ["before", "note", "after"]


def test_plain_functions_run_in_the_tests_own_thread(stage: Stage) -> None:
    @stage.harbor.job
    def note() -> None:
        stage.seen.append(threading.current_thread())
        stage.seen.append(asyncio.run(asyncio.sleep(0, "a loop of its own")))

    note.enqueue()
    drain(stage.harbor).raise_errors()

    assert stage.seen == [threading.current_thread(), "a loop of its own"]


def test_an_endless_loop_is_noticed(stage: Stage) -> None:
    @stage.harbor.job
    def again() -> None:
        again.enqueue()

    again.enqueue()
    with pytest.raises(RuntimeError, match="is a job enqueueing itself"):
        drain(stage.harbor, limit=20)


def test_a_paused_queue_stays_as_it_is(stage: Stage) -> None:
    @stage.harbor.job
    def note() -> None:
        stage.seen.append("ran")

    note.enqueue()
    note.options(delay=5).enqueue()
    stage.harbor.client.configure("default", QueueSettings(paused=True))

    assert drain(stage.harbor, with_scheduled=True).total == 0
    assert stage.seen == []


def test_stepping_needs_a_clock_that_can_be_moved() -> None:
    harbor = Harbor("memory://")

    with (
        memory_store(harbor, clock=SystemClock()),
        pytest.raises(RuntimeError, match="a clock that can be moved"),
    ):
        drain(harbor, with_scheduled=True)


async def test_async_tests_await_the_async_form(stage: Stage) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    @stage.harbor.job
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    await note.enqueue_async()
    with pytest.raises(RuntimeError, match="await drain_async"):
        drain(stage.harbor)
    assert (await drain_async(stage.harbor)).done == 1
    assert loops == [asyncio.get_running_loop()]
