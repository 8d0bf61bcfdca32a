"""The numbered edge cases of schedules, as far as ticking is concerned."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from schedules.conftest import EVERYWHERE
from schedules.harness import MINUTE, MOST_AT_ONCE, START, Crash, Crashing, Harness
from taskharbor import BackendUnavailable, InvalidRequest, JobState, Outcome, Schedule
from taskharbor.drivers.operations import Operation
from taskharbor.jobs import LATEST, SECOND, JobRecord, Micros, to_datetime
from taskharbor.requests import new_id
from taskharbor.schedules import QUEUE, TYPE
from taskharbor.schedules.specification import LEASE, read
from taskharbor.schedules.tick_ids import generation_of, parse_tick_id, tick_id
from taskharbor.schedules.ticking import tick

everywhere = pytest.mark.parametrize("store", EVERYWHERE, indirect=True)


@everywhere
async def test_one_job_per_tick(store: Harness) -> None:
    await store.begin(payload={"n": 1}, headers={"a": "b"}, priority=3, queue="default")
    assert await store.ticks() == []
    for _ in range(3):
        await store.forward()
    assert await store.ticks() == [60, 120, 180]
    first, second, _ = await store.jobs()
    assert (first.type, first.payload, first.priority, first.run_at_us) == (
        "work",
        b'{"n":1}',
        3,
        START + 60 * SECOND,
    )
    at = {"taskharbor.at": "2023-11-14T22:16:00Z", "taskharbor.previous": "2023-11-14T22:15:00Z"}
    assert second.headers == {"a": "b", "taskharbor.schedule": "s", **at}
    assert (await store.own()).run_at_us == START + 240 * SECOND


@everywhere
@pytest.mark.parametrize(("call", "after"), [("enqueue", False), ("enqueue", True), ("settle", False)])
async def test_a_crash_loses_and_doubles_nothing(store: Harness, call: str, after: bool) -> None:
    await store.begin()
    store.clock.advance(MINUTE)
    with pytest.raises(Crash):
        await store.tick(Crashing(store.driver, call, after=after))
    assert await store.tick(worker="w-2") == 0
    await store.forward(LEASE / SECOND)
    assert await store.ticks() == [60]
    await store.forward(30)
    assert await store.ticks() == [60, 120]
    assert (await store.own()).state is JobState.SCHEDULED


@everywhere
async def test_case_1_an_unchanged_declaration_changes_nothing(store: Harness) -> None:
    assert await store.put(zone="Europe/Berlin", cron=["0 3 * * *", "0 4 * * *"], payload={"a": [1, 2.5]})
    await store.tick()
    store.clock.advance(timedelta(hours=30))
    before = await store.own()
    assert not await store.put(zone="Europe/Berlin", cron=["0 3 * * *", "0 4 * * *"], payload={"a": [1, 2.5]})
    assert await store.own() == before


@everywhere
async def test_case_1_a_change_keeps_the_missed_ticks(store: Harness) -> None:
    await store.begin(catch_up=timedelta(hours=1))
    store.clock.advance(3 * MINUTE)
    assert await store.put(catch_up=timedelta(hours=1), payload={"new": 1})
    await store.tick()
    assert await store.ticks() == [60, 120, 180]
    assert {job.payload for job in await store.jobs()} == {b'{"new":1}'}


@everywhere
async def test_case_1_a_change_while_a_tick_is_made_is_merged_by_the_release(store: Harness) -> None:
    await store.begin()
    store.clock.advance(MINUTE)
    with pytest.raises(Crash):
        await store.tick(Crashing(store.driver, "enqueue"))
    generation = generation_of((await store.own()).id)
    store.clock.advance(1)
    assert await store.put(every=2 * MINUTE)
    assert not await store.put(every=2 * MINUTE)
    assert (await store.schedules.get("s")).next[0] == to_datetime(START + 120 * SECOND)
    for _ in range(5):
        await store.forward()
    own = await store.own()
    assert (generation_of(own.id), read(own.payload).spec.every) == (generation, 120.0)
    assert await store.ticks() == [120, 240, 360]


@everywhere
async def test_case_1_the_higher_revision_wins(store: Harness) -> None:
    await store.put(revision=2)
    assert not await store.put(revision=1, every=9)
    assert await store.put(revision=2, every=8)
    assert await store.put(every=7)
    info = await store.schedules.get("s")
    assert info.schedule is not None
    assert info.schedule.every == 7.0


async def test_case_3_what_cannot_be_read_stays_and_harms_no_other(store: Harness) -> None:
    await store.begin("good")
    now = store.clock.now()
    spec = b'{"spec":{"name":"bad","job":"work","queue":"default","cron":["* * * * *"],"zone":"Mars/Base"},"since":0}'
    for payload, key in ((spec, "bad"), (b"\xff", "worse")):
        own = JobRecord(
            id=new_id(), type=TYPE, queue=QUEUE, key=key, payload=payload, run_at_us=now, created_at_us=now
        )
        await store.driver.enqueue([own], now=now)
    await store.forward()
    assert await store.ticks() == [60]
    info = await store.schedules.get("bad")
    assert "zone 'Mars/Base' is not known" in str(info.error)
    assert (info.state, info.next, info.schedule) == ("active", [], None)
    await store.forward(LEASE / SECOND)
    bad = await store.own("bad")
    assert (bad.state, bad.run_at_us, bad.stalls) == (JobState.INFLIGHT, now, 1)
    await store.schedules.pause("good")
    assert [one.name for one in await store.schedules.list()] == ["bad", "good", "worse"]
    await store.put("worse")
    await store.forward(LEASE / SECOND)
    assert (await store.schedules.get("worse")).error is None


async def test_case_3_a_refused_job_harms_no_other(store: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await store.put(f"s{number}")
    await store.tick()
    store.clock.advance(MINUTE)
    enqueue = store.driver.enqueue

    async def refuse(records: list[JobRecord], **options: object) -> object:
        if any(record.headers["taskharbor.schedule"] == "s3" for record in records):
            raise InvalidRequest("not this one")
        return await enqueue(records, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store.driver, "enqueue", refuse)
    await store.tick()
    assert len(await store.jobs()) == 4
    assert (await store.schedules.get("s3")).error == "not this one"
    monkeypatch.undo()
    await store.forward(LEASE / SECOND)
    assert len(await store.jobs()) == 5


async def test_case_4_any_worker_can_tick(store: Harness) -> None:
    """The specification is data: the type of the jobs need not be known."""
    await store.begin(job="unknown", queue="elsewhere", timeout=5, max_attempts=2, backoff=(1, 2))
    await store.forward()
    (job,) = await store.jobs("elsewhere")
    assert (job.type, job.timeout_us, job.max_attempts) == ("unknown", 5 * SECOND, 2)
    assert (job.backoff_min_us, job.backoff_max_us, job.codec) == (SECOND, 2 * SECOND, "json")


async def test_case_5_a_paused_queue_and_an_outage(store: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.begin()
    await store.client.pause("default", create=True)
    await store.forward()
    assert await store.ticks() == [60]

    async def away(*_: object, **__: object) -> None:
        raise BackendUnavailable("away")

    store.clock.advance(MINUTE)
    with monkeypatch.context() as patched:
        patched.setattr(store.driver, "enqueue", away)
        with pytest.raises(BackendUnavailable):
            await store.tick()
    await store.forward(LEASE / SECOND)
    assert await store.ticks() == [60, 120]


@everywhere
async def test_case_6_a_queue_that_forgets_its_jobs_is_refused(store: Harness) -> None:
    await store.client.configure("quick", create=True, keep_done=59)
    with pytest.raises(
        InvalidRequest, match=r"queue 'quick' keeps done jobs for 59 s.*set keep_done to 60 s"
    ):
        await store.put(queue="quick")
    await store.client.configure("quick", keep_done=60)
    assert await store.put(queue="quick")
    assert (await store.client.settings(QUEUE)).keep_attempts_us == 7 * 86_400 * SECOND


async def test_case_7_a_step_backwards_repeats_nothing(store: Harness) -> None:
    await store.begin()
    await store.forward(5 * MINUTE)
    made = await store.ticks()
    store.clock._now -= 180 * SECOND
    await store.tick()
    for _ in range(4):
        await store.forward()
    ticks = await store.ticks()
    assert len(set(ticks)) == len(ticks) == len(made) + 1


@pytest.mark.parametrize(("catch_up", "count"), [(timedelta(days=9999), MOST_AT_ONCE), (None, 1), (0, 1)])
async def test_case_7_a_jump_of_a_year_is_bounded(
    store: Harness, catch_up: timedelta | None, count: int
) -> None:
    await store.begin(catch_up=catch_up)
    await store.forward(timedelta(days=365))
    ticks = await store.ticks()
    assert (len(ticks), ticks[-1]) == (count, 365 * 86_400.0)
    await store.forward()
    assert len(await store.ticks()) == count + 1


@everywhere
async def test_case_8_many_at_one_instant_in_few_calls(
    store: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    run = store.driver.run

    def counted(call: Operation[object]) -> object:
        calls.append(call.name)
        return run(call)

    for number in range(12):
        await store.put(f"s{number}", cron="* * * * *", jitter=30)
    await store.tick()
    store.clock.advance(MINUTE)
    monkeypatch.setattr(store.driver, "run", counted)
    assert await tick(store.driver, store.clock.now(), "w") == 12
    monkeypatch.undo()
    assert calls == ["reserve", "enqueue", "settle"]
    jobs = await store.jobs()
    delays = {job.run_at_us - START - 60 * SECOND for job in jobs}
    assert len(jobs) == 12
    assert len(delays) > 8
    assert min(delays) >= 0
    assert max(delays) <= 30 * SECOND


@everywhere
async def test_case_10_delete_while_a_tick_is_made(store: Harness) -> None:
    await store.begin()
    store.clock.advance(MINUTE)
    (own,) = await store.driver.reserve(QUEUE, limit=1, lease_for=LEASE, now=store.clock.now(), worker="w")
    await store.schedules.delete("s")
    assert await store.schedules.list() == []
    await store.put()
    await store.driver.release(own.id, own.token or "", now=store.clock.now(), run_at=LATEST)
    assert (await store.client.get(own.id)).state is JobState.CANCELLED
    await store.forward()
    assert (await store.ticks())[-1] == 120
    assert (await store.own()).id != own.id


async def test_case_11_another_generation_is_apart(store: Harness) -> None:
    await store.begin()
    await store.forward()
    await store.schedules.delete("s")
    await store.begin(cron="*/2 * * * *", start=to_datetime(START - 3600 * SECOND))
    ids = {parse_tick_id(job.id) for job in await store.jobs()}
    await store.forward()
    more = {parse_tick_id(job.id) for job in await store.jobs()}
    assert len(ids | more) == 2
    assert len({one.generation for one in more if one is not None}) == 2


async def test_case_15_the_log_says_what_was_skipped(store: Harness) -> None:
    await store.begin(overlap="skip")
    for _ in range(3):
        await store.forward()
    own = await store.own()
    log = await store.client.job_attempts(own.id)
    assert [row.outcome for row in log] == [
        Outcome.RELEASED,
        Outcome.RELEASED,
        Outcome.RETRIED,
        Outcome.RETRIED,
    ]
    assert (log[-1].error_type, own.attempts) == ("Skipped", 0)
    assert "has not ended" in str((await store.schedules.get("s")).error)


# -- overlap ------------------------------------------------------------------------------------------------


@everywhere
async def test_skip_makes_no_job_beside_one_that_has_not_ended(store: Harness) -> None:
    await store.begin(overlap="skip", catch_up=timedelta(hours=1))
    await store.forward(3 * MINUTE)
    assert await store.ticks() == [60]
    await store.lease()
    await store.forward()
    assert await store.ticks() == [60]
    assert (await store.schedules.get("s")).missed == 3


async def test_skip_goes_on_after_the_end(store: Harness) -> None:
    await store.begin(overlap="skip")
    for _ in range(3):
        await store.forward()
        await store.end()
    assert await store.ticks() == [60, 120, 180]


@everywhere
async def test_queue_one_lets_one_wait(store: Harness) -> None:
    await store.begin(overlap="queue_one")
    await store.forward()
    running = await store.lease()
    for _ in range(3):
        await store.forward()
    assert await store.ticks() == [60, 120]
    await store.driver.ack(running.id, running.token or "", now=store.clock.now())
    assert (await store.lease()).headers["taskharbor.at"] == "2023-11-14T22:18:00Z"


@everywhere
async def test_replace_cancels_the_one_before(store: Harness) -> None:
    await store.begin(overlap="replace")
    for _ in range(2):
        await store.forward()
    assert [job.state for job in await store.jobs()] == [JobState.CANCELLED, JobState.READY]
    running = await store.lease()
    await store.forward()
    assert (await store.client.get(running.id)).cancel_requested
    assert (await store.jobs())[-1].state is JobState.BLOCKED


@everywhere
@pytest.mark.parametrize("overlap", ["skip", "queue_one", "replace"])
async def test_a_crash_after_the_enqueue_is_no_overlap(store: Harness, overlap: str) -> None:
    await store.begin(overlap=overlap, catch_up=0, cron="0 * * * *")
    store.clock.advance(((await store.own()).run_at_us - START) / SECOND)
    with pytest.raises(Crash):
        await store.tick(Crashing(store.driver, "settle"))
    await store.forward(LEASE / SECOND)
    (job,) = await store.jobs()
    own = await store.own()
    assert (job.state, own.state, own.last_error) == (JobState.READY, JobState.SCHEDULED, None)


# -- other rules --------------------------------------------------------------------------------------------


async def test_catch_up_in_one_job_says_how_many_are_missing(store: Harness) -> None:
    await store.begin(catch_up=timedelta(minutes=10), catch_up_mode="last")
    await store.forward(timedelta(minutes=7))
    (job,) = await store.jobs()
    assert (await store.ticks(), job.headers["taskharbor.missed"]) == ([420], "6")


async def test_a_tick_that_is_less_than_a_minute_late_is_not_missed(store: Harness) -> None:
    await store.begin(every=10, catch_up=0)
    await store.forward(45)
    assert await store.ticks() == [10, 20, 30, 40]
    await store.forward(90)
    assert await store.ticks() == [10, 20, 30, 40, 80, 90, 100, 110, 120, 130]


@everywhere
async def test_a_dead_job_pauses(store: Harness) -> None:
    await store.begin(pause_on_failure=True)
    await store.forward()
    job_id = await store.end(dead=True)
    await store.forward()
    info = await store.schedules.get("s")
    assert (info.state, info.note) == ("paused", f"job {job_id} is dead: E: broken")
    await store.forward()
    assert await store.ticks() == [60]
    await store.schedules.resume("s")
    await store.tick()
    await store.forward()
    assert await store.ticks() == [60, 240]


async def test_start_end_and_limit(store: Harness) -> None:
    start = to_datetime(START + 150 * SECOND)
    await store.begin("bounded", start=start, end=to_datetime(START + 300 * SECOND))
    await store.begin("three", limit=3, every=70)
    for _ in range(8):
        await store.forward()
    by_name: dict[str, list[Micros]] = {}
    for job in await store.jobs():
        by_name.setdefault(job.headers["taskharbor.schedule"], []).append((job.run_at_us - START) // SECOND)
    assert [len(by_name["bounded"]), by_name["bounded"][0], by_name["bounded"][-1]] == [3, 180, 300]
    assert len(by_name["three"]) == 3
    assert [(await store.schedules.get(name)).state for name in by_name] == ["ended", "ended"]
    assert (await store.own("three")).run_at_us == LATEST
    await store.put("bounded", start=start)
    await store.tick()
    assert (await store.schedules.get("bounded")).state == "active"


def test_ids_can_be_read() -> None:
    at = to_datetime(START + 500_000)
    for name in ("a", "tenant:7:tick", "x" * 120):
        job_id = tick_id("tick", name, "0123456789ab", at)
        assert parse_tick_id(job_id) == ("tick", name, "0123456789ab", at)
        assert len(job_id) <= 200
    for other in (new_id(), "tick:a:0123456789ab:now", "tock:a:0123456789ab:2026-03-29T01:00:00Z"):
        assert parse_tick_id(other) is None


def test_a_stored_schedule_is_plain_json() -> None:
    schedule = Schedule(name="s", job="work", cron="* * * * *", jitter=1.5, catch_up=timedelta(hours=1))
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule).jitter == 1.5
