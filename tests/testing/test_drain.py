"""drain: everything that can run does, in order, and the report says how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from taskharbor import (
    Cancel,
    Harbor,
    Job,
    JobRequest,
    JobState,
    JobTimeout,
    Snooze,
    current_job,
)
from taskharbor.clock import FakeClock, SystemClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import HandlerMissing, PayloadInvalid
from taskharbor.middleware import Call
from taskharbor.testing import drain, drain_async, draining, memory_store

harbor = Harbor("memory://")
seen: list[Any] = []
"""The traces that jobs leave."""


@harbor.job
def note(what: str = "") -> None:
    seen.append(what)


@harbor.job(max_attempts=3)
def fragile(text: str) -> None:
    seen.append(current_job().attempt)
    raise ValueError(text)


@harbor.job
async def parent() -> str:
    await note.options(queue="elsewhere").enqueue_async("a")
    note.enqueue("b")
    return "has children"


@harbor.job
def again() -> None:
    again.enqueue()


@harbor.job(timeout=0.01)
async def slow() -> None:
    await asyncio.sleep(60)


@harbor.job
async def quitter() -> None:
    raise asyncio.CancelledError


@harbor.job
def dozy() -> None:
    if current_job().fence == 1:
        raise Snooze(30)
    raise Cancel("no longer needed")


@harbor.job
async def sleepy() -> None:
    raise Snooze(60)


@harbor.job
def look() -> None:
    seen.append((current_job().type, threading.current_thread()))
    seen.append(asyncio.run(asyncio.sleep(0, "a loop of its own")))


@harbor.job(max_attempts=1)
def forgets_to_await() -> Any:
    return asyncio.sleep(0)


@harbor.job
async def tell_loop() -> None:
    seen.append(asyncio.get_running_loop())


@pytest.fixture(autouse=True)
def clock() -> Iterator[FakeClock]:
    seen.clear()
    with memory_store(harbor):
        assert isinstance(harbor.clock, FakeClock)
        yield harbor.clock


def test_order_is_priority_then_age_in_the_queues_asked_for() -> None:
    note.enqueue_many([("first",), ("second",)])
    note.options(priority=5).enqueue("urgent")
    note.options(queue="b").enqueue("in b")
    assert drain(harbor, ["b"]).done == 1
    report = drain(harbor)
    assert (report.done, report.total) == (3, 3)
    assert seen == ["in b", "urgent", "first", "second"]
    assert "nothing to do" in repr(drain(harbor))


def test_what_a_job_enqueues_runs_too_and_an_endless_loop_is_noticed() -> None:
    handle = parent.enqueue()
    assert drain(harbor).done == 3
    assert handle.result(timeout=0) == "has children"
    assert sorted(seen) == ["a", "b"]
    again.enqueue()
    with pytest.raises(RuntimeError, match="is a job enqueueing itself"):
        drain(harbor, limit=20)


def test_a_job_that_snoozes_for_ever_is_noticed_early_and_at_a_flat_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole log of the job, read after each execution, would make the cost quadratic."""
    monkeypatch.setattr(draining, "RUNS_OF_ONE", 30)
    monkeypatch.setattr(MemoryDriver, "job_attempts", None)
    sleepy.enqueue()
    with pytest.raises(RuntimeError, match=r"31 executions, 31 of them of one job.*limit above 200\."):
        drain(harbor, with_scheduled=True, limit=200)


def test_errors_are_in_the_report_as_they_were_raised() -> None:
    handle = fragile.enqueue("boom")
    report = drain(harbor)
    assert (report.retried, report.dead) == (1, 0)
    assert "ValueError: boom" in repr(report)
    with pytest.raises(ValueError, match="boom") as raised:
        report.raise_errors()
    assert report.errors == [raised.value]
    assert handle.state() is JobState.SCHEDULED
    fragile.enqueue_many([("one",), ("two",)])
    with pytest.raises(ExceptionGroup) as several:
        drain(harbor).raise_errors()
    assert [str(error) for error in several.value.exceptions] == ["one", "two"]
    drain(harbor).raise_errors()


def test_scheduled_jobs_and_retries_wait_unless_asked_for(clock: FakeClock) -> None:
    began = clock.now()
    note.options(delay=timedelta(days=2)).enqueue("later")
    note.options(delay=60).enqueue("soon")
    harbor.client.pause("default")
    assert drain(harbor, with_scheduled=True).total == 0
    harbor.client.resume("default")
    assert drain(harbor).total == 0
    assert drain(harbor, with_scheduled=True).done == 2
    assert seen == ["soon", "later"]
    assert clock.now() - began == 172_800_000_000
    seen.clear()
    handle = fragile.enqueue("no")
    report = drain(harbor, with_scheduled=True)
    assert seen == [1, 2, 3]
    assert (report.retried, report.dead, handle.state()) == (2, 1, JobState.DEAD)
    with memory_store(harbor, clock=SystemClock()), pytest.raises(RuntimeError, match="can be moved"):
        drain(harbor, with_scheduled=True)


def test_the_rules_of_a_worker_hold() -> None:
    harbor.enqueue("unheard_of", {"a": 1})
    harbor.client.enqueue(JobRequest(type="note", payload={"what": 4}))
    slow.enqueue()
    quitter.enqueue()
    report = drain(harbor)
    assert (report.dead, report.retried) == (2, 2)
    errors = [type(error) for error in report.errors]
    assert errors == [HandlerMissing, PayloadInvalid, JobTimeout, asyncio.CancelledError]
    forgets_to_await.options(queue="later").enqueue()
    assert "NotAwaited" in repr(drain(harbor, ["later"]).errors)
    # A snooze and a discard are no errors.
    dozy.options(queue="other").enqueue()
    report = drain(harbor, ["other"], with_scheduled=True)
    assert (report.released, report.cancelled, report.errors) == (1, 1, [])


def test_middleware_and_the_current_job_are_in_the_tests_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trace(job: Job, call_next: Call) -> Any:
        seen.append("before")
        result = await call_next(job)
        seen.append("after")
        return result

    monkeypatch.setattr(harbor, "middleware", [trace])
    look.enqueue()
    drain(harbor).raise_errors()
    assert seen == ["before", ("look", threading.current_thread()), "a loop of its own", "after"]


async def test_async_tests_await_the_async_form() -> None:
    await tell_loop.enqueue_async()
    with pytest.raises(RuntimeError, match="await drain_async"):
        drain(harbor)
    assert (await drain_async(harbor)).done == 1
    assert seen == [asyncio.get_running_loop()]
