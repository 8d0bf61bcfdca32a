"""drain: everything that can run does, in order, and the report says how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from taskharbor import Cancel, Harbor, Job, JobState, JobTimeout, QueueSettings, Snooze, current_job
from taskharbor.clock import FakeClock, SystemClock
from taskharbor.errors import HandlerMissing, PayloadInvalid
from taskharbor.harbor import SyncJobType
from taskharbor.middleware import Call
from taskharbor.testing import drain, drain_async, memory_store


class Stage:
    """An app whose jobs leave traces."""

    def __init__(self) -> None:
        self.harbor = harbor = Harbor("memory://")
        self.seen: list[Any] = []

        @harbor.job
        def note(what: str = "") -> None:
            self.seen.append(what)

        @harbor.job(max_attempts=3)
        def fragile(text: str) -> None:
            self.seen.append(current_job().attempt)
            raise ValueError(text)

        self.note: SyncJobType[..., None] = note
        self.fragile: SyncJobType[..., None] = fragile


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    with memory_store(stage.harbor):
        yield stage


def test_order_is_priority_then_age_in_the_queues_asked_for(stage: Stage) -> None:
    stage.note.enqueue("first")
    stage.note.enqueue("second")
    stage.note.options(priority=5).enqueue("urgent")
    stage.note.options(queue="b").enqueue("in b")
    assert drain(stage.harbor, ["b"]).done == 1
    report = drain(stage.harbor)
    assert (report.done, report.total) == (3, 3)
    assert stage.seen == ["in b", "urgent", "first", "second"]
    assert "nothing to do" in repr(drain(stage.harbor))


def test_what_a_job_enqueues_runs_too_and_an_endless_loop_is_noticed(stage: Stage) -> None:
    @stage.harbor.job
    async def parent() -> str:
        await stage.note.options(queue="elsewhere").enqueue_async("a")
        stage.note.enqueue("b")
        return "has children"

    @stage.harbor.job
    def again() -> None:
        again.enqueue()

    handle = parent.enqueue()
    assert drain(stage.harbor).done == 3
    assert handle.result(timeout=0) == "has children"
    assert sorted(stage.seen) == ["a", "b"]
    again.enqueue()
    with pytest.raises(RuntimeError, match="is a job enqueueing itself"):
        drain(stage.harbor, limit=20)


def test_errors_are_in_the_report_as_they_were_raised(stage: Stage) -> None:
    handle = stage.fragile.enqueue("boom")
    report = drain(stage.harbor)
    assert (report.retried, report.dead) == (1, 0)
    assert "ValueError: boom" in repr(report)
    with pytest.raises(ValueError, match="boom") as raised:
        report.raise_errors()
    assert report.errors == [raised.value]
    assert handle.state() is JobState.SCHEDULED
    stage.fragile.enqueue_many([("one",), ("two",)])
    with pytest.raises(ExceptionGroup) as several:
        drain(stage.harbor).raise_errors()
    assert [str(error) for error in several.value.exceptions] == ["one", "two"]
    drain(stage.harbor).raise_errors()


def test_scheduled_jobs_and_retries_wait_unless_asked_for(stage: Stage) -> None:
    clock = stage.harbor.clock
    assert isinstance(clock, FakeClock)
    began = clock.now()

    @stage.harbor.job
    def tell_time(what: str) -> None:
        stage.seen.append((what, clock.now() - began))

    tell_time.options(delay=timedelta(days=2)).enqueue("later")
    tell_time.options(delay=60).enqueue("soon")
    stage.harbor.client.configure("default", QueueSettings(paused=True))
    assert drain(stage.harbor, with_scheduled=True).total == 0
    stage.harbor.client.configure("default", QueueSettings())
    assert drain(stage.harbor).total == 0
    assert drain(stage.harbor, with_scheduled=True).done == 2
    assert stage.seen == [("soon", 60_000_000), ("later", 172_800_000_000)]
    stage.seen.clear()
    handle = stage.fragile.enqueue("no")
    report = drain(stage.harbor, with_scheduled=True)
    assert stage.seen == [1, 2, 3]
    assert (report.retried, report.dead, handle.state()) == (2, 1, JobState.DEAD)
    with memory_store(stage.harbor, clock=SystemClock()), pytest.raises(RuntimeError, match="can be moved"):
        drain(stage.harbor, with_scheduled=True)


def test_the_rules_of_a_worker_hold(stage: Stage) -> None:
    @stage.harbor.job(timeout=0.01)
    async def slow() -> None:
        await asyncio.sleep(60)

    @stage.harbor.job
    async def quitter() -> None:
        raise asyncio.CancelledError

    @stage.harbor.job
    def dozy() -> None:
        stage.seen.append("dozy")
        if len(stage.seen) == 1:
            raise Snooze(30)
        raise Cancel("no longer needed")

    stage.harbor.enqueue("unheard_of", {"a": 1})
    stage.harbor.enqueue("note", {"what": 4})
    slow.enqueue()
    quitter.enqueue()
    report = drain(stage.harbor)
    assert (report.dead, report.retried) == (2, 2)
    expected = [HandlerMissing, PayloadInvalid, JobTimeout, asyncio.CancelledError]
    assert [type(error) for error in report.errors] == expected
    # A snooze and a discard are no errors.
    dozy.options(queue="other").enqueue()
    report = drain(stage.harbor, ["other"], with_scheduled=True)
    assert (report.released, report.cancelled, report.errors) == (1, 1, [])


def test_middleware_and_the_current_job_are_there_in_the_tests_own_thread(stage: Stage) -> None:
    async def trace(job: Job, call_next: Call) -> Any:
        stage.seen.append("before")
        result = await call_next(job)
        stage.seen.append("after")
        return result

    stage.harbor.middleware.append(trace)

    @stage.harbor.job
    def look() -> None:
        stage.seen.append((current_job().type, threading.current_thread()))
        stage.seen.append(asyncio.run(asyncio.sleep(0, "a loop of its own")))

    look.enqueue()
    drain(stage.harbor).raise_errors()
    assert stage.seen == ["before", ("look", threading.current_thread()), "a loop of its own", "after"]


async def test_async_tests_await_the_async_form(stage: Stage) -> None:
    @stage.harbor.job
    async def tell_loop() -> None:
        stage.seen.append(asyncio.get_running_loop())

    await tell_loop.enqueue_async()
    with pytest.raises(RuntimeError, match="await drain_async"):
        drain(stage.harbor)
    assert (await drain_async(stage.harbor)).done == 1
    assert stage.seen == [asyncio.get_running_loop()]
