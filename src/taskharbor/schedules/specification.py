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

FAR: Micros = LATEST
"""`run_at` of a schedule that rests: paused or ended."""
MOST_AT_ONCE = 100
"""The most ticks of a schedule that are made in one step."""
GRACE: Micros = 60 * SECOND
"""A tick that is less late than this is not a missed one."""
LEASE: Micros = GRACE // 2
"""The lease of whoever makes the jobs of a tick. It is shorter than the grace, so a crash costs no tick."""
MOST_LIMIT = 10_000
LONGEST_NAME = 120
MOST_EXPRESSIONS = 20
FILLED = ("at", "previous")
"""Parameters of a handler that get the time of the tick, and of the one before it, unless the payload gives them."""
_NAME = re.compile(rf"[^\s/\\?#%]{{1,{LONGEST_NAME}}}")
_DURATIONS = ("every", "offset", "catch_up", "jitter", "timeout")
_BUILDER = RecordBuilder(Defaults(max_payload_bytes=LARGEST_PAYLOAD))
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When to make a job, and which. Durations are seconds or timedeltas, instants aware datetimes."""

    name: str
    job: str
    """The type of the jobs."""
    payload: Any = None
    """A mapping of the job's arguments."""
    cron: str | Sequence[str] | None = None
    """An expression of 5 fields, or 6 with seconds first. Several are a union."""
    every: timedelta | float | None = None
    """A distance, counted from the epoch."""
    offset: timedelta | float = 0.0
    """Moves the instants of `every`."""
    zone: str = "UTC"
    """The zone of the cron expressions, a name of the tz database."""
    start: datetime | None = None
    end: datetime | None = None
    """The first and the last instant that may be a tick."""
    limit: int | None = None
    """The number of ticks after which the schedule ends."""
    overlap: Overlap = "allow"
    """If the job of the tick before has not ended: make the next one too, make none, let one wait, or replace it."""
    catch_up: timedelta | float | None = None
    """The age up to which a missed tick is made later. None: one interval. 0: missed ticks are not made."""
    catch_up_mode: CatchUpMode = "each"
    """`last`: one job for all missed ticks. Its header `taskharbor.missed` has the number of the others."""
    jitter: timedelta | float = 0.0
    """The most by which a job is moved after its tick. Each tick has a delay of its own, the same in every process."""
    pause_on_failure: bool = False
    """A dead job of the schedule pauses it."""
    revision: int | None = None
    """Of two versions of the app the higher one counts. None: the one that came last."""
    queue: str | None = None
    priority: int | None = None
    timeout: timedelta | float | None = None
    max_attempts: int | None = None
    max_stalls: int | None = None
    backoff: tuple[float, float] | None = None
    headers: Mapping[str, str] | None = None
    key: str | None = None


OPTIONS = Schedule.__struct_fields__[Schedule.__struct_fields__.index("queue") :]
"""The options of the jobs."""


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
    """The payload of a schedule's own job."""

    spec: Schedule
    """All options of the jobs are given, and durations are in seconds."""
    since: Micros
    """Ticks count from here: the schedule was made, changed or resumed."""
    fills: tuple[str, ...] = ()
    """The arguments that get the time of the tick."""
    paused: str | None = None
    """The note of a pause. None: not paused."""
    until: Micros | None = None
    """The last tick by `limit`."""
    origin: str | None = None
    """The top package of the code that declares it. None: made at run time."""

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
    crons = (schedule.cron,) if isinstance(schedule.cron, str) else tuple(schedule.cron or ())
    given = {
        field: getattr(schedule, field)
        for field in (*_DURATIONS, "limit", "revision", "overlap", "catch_up_mode")
    }
    us = {field: as_duration(field, given[field]) for field in _DURATIONS if given[field] is not None}
    start, end = (one and as_instant("start or end", one) for one in (schedule.start, schedule.end))
    choices = {"overlap": get_args(Overlap), "catch_up_mode": get_args(CatchUpMode)}
    numbers = {"limit": range(1, MOST_LIMIT + 1), "revision": range(2**53)}
    texts = len(crons) <= MOST_EXPRESSIONS and all(isinstance(one, str) for one in crons)
    is_keyed = schedule.overlap != "allow" and schedule.key is not None
    for is_wrong, message in (
        (bool(crons) == (schedule.every is not None), "give either cron or every"),
        (not texts, f"cron {schedule.cron!r}: give a text, or a list of at most {MOST_EXPRESSIONS} texts"),
        (
            given["overlap"] == "queue_all",
            "overlap 'queue_all' needs lanes, which there are not yet: use 'queue_one'",
        ),
        (is_keyed, f"key {schedule.key!r}: overlap {schedule.overlap!r} gives the jobs a key of its own"),
        (
            bool(crons) and us.get("offset", 0),
            "offset moves the instants of `every`: write it into the cron expression",
        ),
        (not crons and us.get("every", 0) < SECOND, f"every {schedule.every!r}: at least 1 second"),
        (start and end and end < start, f"end {schedule.end} comes before start {schedule.start}"),
        *(
            (given[field] not in known, f"{field} {given[field]!r}: choose one of {', '.join(known)}")
            for field, known in choices.items()
        ),
        *(
            (not 0 <= value <= LATEST // 4, f"{field} {given[field]!r}: 0 or more, and at most 70 years")
            for field, value in us.items()
        ),
        *(
            (
                value is not None and (type(value) is not int or value not in known),
                f"{field} {value!r}: give a whole number from {known[0]}",
            )
            for field, known in numbers.items()
            for value in [given[field]]
        ),
    ):
        if is_wrong:
            raise InvalidRequest(message)
    from taskharbor.schedules.times import times_of

    if (
        times_of(crons, us.get("every", 0), us.get("offset", 0), schedule.zone).following((start or 1) - 1)
        is None
    ):
        raise InvalidRequest(f"cron {schedule.cron!r} never matches")
    seconds: dict[str, Any] = {field: duration / SECOND for field, duration in us.items()}
    return replace(schedule, cron=crons or None, **seconds)


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
