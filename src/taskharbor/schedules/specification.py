"""A schedule: its checks, the form in which it is stored, and the jobs of its ticks.

A schedule is stored as JSON in the payload of its own job, complete with all options of the jobs that it makes. So any worker can
make them, even one without the app's code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from taskharbor.errors import InvalidRequest
from taskharbor.handlers import RunOptions
from taskharbor.jobs import (
    LARGEST_PAYLOAD,
    LATEST,
    MAX_TRIES,
    SECOND,
    JobRecord,
    JobRequest,
    Micros,
    UpdateFlags,
    to_datetime,
    to_micros,
)
from taskharbor.requests import Defaults, RecordBuilder, as_duration, as_instant, new_id
from taskharbor.schedules import QUEUE, TYPE
from taskharbor.schedules.tick_ids import Made, instant_text, tick_id

Overlap: TypeAlias = Literal["allow", "skip", "queue_one", "replace"]
CatchUpMode: TypeAlias = Literal["each", "last"]

# `run_at` of a schedule that rests: paused or ended.
FAR: Micros = LATEST
# The most ticks of a schedule that are made in one step.
MOST_AT_ONCE = 100
# A tick that is less late than this is not a missed one.
GRACE: Micros = 60 * SECOND
# The lease of whoever makes the jobs of a tick. It is shorter than the grace, so a crash costs no tick.
LEASE: Micros = GRACE // 2
MOST_LIMIT = 10_000
LONGEST_NAME = 120
MOST_EXPRESSIONS = 20
# Parameters of a handler that get the time of the tick, and of the one before it, unless the payload gives them.
FILLED = ("at", "previous")
_NAME = re.compile(rf"[^\s/\\?#%]{{1,{LONGEST_NAME}}}")
_DURATIONS = ("every", "offset", "catch_up", "jitter", "timeout")
_BUILDER = RecordBuilder(Defaults(max_payload_bytes=LARGEST_PAYLOAD))
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When to make a job, and which. Durations are seconds or timedeltas, instants aware datetimes.

    Attributes:
        name: The name of the schedule in its store.
        job: The type of the jobs.
        payload: A mapping of the job's arguments.
        cron: An expression of 5 fields, or 6 with seconds first. Several are a union.
        every: A distance instead, counted from the epoch.
        offset: Moves the instants of `every`.
        zone: The zone of the cron expressions, a name of the tz database.
        start: The first instant that may be a tick.
        end: The last one.
        limit: The number of ticks after which the schedule ends.
        overlap: If the job of the tick before has not ended: make the next one too, make none, let one wait, or replace it.
        catch_up: The age up to which a missed tick is made later. None: one interval. 0: missed ticks are not made.
        catch_up_mode: `last`: one job for all missed ticks. Its header `taskharbor.missed` has the number of the others.
        jitter: The most by which a job is moved after its tick. Each tick has a delay of its own, the same in every process.
        pause_on_failure: A dead job of the schedule pauses it.
        revision: Of two versions of the app the higher one counts. None: the one that came last.

    The others are options of the jobs.
    """

    name: str
    job: str
    payload: Any = None
    cron: str | Sequence[str] | None = None
    every: timedelta | float | None = None
    offset: timedelta | float = 0.0
    zone: str = "UTC"
    start: datetime | None = None
    end: datetime | None = None
    limit: int | None = None
    overlap: Overlap = "allow"
    catch_up: timedelta | float | None = None
    catch_up_mode: CatchUpMode = "each"
    jitter: timedelta | float = 0.0
    pause_on_failure: bool = False
    revision: int | None = None
    queue: str | None = None
    priority: int | None = None
    timeout: timedelta | float | None = None
    max_attempts: int | None = None
    max_stalls: int | None = None
    backoff: tuple[float, float] | None = None
    headers: Mapping[str, str] | None = None
    key: str | None = None


# The options of the jobs.
OPTIONS = Schedule.__struct_fields__[Schedule.__struct_fields__.index("queue") :]


class ScheduleOptions(RunOptions, total=False):
    """Options of `harbor.schedule(...)`: fields of `Schedule`."""

    cron: str | Sequence[str]
    every: timedelta | float
    offset: timedelta | float
    zone: str
    start: datetime
    end: datetime
    limit: int
    overlap: Overlap
    catch_up: timedelta | float
    catch_up_mode: CatchUpMode
    jitter: timedelta | float
    pause_on_failure: bool
    revision: int
    headers: Mapping[str, str]
    key: str


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of a schedule's own job.

    Attributes:
        spec: All options of the jobs are given, and durations are in seconds.
        since: Ticks count from here: the schedule was made, changed or resumed.
        fills: The arguments that get the time of the tick.
        paused: The note of a pause. None: not paused.
        until: The last tick by `limit`.
        origin: The top package of the code that declares it. None: made at run time.
    """

    spec: Schedule
    since: Micros
    fills: tuple[str, ...] = ()
    paused: str | None = None
    until: Micros | None = None
    origin: str | None = None

    @property
    def given(self) -> bytes:
        """The part that a declaration gives. The same text means that nothing has changed."""
        return msgspec.json.encode((self.spec, self.fills, self.origin))


def checked(schedule: Schedule) -> Schedule:
    """Return the schedule with durations in seconds and a list of expressions. Raises InvalidRequest."""
    name = schedule.name
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.isprintable():
        wanted = f"1 to {LONGEST_NAME} printable characters without blanks and / \\ ? # %"
        raise InvalidRequest(f"name {name!r} of a schedule: give {wanted}")
    try:
        return _normal(schedule)
    except InvalidRequest as error:
        raise InvalidRequest(f"schedule {name!r}: {error}") from None


def _normal(schedule: Schedule) -> Schedule:
    from taskharbor.schedules.times import times_of, zone_of

    crons = (schedule.cron,) if isinstance(schedule.cron, str) else tuple(schedule.cron or ())
    durations = {field: value for field in _DURATIONS if (value := getattr(schedule, field)) is not None}
    us = {field: as_duration(field, value) for field, value in durations.items()}
    start, end = (one and as_instant("start or end", one) for one in (schedule.start, schedule.end))
    every, offset, key = us.get("every", 0), us["offset"], schedule.key
    overlap: str = schedule.overlap
    _check(bool(crons) != ("every" in us), "give either cron or every")
    texts = len(crons) <= MOST_EXPRESSIONS and all(isinstance(one, str) for one in crons)
    _check(texts, f"cron {schedule.cron!r}: give a text, or a list of at most {MOST_EXPRESSIONS} texts")
    _check(not (crons and offset), "offset moves the instants of `every`: write it into the cron expression")
    _check(crons or every >= SECOND, f"every {every / SECOND:g}: at least 1 second")
    _check(not (start and end) or start <= end, f"end {schedule.end} comes before start {schedule.start}")
    _check(
        overlap != "queue_all", "overlap 'queue_all' needs lanes, which there are not yet: use 'queue_one'"
    )
    is_free = overlap == "allow" or key is None
    _check(is_free, f"key {key!r}: overlap {overlap!r} gives the jobs a key of its own")
    for field, known in (("overlap", get_args(Overlap)), ("catch_up_mode", get_args(CatchUpMode))):
        value = getattr(schedule, field)
        _check(value in known, f"{field} {value!r}: choose one of {', '.join(known)}")
    for field, long in us.items():
        _check(0 <= long <= LATEST // 4, f"{field} {long / SECOND:g}: 0 or more, and at most 70 years")
    for field, numbers in (("limit", range(1, MOST_LIMIT + 1)), ("revision", range(2**53))):
        value = getattr(schedule, field)
        is_given = type(value) is int and value in numbers
        _check(
            value is None or is_given,
            f"{field} {value!r}: give a whole number from {numbers[0]} to {numbers[-1]}",
        )
    if schedule.zone != "UTC":
        zone_of(schedule.zone)
    first = times_of(crons, every, offset, schedule.zone).following((start or 1) - 1)
    _check(first is not None, f"cron {schedule.cron!r} never matches")
    seconds: dict[str, Any] = {field: duration / SECOND for field, duration in us.items()}
    return replace(schedule, cron=crons or None, **seconds)


def _check(holds: object, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


def request_of(schedule: Schedule) -> JobRequest:
    """Return the request for a job of the schedule, with the options that it gives. Raises InvalidRequest."""
    payload = {} if schedule.payload is None else schedule.payload
    if not isinstance(payload, Mapping):
        raise InvalidRequest(
            f"schedule {schedule.name!r}: payload {payload!r}: give a mapping of the job's arguments"
        )
    options = {name: getattr(schedule, name) for name in OPTIONS}
    return JobRequest(type=schedule.job, payload=dict(payload), **options)


def stored_schedule(
    schedule: Schedule,
    request: JobRequest,
    builder: RecordBuilder,
    now: Micros,
    fills: Iterable[str] = (),
    **state: Any,
) -> StoredSchedule:
    """Return the form to store. `request` is for the jobs, with the defaults of the caller. Raises InvalidRequest, CodecError."""
    normal, fills = checked(schedule), tuple(fills)
    # Another worker may have to add to the payload, so it is always JSON.
    (record,) = builder.build([replace(request, codec="json")], now)
    same = {
        name: getattr(record, name) for name in ("queue", "priority", "max_attempts", "max_stalls", "headers")
    }
    backoff = (record.backoff_min_us / SECOND, record.backoff_max_us / SECOND)
    payload, timeout = msgspec.json.decode(record.payload), record.timeout_us / SECOND
    spec = replace(normal, payload=payload, timeout=timeout, backoff=backoff, **same)
    if record.queue == QUEUE:
        raise InvalidRequest(f"schedule {schedule.name!r}: queue {QUEUE!r} is for the schedules themselves")
    made = StoredSchedule(spec=spec, since=now, fills=fills, **state)
    if spec.limit is not None:
        reading, tick = Reading(made), (now if spec.start is None else to_micros(spec.start)) - 1
        for _ in range(spec.limit):
            if (following := reading.following(tick)) is None:
                break
            tick = following
        made = replace(made, until=tick)
    return made


def own_record(stored: StoredSchedule, now: Micros, run_at: Micros, flags: UpdateFlags) -> JobRecord:
    """Return the schedule's own job, to store it or to change it."""
    return JobRecord(
        id=new_id(),
        type=TYPE,
        queue=QUEUE,
        key=stored.spec.name,
        payload=msgspec.json.encode(stored),
        run_at_us=run_at,
        created_at_us=now,
        max_attempts=MAX_TRIES,
        update=flags,
    )


class Reading:
    """A stored schedule, ready to be asked. Raises InvalidRequest for one that this machine cannot read."""

    def __init__(self, stored: StoredSchedule) -> None:
        # Imported here: a worker without schedules does not pay for it.
        from taskharbor.schedules.times import times_of

        self.stored = stored
        self.spec = spec = stored.spec
        us = {field: round((getattr(spec, field) or 0) * SECOND) for field in _DURATIONS}
        # Every producer can store anything in the queue of the schedules.
        _check(spec.queue not in ("", None, QUEUE), f"queue {spec.queue!r} cannot have its jobs")
        _check(spec.cron or us["every"] >= SECOND, f"every {spec.every!r}: at least 1 second")
        _check(len(spec.cron or ()) <= MOST_EXPRESSIONS, f"more than {MOST_EXPRESSIONS} expressions")
        self.times = times_of(tuple(spec.cron or ()), us["every"], us.get("offset", 0), spec.zone)
        self.start: Micros = 0 if spec.start is None else to_micros(spec.start)
        ends = (stored.until, None if spec.end is None else to_micros(spec.end), FAR - 1)
        self.end: Micros = min(one for one in ends if one is not None)
        self.key = spec.key if spec.overlap == "allow" else f"schedule:{spec.name}"
        self._catch_up = None if spec.catch_up is None else us["catch_up"]
        self._jitter = us["jitter"]
        # Only built: whoever put the schedule has checked it.
        self._template = _BUILDER._record(replace(request_of(spec), codec="json"), "", 0)
        self._template.key = self.key

    def following(self, instant: Micros) -> Micros | None:
        """Return the first tick later than this, or None."""
        tick = self.times.following(max(instant, self.start - 1))
        return None if tick is None or tick > self.end else tick

    def ticks(self, low: Micros, high: Micros, most: int) -> list[Micros]:
        """Return the newest `most` ticks from `low` to `high`, in order."""
        found: list[Micros] = []
        low, high = max(low, self.start), min(high, self.end)
        while len(found) < most and (tick := self.times.latest(high)) is not None and tick >= low:
            found.append(tick)
            high = tick - 1
        return found[::-1]

    def due(self, cursor: Micros, now: Micros) -> list[Micros]:
        """Return the ticks to make now, if none from `cursor` on was made."""
        window = self._catch_up
        if window is None:
            latest, following = self.times.latest(now), self.times.following(now)
            window = 0 if latest is None else (following or now) - latest
        return self.ticks(max(cursor, now - max(window, GRACE) + 1), now, MOST_AT_ONCE)

    def job(self, made: Made, generation: str, tick: Micros, now: Micros, missed: int = 0) -> JobRecord:
        """Return the job of a tick."""
        spec, record, at = self.spec, _copy(self._template), to_datetime(tick)
        before = self.times.latest(tick - 1)
        previous = None if before is None else to_datetime(before)
        record.id = tick_id(made, spec.name, generation, at)
        record.created_at_us = now
        record.run_at_us = tick + self._delay(tick) if made == "tick" else now
        record.headers = {
            **record.headers,
            "taskharbor.schedule": spec.name,
            "taskharbor.at": instant_text(at),
        }
        if previous is not None:
            record.headers["taskharbor.previous"] = instant_text(previous)
        if missed:
            record.headers["taskharbor.missed"] = str(missed)
        if self.key is not None:
            # A job that is merged into another keeps no id. By this, a repeated try is still recognised.
            record.idempotency_key = record.id
        if self.stored.fills:
            values = {"at": at, "previous": previous}
            payload = {**(spec.payload or {}), **{name: values[name] for name in self.stored.fills}}
            record.payload = msgspec.json.encode(payload)
        return record

    def _delay(self, tick: Micros) -> Micros:
        if not self._jitter:
            return 0
        noise = hashlib.blake2b(f"{self.spec.name}:{tick}".encode(), digest_size=8).digest()
        return int.from_bytes(noise) % (self._jitter + 1)


decode = msgspec.json.Decoder(StoredSchedule).decode


@lru_cache(16_384)
def read(payload: bytes) -> Reading:
    """Read the payload of a schedule's own job. Raises InvalidRequest."""
    try:
        return Reading(decode(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"the schedule cannot be read: {error}") from None
