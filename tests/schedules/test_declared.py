"""Schedules that an app declares, and the workers and brokers that make their jobs."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schedules.harness import START
from taskharbor import AsyncClient, Forbidden, Harbor, InvalidRequest, JobFilter, JobState, Schedule
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.runtime import Service
from taskharbor.clock import FakeClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import SECOND
from taskharbor.schedules import QUEUE
from taskharbor.schedules.declarations import origin_of
from taskharbor.schedules.tick_ids import parse_tick_id
from taskharbor.schedules.ticking import tick
from taskharbor.testing.broker import running_broker
from taskharbor.worker.backend_loop import ScheduleLoop
from worker.stage import eventually, finish, running, stage


def drain(harbor: Harbor) -> None:
    harbor.worker(until_empty=True).run()


def test_a_worker_stores_what_is_declared_once() -> None:
    harbor = Harbor("memory://", clock=FakeClock(START))

    @harbor.job(cron=["0 3 * * *", "0 4 * * *"], zone="Europe/Berlin")
    async def report() -> None: ...

    @harbor.job(every=timedelta(hours=1), queue="polls", max_attempts=1)
    def poll(source: str = "all") -> None: ...

    harbor.schedule("hourly", poll, payload={"source": "web"}, every=3600, offset=60, priority=2)
    drain(harbor)
    found = {one.name: one for one in harbor.client.schedules.list(app=harbor)}
    assert found.keys() == {"report", "poll", "hourly"}
    assert {one.state for one in found.values()} == {"active"}
    spec = found["hourly"].schedule
    assert spec is not None
    assert (spec.job, spec.payload, spec.queue, spec.priority, spec.max_attempts) == (
        "poll",
        {"source": "web"},
        "polls",
        2,
        1,
    )
    ids = {one.job_id for one in found.values()}
    before = harbor.client.list_jobs(JobFilter(queue=QUEUE)).jobs
    drain(harbor)
    assert harbor.client.list_jobs(JobFilter(queue=QUEUE)).jobs == before
    assert {one.id for one in before} == ids


def test_what_is_no_longer_declared_is_orphaned() -> None:
    clock, driver = FakeClock(START), MemoryDriver()
    old, new, other = (Harbor(driver, clock=clock) for _ in range(3))
    old.job(every=60)(noop)
    new.job(type="kept", every=60)(noop)
    drain(old)
    drain(new)
    new.client.schedules.put(Schedule(name="at-run-time", job="noop", every=60))
    states = {one.name: one.state for one in new.client.schedules.list(app=new)}
    assert states == {"at-run-time": "active", "kept": "active", "noop": "orphaned"}
    assert {one.state for one in other.client.schedules.list(app=other)} == {"active"}


async def noop() -> None: ...


async def test_a_handler_gets_the_time_of_its_tick() -> None:
    driver, clock = MemoryDriver(), FakeClock(START + 1)
    harbor = Harbor(driver, clock=clock)
    seen: list[Any] = []

    @harbor.job(every=60)
    async def report(at: datetime, previous: datetime | None = None, *, n: int = 1) -> None:
        seen.append((at.timestamp() - START / SECOND, (at - (previous or at)).total_seconds(), n))

    harbor.schedule(
        "given", report, payload={"at": datetime.fromisoformat("2020-01-01T00:00Z"), "n": 2}, every=60
    )
    await finish(harbor.worker(until_empty=True).run_async())
    clock.advance(60)
    await tick(driver, clock.now(), "w")
    await finish(harbor.worker(until_empty=True).run_async())
    assert sorted(seen)[1] == (60.0, 60.0, 1)
    assert (len(seen), seen[0][2] + seen[1][2]) == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 60, "lane": "a"}, "no lanes yet"),
        ({"every": 60, "payload": {"m": 1}}, "unexpected|has no m"),
        ({"every": 60, "payload": {"n": "x"}}, "Expected `int`"),
        ({"cron": "61 * * * *"}, "minute '61'"),
        ({"every": 60, "payload": 7}, "give a mapping"),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    harbor = Harbor("memory://")

    @harbor.job
    async def report(at: datetime, n: int = 1) -> None: ...

    with pytest.raises(InvalidRequest, match=message):
        harbor.schedule("s", report, **options)
    harbor.schedule("s", "report", every=60)
    with pytest.raises(InvalidRequest, match="declared already"):
        harbor.schedule("s", report, every=60)
    with pytest.raises(InvalidRequest, match="give either cron or every"):
        harbor.job(type="zoned", zone="UTC")(noop)


async def test_a_worker_ticks_by_itself_and_a_bounded_one_ends() -> None:
    async with stage() as here:
        await here.client.schedules.put(Schedule(name="s", job="work", every=1))
        done = asyncio.Event()

        async def work(job: Any) -> None:
            assert parse_tick_id(job.id) is not None
            done.set()

        async with running(here.worker(work)):
            await finish(done.wait())
        (own,) = (await here.client.list_jobs(JobFilter(queue=QUEUE))).jobs
        # A stop does not come between the jobs and the release.
        assert own.state is JobState.SCHEDULED
        await here.drain(work)


async def test_a_new_schedule_wakes_an_idle_worker(tmp_path: Path) -> None:
    async with stage() as here, running(here.worker(noop_job)):
        await here.client.schedules.put(Schedule(name="s", job="other", every=3600))

        async def is_seen() -> bool:
            return (await here.client.schedules.get("s")).next[0].timestamp() * SECOND == (
                await here.client.list_jobs(JobFilter(queue=QUEUE))
            ).jobs[0].run_at_us

        await eventually(is_seen)


async def noop_job(job: Any) -> None: ...


class Refusing(MemoryDriver):
    """Refuses what a token without the right to work may not do."""

    def run(self, call: op.Operation[Any]) -> Any:
        if isinstance(call, op.Wait) and call.queues == [QUEUE]:
            raise Forbidden("no scope work")
        return super().run(call)


async def test_without_the_right_the_loop_ends_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    driver = Refusing()
    await driver.open()
    with caplog.at_level(logging.DEBUG, "taskharbor.worker"):
        await finish(ScheduleLoop(driver, clock=FakeClock(START), name="w").run())
    assert [record.getMessage() for record in caplog.records] == [
        "schedules are left to others: no scope work"
    ]


class Watched(MemoryDriver):
    """Counts the calls about schedules."""

    def __init__(self, **capabilities: bool) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.__dict__["capabilities"] = msgspec.structs.replace(MemoryDriver.capabilities, **capabilities)

    def run(self, call: op.Operation[Any]) -> Any:
        self.calls.append(call.name)
        return super().run(call)


@pytest.mark.parametrize(
    ("requests", "calls"),
    [
        (False, ["wait", "reserve", "wait"]),
        # Every look has its price: without a schedule there is one every few seconds, and not one a second.
        (True, ["wait", "reserve"]),
    ],
)
async def test_an_idle_store_is_left_alone(requests: bool, calls: list[str]) -> None:
    driver = Watched(waits_by_requests=requests)
    await driver.open()
    task = asyncio.create_task(ScheduleLoop(driver, clock=FakeClock(START), name="w", poll=9.0).run())
    await eventually(lambda: len(driver.calls) >= len(calls))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert driver.calls == calls


async def test_behind_a_broker_that_ticks_a_worker_does_not() -> None:
    driver = Watched(ticks_schedules=True)
    await driver.open()
    await finish(ScheduleLoop(driver, clock=FakeClock(START), name="w").run())
    assert driver.calls == []


@pytest.mark.parametrize("trusts", [False, True])
async def test_a_broker_ticks_unless_it_trusts_the_time_of_clients(trusts: bool) -> None:
    driver = MemoryDriver()
    service = Service(driver, BrokerConfig(trust_client_time=trusts), None, None)
    await service.start()
    try:
        assert service.sweeps is not trusts
        async with stage(driver) as here:
            await here.client.schedules.put(Schedule(name="s", job="work", every=1))
            if not trusts:

                async def is_made() -> bool:
                    return bool((await here.client.list_jobs(JobFilter(queue="default"))).jobs)

                await eventually(is_made)
    finally:
        await service.close()


async def test_through_a_broker(tmp_path: Path) -> None:
    with running_broker(f"sqlite:///{tmp_path}/jobs.db") as url:
        harbor, done = Harbor(url), asyncio.Event()

        @harbor.job(every=1)
        async def beat(at: datetime) -> None:
            done.set()

        async with running(harbor.worker()):
            await finish(done.wait())
        async with AsyncClient(url) as client:
            (info,) = await client.schedules.list(app=harbor)
            assert (info.name, info.state, info.origin) == ("beat", "active", origin_of(__name__))
            (own,) = (await client.list_jobs(JobFilter(queue=QUEUE))).jobs
            log = await client.job_attempts(own.id)
            assert {row.worker for row in log} == {"broker"}


def test_with_the_app_a_schedule_of_run_time_has_what_its_job_declares() -> None:
    harbor = Harbor("memory://")

    @harbor.job(queue="mail", max_attempts=7)
    async def report(at: datetime) -> None: ...

    schedules = harbor.client.schedules
    schedules.put(Schedule(name="plain", job="report", every=60))
    schedules.put(Schedule(name="known", job="report", every=60), app=harbor)
    plain, known = schedules.get("plain").schedule, schedules.get("known").schedule
    assert plain is not None
    assert known is not None
    assert (plain.queue, known.queue, known.max_attempts) == ("default", "mail", 7)
    assert schedules.get("known").origin is None
