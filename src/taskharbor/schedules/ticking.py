"""Makes the jobs of due schedules: lease a batch of schedules, enqueue all their jobs, release all until their next ticks.

A crash at any point repeats the step when the leases are over. The cursors are where they were, and the jobs' ids are known, so
no tick is lost and none is doubled. A schedule that cannot be worked on keeps its lease, with the reason as its progress. It is
tried again when that is over, perhaps by another worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from taskharbor.client import chunks
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver, Extension, JobFilter, Release, RetryAt, Settlement
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError
from taskharbor.jobs import TERMINAL_STATES, Failure, JobRecord, JobState, Micros, UpdateFlags, to_datetime
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import FAR, LEASE, MOST_AT_ONCE, Reading, own_record, read
from taskharbor.schedules.tick_ids import generation_of, tick_id

log = logging.getLogger("taskharbor.schedules")

# Schedules in one call.
BATCH = 500
_MOST = 20 * BATCH
# The type of the error in the attempt log for ticks that made no job, because one before them has not ended.
SKIPPED = "Skipped"
OPEN_STATES = frozenset(JobState) - TERMINAL_STATES
_CHUNK = 1000
_PAUSE = UpdateFlags(run_at="yes")


class _Step(msgspec.Struct, eq=False):
    """One leased schedule: the jobs to make, and how the lease ends."""

    record: JobRecord
    reading: Reading | None = None
    ticks: list[Micros] = []
    jobs: list[JobRecord] = []
    settlement: Settlement | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return self.record.key or ""


async def tick(driver: Driver, now: Micros, worker: str, clock: Clock | None = None) -> int:
    """Make the jobs of up to 10,000 due schedules. Returns the number of schedules: call again until it is 0.

    Args:
        clock: Tells when the leases are over: a worker that was frozen meanwhile makes nothing more.

    Raises:
        BackendUnavailable: The backend does not answer, or too late. The leases run out, and the step is repeated.
    """
    size, steps = min(BATCH, driver.capabilities.batch), list[_Step]()

    def check(until: Micros = now + LEASE) -> None:
        if clock is not None and clock.now() >= until:
            raise BackendUnavailable("the leases of schedules are over")

    # The jobs of all come first: they wait for no release.
    while len(steps) < _MOST:
        leased = await driver.reserve(QUEUE, limit=size, lease_for=LEASE, now=now, worker=worker)
        batch = [_planned(record, now) for record in leased]
        await _look(driver, [one for one in batch if one.ticks and _needs_look(one)], now, check)
        for one in batch:
            _make(one, now)
        check()
        await _enqueue(driver, [one for one in batch if one.jobs], now)
        for one in batch:
            one.jobs = []
        steps += batch
        # The other schedules wait for the next call: releases must not come after the leases.
        if len(leased) < size or (clock is not None and clock.now() > now + LEASE // 3):
            break
    ends = [one.settlement for one in steps if not one.error and one.settlement is not None]
    for part in chunks(ends, size):
        for error in filter(None, await driver.settle(part, now=now)):
            log.debug("a schedule could not be released: %s", error)
    if failed := [one for one in steps if one.error]:
        await _report(driver, failed, now)
    return len(steps)


def _planned(record: JobRecord, now: Micros) -> _Step:
    step = _Step(record)
    try:
        reading = read(record.payload)
        if reading.spec.name != record.key:
            raise InvalidRequest(f"the schedule {reading.spec.name!r} is stored under the key {record.key!r}")
        step.reading = reading
        following: Micros | None = None
        if reading.stored.paused is None:
            step.ticks = reading.due(record.run_at_us, now)
            # A store may lease by a clock that is a little ahead of `now`: that tick is the next one.
            following = reading.following(max(now, record.run_at_us - 1))
        step.settlement = Release(record.id, record.token or "", FAR if following is None else following)
    except Exception as error:
        step.error = _reason(error)
    return step


def _needs_look(step: _Step) -> bool:
    spec = None if step.reading is None else step.reading.spec
    return spec is not None and (spec.overlap != "allow" or spec.pause_on_failure)


def _make(step: _Step, now: Micros) -> None:
    if not step.ticks or step.error or step.reading is None:
        return
    ticks, missed, generation = step.ticks, 0, generation_of(step.record.id)
    if step.reading.spec.catch_up_mode == "last":
        ticks, missed = ticks[-1:], len(ticks) - 1
    try:
        step.jobs = [step.reading.job("tick", generation, one, now, missed) for one in ticks]
    except Exception as error:
        step.error = _reason(error)


# -- overlap and failures -----------------------------------------------------------------------------------


async def _look(driver: Driver, steps: Sequence[_Step], now: Micros, check: Callable[[], None]) -> None:
    """Decide about schedules for which it matters what became of their jobs. Jobs of their own ticks that are there already come
    from an earlier try of this step."""
    own: dict[str, list[str]] = {}
    for step in steps:
        assert step.reading is not None
        ids = own[step.record.id] = _ids(step, step.ticks)
        if step.reading.spec.pause_on_failure:
            ids += _ids(step, step.reading.ticks(step.reading.stored.since, step.ticks[0] - 1, MOST_AT_ONCE))
    found: dict[str, JobRecord] = {}
    for part in chunks((one for ids in own.values() for one in ids), _CHUNK):
        found.update({one.id: one for one in await driver.get(part, now=now) if one is not None})
    for step in steps:
        known = [found[one] for one in own[step.record.id] if one in found]
        try:
            await _decide(driver, step, {one.id: one for one in known}, now, check)
        except (BackendUnavailable, OSError, SchemaMismatch):
            raise
        except Exception as error:
            step.error = _reason(error)


async def _decide(
    driver: Driver, step: _Step, known: dict[str, JobRecord], now: Micros, check: Callable[[], None]
) -> None:
    reading = step.reading
    assert reading is not None
    spec = reading.spec
    dead = next((one for one in known.values() if one.state is JobState.DEAD), None)
    if spec.pause_on_failure and dead is not None:
        note = f"job {dead.id} is dead: {(dead.last_error or '').partition(chr(10))[0]}"
        paused = replace(reading.stored, paused=note)
        # Its key is inflight, so it is stored as blocked, and merged by the release.
        step.ticks, step.jobs = [], [own_record(paused, now, FAR, _PAUSE)]
        step.settlement = Release(step.record.id, step.record.token or "")
        log.warning("schedule %s is paused: %s", spec.name, note)
        return
    ids = _ids(step, step.ticks)
    made = [one for one, job_id in zip(step.ticks, ids, strict=True) if job_id in known]
    # An earlier try has decided about all up to the newest that it made.
    step.ticks = [one for one in step.ticks if not made or one > made[-1]]
    if not step.ticks or reading.key is None or spec.queue is None:
        return
    if spec.overlap == "skip":
        running = JobFilter(queue=spec.queue, key=reading.key, states=OPEN_STATES)
        page = await driver.list_jobs(running, now=now, limit=1)
        if page.jobs:
            times = ", ".join(str(to_datetime(one)) for one in step.ticks[:3])
            error = Failure.of(SKIPPED, f"job {page.jobs[0].id} has not ended at {times}")
            release = step.settlement
            assert isinstance(release, Release)
            assert release.run_at_us is not None
            # Of the same effect as a release, and the log says why there was no job. The count of failures stays.
            step.settlement = RetryAt(
                release.job_id, release.token, release.run_at_us, step.record.attempts, error
            )
            step.ticks = []
        # The first runs from now on, so the others are skipped.
        step.ticks = step.ticks[:1]
    elif spec.overlap == "replace":
        step.ticks = step.ticks[-1:]
        check()
        await driver.cancel_keys([reading.key], queue=spec.queue, now=now)


def _ids(step: _Step, ticks: Sequence[Micros]) -> list[str]:
    generation = generation_of(step.record.id)
    return [tick_id("tick", step.name, generation, to_datetime(one)) for one in ticks]


# -- writing ------------------------------------------------------------------------------------------------


async def _enqueue(driver: Driver, steps: Sequence[_Step], now: Micros) -> None:
    """Enqueue the jobs of a batch. If it is refused, it is halved until the schedule that is to blame stands alone."""
    try:
        for part in chunks((job for one in steps for job in one.jobs), _CHUNK):
            await driver.enqueue(part, now=now)
    except (BackendUnavailable, OSError, SchemaMismatch):
        raise
    except Exception as error:
        if len(steps) == 1:
            steps[0].error = _reason(error)
            return
        half = len(steps) // 2
        await _enqueue(driver, steps[:half], now)
        await _enqueue(driver, steps[half:], now)


async def _report(driver: Driver, steps: Sequence[_Step], now: Micros) -> None:
    """Keep the leases of schedules with an error, and say why. They are tried again when the leases are over."""
    for one in steps:
        log.warning("schedule %s cannot be worked on: %s; it is tried again", one.name, one.error)
    extensions = [
        Extension(one.record.id, one.record.token or "", msgspec.json.encode({"error": one.error[:1000]}))
        for one in steps
    ]
    await driver.extend_lease(extensions, lease_for=LEASE, now=now)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TaskHarborError) else f"{type(error).__name__}: {error}"
