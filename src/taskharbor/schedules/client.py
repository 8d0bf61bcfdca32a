"""Puts, lists, pauses, triggers and deletes schedules: `client.schedules` of both clients."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from taskharbor.client import AsyncClient, Client, JobHandle, blocking, chunks, portal
from taskharbor.drivers.contract import Driver, Enqueued, JobFilter
from taskharbor.errors import Forbidden, InvalidRequest, ScheduleNotFound
from taskharbor.jobs import LATEST, SECOND, JobRecord, JobState, Micros, UpdateFlags, to_datetime
from taskharbor.queue_settings import declare
from taskharbor.requests import as_instant
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import (
    FAR,
    LEASE,
    Reading,
    Schedule,
    StoredSchedule,
    decode,
    own_record,
    read,
    request_of,
    stored_schedule,
)
from taskharbor.schedules.tick_ids import generation_of, tick_id
from taskharbor.schedules.ticking import OPEN_STATES

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor

log = logging.getLogger("taskharbor.schedules")

MOST_BACKFILLED = 10_000
_PAGE = 1000
# The next times of a schedule that are shown.
_SHOWN = 5
# The last ticks whose jobs are looked at for the state of a schedule.
_LOOK_BACK = 10
_KEEP_ATTEMPTS = timedelta(days=7)


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is now. All but the specification is computed from the jobs that there are.

    Attributes:
        schedule: None if it cannot be read on this machine.
        state: `active`, `paused`, `ended`, or `orphaned`: the app that was asked about no longer declares it.
        note: The reason of a pause.
        next: The next five times.
        last: The last tick whose job is still kept.
        last_job: The id of that job.
        last_state: The state of that job.
        missed: Of the last ten ticks, those without a job of their own: missed, skipped, or merged into another.
        error: The reason why it cannot be worked on, or why its last tick was skipped.
        origin: The package whose code declares it. None: made at run time.
        job_id: The id of the schedule's own job.
    """

    name: str
    schedule: Schedule | None
    state: str
    note: str | None
    next: list[datetime]
    last: datetime | None
    last_job: str | None
    last_state: JobState | None
    missed: int
    error: str | None
    origin: str | None
    job_id: str


class _Held(msgspec.Struct):
    """The schedule's own job, and its payload with a change that waits for the end of the lease."""

    record: JobRecord
    payload: bytes


async def put(driver: Driver, stored: StoredSchedule, now: Micros) -> bool:
    """Store a schedule, or change the one of its name. Returns False if nothing has changed.

    Raises:
        InvalidRequest: The queue of its jobs forgets them too early.
    """
    spec, flags = stored.spec, UpdateFlags(run_at="earlier")
    for held in await _find(driver, now, spec.name):
        try:
            before = decode(held.payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break  # What cannot be read is replaced.
        if before.given == stored.given:
            return False
        if spec.revision is not None and (before.spec.revision or 0) > spec.revision:
            log.info("schedule %s: revision %d is not put, a newer one is there", spec.name, spec.revision)
            return False
        if before.paused is not None:
            stored, flags = replace(stored, paused=before.paused), UpdateFlags()
    keep_done = (await driver.settings(spec.queue or "")).keep_done_us
    if keep_done is not None and keep_done < 2 * LEASE:
        raise InvalidRequest(
            f"schedule {spec.name!r}: queue {spec.queue!r} keeps done jobs for {keep_done / SECOND:g} s, and after a crash a "
            f"tick is known by its job: set keep_done to {2 * LEASE // SECOND} s or more"
        )
    try:
        await declare(driver, QUEUE, {"keep_attempts": _KEEP_ATTEMPTS}, now)
    except Forbidden as error:
        log.debug("the settings of queue %s are not applied: %s", QUEUE, error)
    # `earlier`: the handler goes on from its cursor, so a change forgets no tick that is due.
    await driver.enqueue([own_record(stored, now, now, flags)], now=now)
    return True


async def _find(driver: Driver, now: Micros, name: str | None = None) -> list[_Held]:
    """Return the schedules that there are, or the one of a name."""
    found: dict[str, _Held] = {}
    waiting: dict[str, JobRecord] = {}
    selection, cursor = JobFilter(queue=QUEUE, key=name, states=OPEN_STATES), None
    while True:
        page = await driver.list_jobs(selection, now=now, limit=_PAGE, cursor=cursor)
        for job in page.jobs:
            if job.state is JobState.BLOCKED:
                waiting[job.key or ""] = job
            elif not job.cancel_requested:
                found[job.key or ""] = _Held(job, job.payload)
        if (cursor := page.cursor) is None:
            break
    for key, job in waiting.items():
        found.setdefault(key, _Held(job, b"")).payload = job.payload
    return [found[key] for key in sorted(found)]


class AsyncSchedules:
    """The schedules of a store, for async code: `client.schedules`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def put(self, schedule: Schedule, *, app: Harbor | None = None) -> bool:
        """Store a schedule, or change the one of its name. With an app, the declaration of the job counts.

        Returns:
            False if nothing has changed, or if the stored one has a higher `revision`.

        Raises:
            InvalidRequest: A field has a wrong value, or the queue of the jobs forgets them too early.
        """
        now = await self._client.now()
        if app is None:
            stored = stored_schedule(schedule, request_of(schedule), self._client.builder, now)
        else:
            from taskharbor.schedules.declarations import complete

            stored = complete(app, schedule)(now=now)
        return await put(self._client.driver, stored, now)

    async def get(self, name: str) -> ScheduleInfo:
        """Return a schedule. Raises ScheduleNotFound."""
        now = await self._client.now()
        (info,) = await self._infos([await self._one(name, now)], now)
        return info

    async def list(self, *, app: Harbor | None = None) -> builtins.list[ScheduleInfo]:
        """Return all schedules by name. With an app, those that it no longer declares are `orphaned`."""
        now = await self._client.now()
        infos = await self._infos(await _find(self._client.driver, now), now)
        if app is not None:
            from taskharbor.schedules.declarations import origins

            app.load()
            gone = {one.name for one in infos if one.origin in origins(app)} - app.schedules.keys()
            infos = [replace(one, state="orphaned") if one.name in gone else one for one in infos]
        return infos

    async def page(
        self, *, limit: int, cursor: str | None = None
    ) -> tuple[builtins.list[ScheduleInfo], str | None]:
        """Return some schedules, newest first, and the cursor of the next page or None.

        A change that waits for the end of a lease does not show yet.
        """
        now, states = await self._client.now(), OPEN_STATES - {JobState.BLOCKED}
        selection = JobFilter(queue=QUEUE, states=states)
        page = await self._client.driver.list_jobs(selection, now=now, limit=limit, cursor=cursor)
        held = [_Held(job, job.payload) for job in page.jobs if not job.cancel_requested]
        return await self._infos(held, now), page.cursor

    async def pause(self, name: str, note: str = "") -> None:
        """Pause a schedule: no more ticks until it is resumed. Raises ScheduleNotFound."""
        await self._change(name, FAR, paused=note)

    async def resume(self, name: str) -> None:
        """Undo a pause. Ticks of the pause are not made later. Raises ScheduleNotFound."""
        now = await self._client.now()
        await self._change(name, now, paused=None, since=now)

    async def trigger(self, name: str) -> JobHandle[Any]:
        """Make a job of the schedule now, beside its ticks. Raises ScheduleNotFound."""
        accepted = await self._trigger(name, await self._client.now())
        return JobHandle(self._client, accepted.id, accepted.existed)

    async def _trigger(self, name: str, now: Micros) -> Enqueued:
        held = await self._one(name, now)
        job = read(held.payload).job("trigger", generation_of(held.record.id), now, now)
        (accepted,) = await self._client.driver.enqueue([job], now=now)
        return accepted

    async def backfill(self, name: str, start: datetime, end: datetime) -> int:
        """Make the jobs of all ticks from `start` to `end`, in the past. A tick is made once, however often it is asked for.

        Returns:
            The number of new jobs.

        Raises:
            ScheduleNotFound: No schedule has this name.
            InvalidRequest: It has another `overlap` than "allow", or there are more than 10,000 ticks.
        """
        now = await self._client.now()
        held = await self._one(name, now)
        reading = read(held.payload)
        if reading.spec.overlap != "allow":
            raise InvalidRequest(
                f"schedule {name!r} has overlap {reading.spec.overlap!r}, so all but one of the jobs would be left out: enqueue "
                "them yourself, or put the schedule with overlap 'allow'"
            )
        low, high = as_instant("start", start), as_instant("end", end)
        if high > now or low > high:
            raise InvalidRequest(
                f"backfill from {start} to {end}: give two instants in the past, the earlier one first"
            )
        # In a thread: thousands of ticks take a second.
        ticks = await asyncio.to_thread(reading.ticks, low, high, MOST_BACKFILLED + 1)
        if len(ticks) > MOST_BACKFILLED:
            raise InvalidRequest(
                f"backfill from {start} to {end}: more than {MOST_BACKFILLED} ticks, ask for fewer"
            )
        made, generation = 0, generation_of(held.record.id)
        for part in chunks(ticks, _PAGE):
            jobs = [reading.job("backfill", generation, one, now) for one in part]
            made += sum(not one.existed for one in await self._client.driver.enqueue(jobs, now=now))
        return made

    async def delete(self, name: str) -> None:
        """Delete a schedule. Jobs that it has made stay. Raises ScheduleNotFound."""
        now = await self._client.now()
        await self._one(name, now)
        await self._client.driver.cancel_keys([name], queue=QUEUE, now=now)

    async def _one(self, name: str, now: Micros) -> _Held:
        found = await _find(self._client.driver, now, name)
        if not found:
            raise ScheduleNotFound(name)
        return found[0]

    async def _change(self, name: str, run_at: Micros, **state: Any) -> None:
        now = await self._client.now()
        before = read((await self._one(name, now)).payload).stored
        stored = replace(before, **state)
        if before.paused is None and stored.paused is None:
            return  # A repeated resume forgets no tick that is due.
        job = own_record(stored, now, run_at, UpdateFlags(run_at="yes"))
        await self._client.driver.enqueue([job], now=now)

    async def _infos(self, held: Sequence[_Held], now: Micros) -> builtins.list[ScheduleInfo]:
        driver, keeps = self._client.driver, dict[str, Micros]()
        found = dict[str, JobRecord]()
        readings, ids = builtins.list[Reading | str](), builtins.list[dict[Micros, str]]()
        for one in held:
            try:
                reading = read(one.payload)
                queue = reading.spec.queue or ""
                if queue not in keeps:
                    keep_done = (await driver.settings(queue)).keep_done_us
                    keeps[queue] = LATEST if keep_done is None else keep_done
            except InvalidRequest as error:
                readings.append(str(error))
                ids.append({})
                continue
            # Older jobs may be gone.
            since = max(reading.stored.since, now - keeps[queue])
            ticks = reading.ticks(since, min(now, one.record.run_at_us - 1), _LOOK_BACK)
            readings.append(reading)
            ids.append({tick: _id_of(one, tick) for tick in ticks})
        for part in chunks((one for own in ids for one in own.values()), _PAGE):
            found.update({job.id: job for job in await driver.get(part, now=now) if job is not None})
        return [
            _info(one, reading, {tick: found.get(job_id) for tick, job_id in own.items()}, now)
            for one, reading, own in zip(held, readings, ids, strict=True)
        ]


def _id_of(held: _Held, tick: Micros) -> str:
    return tick_id("tick", held.record.key or "", generation_of(held.record.id), to_datetime(tick))


def _info(
    held: _Held, reading: Reading | str, jobs: dict[Micros, JobRecord | None], now: Micros
) -> ScheduleInfo:
    record, coming = held.record, list[datetime]()
    if isinstance(reading, str):
        stored, state, error = None, "active", reading
    else:
        stored, tick, error = reading.stored, reading.following(now), None
        state = "paused" if stored.paused is not None else "active" if tick is not None else "ended"
        while tick is not None and len(coming) < _SHOWN and state == "active":
            coming.append(to_datetime(tick))
            tick = reading.following(tick)
    if record.progress is not None and record.state is JobState.INFLIGHT:
        error = msgspec.json.decode(record.progress).get("error")
    elif record.failed_at_us is not None and record.failed_at_us >= max(jobs, default=0):
        error = record.last_error
    last = max((tick for tick, job in jobs.items() if job is not None), default=None)
    job = None if last is None else jobs[last]
    return ScheduleInfo(
        name=record.key or "",
        schedule=None if stored is None else stored.spec,
        state=state,
        note=None if stored is None else stored.paused,
        next=coming,
        last=None if last is None else to_datetime(last),
        last_job=None if job is None else job.id,
        last_state=None if job is None else job.state,
        missed=sum(job is None for job in jobs.values()),
        error=error,
        origin=None if stored is None else stored.origin,
        job_id=record.id,
    )


class Schedules:
    """`AsyncSchedules` for synchronous code: `client.schedules`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inner = AsyncSchedules(client._inner)

    put = blocking(AsyncSchedules.put)
    get = blocking(AsyncSchedules.get)
    list = blocking(AsyncSchedules.list)
    pause = blocking(AsyncSchedules.pause)
    resume = blocking(AsyncSchedules.resume)
    backfill = blocking(AsyncSchedules.backfill)
    delete = blocking(AsyncSchedules.delete)

    def trigger(self, name: str) -> JobHandle[Any]:
        """Make a job of the schedule now, beside its ticks. Raises ScheduleNotFound."""
        accepted = portal().call(self._inner._trigger(name, self._client.now()))
        return JobHandle(self._client, accepted.id, accepted.existed)
