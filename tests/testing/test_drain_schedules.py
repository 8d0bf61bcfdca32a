"""drain and schedules: declared ones are stored, ticks are made by the test's clock, and nothing runs for ever."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from taskharbor import FailedJob, Harbor, InvalidRequest, Schedule
from taskharbor.clock import FakeClock
from taskharbor.schedules import QUEUE
from taskharbor.testing import (
    HarborTesting,
    assert_enqueued,
    drain,
    drain_async,
    enqueued,
    inline,
    memory_store,
)

harbor = Harbor("memory://")
seen: list[datetime] = []
START = datetime(2026, 3, 28, tzinfo=UTC)


@harbor.job(cron="30 2 * * *", zone="Europe/Berlin")
def report(at: datetime) -> None:
    seen.append(at)


@harbor.job
def fragile() -> None:
    raise ValueError("no")


@harbor.job
def later() -> None: ...


@pytest.fixture(autouse=True)
def clock() -> Iterator[FakeClock]:
    seen.clear()
    with memory_store(harbor, clock=FakeClock(START)):
        assert isinstance(harbor.clock, FakeClock)
        yield harbor.clock


def at(day: int, hour: int, minute: int) -> datetime:
    return datetime(2026, 3, day, hour, minute, tzinfo=UTC)


def test_a_tick_that_is_due_by_the_clock_runs(clock: FakeClock) -> None:
    assert drain(harbor).total == 0
    clock.advance(timedelta(hours=12))
    assert drain(harbor).done == 1
    assert drain(harbor).total == 0
    assert seen == [at(28, 1, 30)]


def test_a_long_jump_makes_what_catch_up_allows(clock: FakeClock) -> None:
    clock.advance(1)
    harbor.client.schedules.put(Schedule(name="each", job="later", every=3600, catch_up=7200))
    harbor.client.schedules.put(Schedule(name="one", job="later", every=3600))
    drain(harbor)
    clock.advance(timedelta(days=1, hours=6))
    assert drain(harbor).done == 4
    assert [len(enqueued(harbor, headers={"taskharbor.schedule": name})) for name in ("each", "one")] == [
        2,
        1,
    ]


def test_until_makes_each_tick_at_its_instant(clock: FakeClock) -> None:
    assert drain(harbor, until=timedelta(days=3)).done == 3
    assert seen == [at(28, 1, 30), at(29, 1, 0), at(30, 0, 30)]
    assert [job.created_at_us for job in enqueued(report)] == [one.timestamp() * 1_000_000 for one in seen]
    assert clock.now_datetime == at(31, 0, 0)
    assert drain(harbor, until=at(31, 0, 30)).done == 1
    assert clock.now_datetime == at(31, 0, 30)
    assert drain(harbor, until=START).total == 0


def test_until_also_runs_what_is_due_meanwhile_and_no_more(clock: FakeClock) -> None:
    later.options(delay=60).enqueue()
    later.options(delay=61).enqueue()
    assert drain(harbor, ["default"], until=60).done == 1
    assert clock.now_datetime == START + timedelta(minutes=1)


def test_a_schedule_is_no_work_to_wait_for(clock: FakeClock) -> None:
    """Its jobs may be: they are retried for longer than the schedule waits."""
    clock.advance(1)
    poll = Schedule(name="poll", job="fragile", every=1800, max_attempts=3, backoff=(3600, 3600))
    harbor.client.schedules.put(poll)
    assert drain(harbor).total == 0
    clock.advance(1800)
    report = drain(harbor, with_scheduled=True)
    assert (report.retried, report.dead) == (2, 1)
    assert clock.now_datetime < START + timedelta(hours=3)


def test_the_schedules_own_jobs_are_neither_run_nor_seen() -> None:
    app = Harbor("memory://")

    @app.job(every=3600)
    def work() -> None: ...

    @work.on_failure
    def note(failed: FailedJob) -> None: ...

    with memory_store(app, clock=FakeClock(START + timedelta(seconds=1))):
        drain(app)
        assert enqueued(app) == []
        with pytest.raises(AssertionError, match="Nothing was enqueued at all"):
            assert_enqueued(app)
        with inline(app):
            work.enqueue()
        app.client.schedules.put(Schedule(name="more", job="work", every=3600))
        assert drain(app, [QUEUE, "default"]).total == 0
        assert [one.state for one in app.client.schedules.list()] == ["active", "active"]
        assert [one.queue for one in app.client.stats() if one.queue.startswith(QUEUE)] == [QUEUE]


def test_a_paused_schedule_makes_nothing() -> None:
    drain(harbor)
    harbor.client.schedules.pause("report")
    assert HarborTesting(harbor).drain(until=timedelta(days=2)).total == 0


async def test_from_async_code() -> None:
    assert (await drain_async(harbor, until=timedelta(days=1))).done == 1


def test_until_needs_a_time_and_a_clock_to_move() -> None:
    with pytest.raises(InvalidRequest, match="until 'tomorrow'"):
        drain(harbor, until="tomorrow")  # type: ignore[arg-type]
    with memory_store(Harbor("memory://")) as other:
        other.clock = None
        with pytest.raises(RuntimeError, match="only be reached with a clock that can be moved"):
            drain(other, until=5)
