"""Makes a record of a request: defaults, conversions, encoding, an id.

The client stores effective limits in the record, so a driver needs no policy to apply them. Records are checked as every driver
checks them (`drivers.validation`). All of a batch is checked before any of it is sent: bad input changes nothing.

Ids are UUIDv7 strings, made in batches. Ids in the order of time keep a backend's id index append-mostly, so inserts stay flat at
ten million jobs. An id is made before the first try of an enqueue. So a repeated try (after an ambiguous commit) has the same id
and is recognised.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, overload

import msgspec

from taskharbor.codec import CodecRegistry
from taskharbor.drivers.validation import check_records
from taskharbor.errors import CodecError, InvalidRequest
from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    MAX_PAYLOAD_BYTES,
    SECOND,
    JobRecord,
    JobRequest,
    Micros,
    UpdateFlags,
    to_micros,
)

_MOST_TEMPLATES = 1_000

_lock = threading.Lock()
_last = 0
# Ids of one millisecond differ in these digits only. Formatting all digits for each id would cost most of its time.
_LAST_COUNT = 0xFFF
_COUNTS = [f"{number:03x}" for number in range(_LAST_COUNT + 1)]

_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]
"""msgspec's own copy: less than half the cost of making a record from its fields."""


class EncodedPayload(msgspec.Struct, frozen=True, gc=False):
    """A payload that is encoded already, after a check against a handler's types."""

    data: bytes


_EMPTY = EncodedPayload(b"")


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a client fills in for the fields that a request leaves open."""

    queue: str = DEFAULT_QUEUE
    codec: str = "json"
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_stalls: int = 0
    timeout: timedelta | float | None = None
    backoff: tuple[float, float] = (DEFAULT_BACKOFF_MIN / SECOND, DEFAULT_BACKOFF_MAX / SECOND)
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


class AlikeJobs(Sequence[JobRecord]):
    """Jobs that differ in nothing but their payloads. For millions of jobs, a record for each would cost more than storing it.

    It is a sequence of records. Code that knows this class takes the template and the payloads, and no record is ever made. On
    the first access to a record, all records are made and get their ids.
    """

    __slots__ = ("_records", "payloads", "template")

    def __init__(self, template: JobRecord, payloads: Sequence[bytes]) -> None:
        self.template = template
        """The record without an id and without a payload."""
        self.payloads = payloads
        self._records: list[JobRecord] | None = None

    def __len__(self) -> int:
        return len(self.payloads)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self.records())

    @overload
    def __getitem__(self, place: int) -> JobRecord: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[JobRecord]: ...

    def __getitem__(self, place: int | slice) -> JobRecord | Sequence[JobRecord]:
        if isinstance(place, slice) and self._records is None:
            return AlikeJobs(self.template, self.payloads[place])
        return self.records()[place]

    def records(self) -> list[JobRecord]:
        """Return the records. Every call returns the same ones, so a change in them stays."""
        if self._records is None:
            template = self.template
            made = [_copy(template) for _ in self.payloads]
            for record, job_id, payload in zip(made, new_ids(len(made)), self.payloads, strict=True):
                record.id = job_id
                record.payload = payload
            self._records = made
        return self._records


class RecordBuilder:
    """Makes records of requests, by one client's defaults and codecs."""

    def __init__(self, defaults: Defaults | None = None, codecs: CodecRegistry | None = None) -> None:
        self.defaults = defaults or Defaults()
        self.codecs = codecs or CodecRegistry()
        self._templates: dict[tuple[str, str, str], JobRecord] = {}
        """Records with the client's defaults, by type, queue and codec."""

    def build(self, requests: Sequence[JobRequest], now: Micros) -> list[JobRecord]:
        for kind in set(map(type, requests)):
            if not issubclass(kind, JobRequest):
                raise InvalidRequest(
                    f"{kind.__name__} where a request belongs: give a JobRequest, as job.request(...) returns"
                )
        ids = new_ids(len(requests))
        records: list[JobRecord] = []
        try:
            records.extend(self._record(*pair, now) for pair in zip(requests, ids, strict=True))
        except (InvalidRequest, CodecError) as error:
            raise error if len(requests) == 1 else wrong_row(len(records), error) from None
        try:
            check_records(records)
        except InvalidRequest as error:
            # The place of the only record says nothing.
            raise InvalidRequest(str(error).removesuffix(" (in records[0])")) from None
        return records

    def check(self, owner: str, type: str, options: Mapping[str, Any]) -> None:
        """Refuse defaults and options that no request of this type may have. Raises InvalidRequest, which names the owner."""
        try:
            self.codecs.get(options.get("codec") or self.defaults.codec)
            # The key may be given later than the flags for it.
            self.build([JobRequest(type=type, payload=_EMPTY, **{"key": "later", **options})], 0)
        except (InvalidRequest, CodecError) as error:
            raise InvalidRequest(f"{owner}: {error}") from None

    def build_like(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> list[JobRecord]:
        """Make records of jobs that differ in nothing but their (encoded) payloads. They are checked once and then copied."""
        return self.alike(request, payloads, now).records() if payloads else []

    def alike(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> AlikeJobs:
        """Do the same without a record for each job."""
        # The only check of a payload is its length.
        longest = EncodedPayload(max(payloads, key=len, default=b""))
        (template,) = self.build([msgspec.structs.replace(request, payload=longest)], now)
        template.id = ""
        template.payload = b""
        return AlikeJobs(template, payloads)

    def _record(self, request: JobRequest, job_id: str, now: Micros) -> JobRecord:
        defaults = self.defaults
        codec = request.codec or defaults.codec
        payload = request.payload
        if isinstance(payload, EncodedPayload):
            data = payload.data
        else:
            data = self.codecs.get(codec).encode(payload)
        if len(data) > defaults.max_payload_bytes:
            raise InvalidRequest(
                f"payload of {len(data)} bytes for {request.type!r}: at most {defaults.max_payload_bytes} are "
                "accepted; store the data elsewhere and enqueue a reference to it"
            )
        queue = defaults.queue if request.queue is None else request.queue
        try:
            template = self._templates.get((request.type, queue, codec))
        except TypeError:
            raise InvalidRequest(
                f"type {request.type!r}, queue {queue!r}, codec {codec!r}: give texts"
            ) from None
        record = _copy(template or self._template(request.type, queue, codec))
        record.id = job_id
        record.payload = data
        record.created_at_us = now
        record.run_at_us = now if request.run_at is None and request.delay is None else _run_at(request, now)
        if request.headers:
            if not isinstance(request.headers, Mapping):
                raise InvalidRequest(f"headers {request.headers!r}: give a mapping of texts to texts")
            record.headers = dict(request.headers)
        if request.priority is not None:
            record.priority = request.priority
        if request.timeout is not None:
            record.timeout_us = _timeout(request.timeout)
        if request.key is not None:
            record.key = _printable("key", request.key)
            if request.update is not None and not isinstance(request.update, UpdateFlags):
                raise InvalidRequest(f"update {request.update!r}: give UpdateFlags(...)")
            record.update = request.update
        elif request.update is not None:
            raise InvalidRequest("update flags say how to change a job with the same key: give a key too")
        if request.idempotency_key is not None:
            record.idempotency_key = _printable("idempotency_key", request.idempotency_key)
        if request.max_attempts is not None:
            record.max_attempts = _attempts(request.max_attempts)
        if request.max_stalls is not None:
            record.max_stalls = request.max_stalls
        if request.backoff is not None:
            record.backoff_min_us, record.backoff_max_us = _backoff(request.backoff)
        return record

    def _template(self, type: str, queue: str, codec: str) -> JobRecord:
        defaults = self.defaults
        shortest, longest = _backoff(defaults.backoff)
        template = JobRecord(
            id="",
            type=_printable("type", type),
            queue=_printable("queue", queue),
            codec=codec,
            run_at_us=0,
            created_at_us=0,
            timeout_us=0 if defaults.timeout is None else _timeout(defaults.timeout),
            max_attempts=_attempts(defaults.max_attempts),
            max_stalls=defaults.max_stalls,
            backoff_min_us=shortest,
            backoff_max_us=longest,
        )
        if len(self._templates) < _MOST_TEMPLATES:
            self._templates[type, queue, codec] = template
        return template


def wrong_row(number: int, error: Exception) -> Exception:
    """Make the error about one of several requests."""
    kind = TypeError if isinstance(error, TypeError) else InvalidRequest
    return kind(f"row {number}: {error}; nothing was enqueued")


def _printable(what: str, text: str) -> str:
    """Refuse a text with a line break. A driver accepts it, but it is a mistake of the caller."""
    if isinstance(text, str) and not text.isprintable():
        raise InvalidRequest(f"{what} {text!r} has characters that cannot be printed")
    return text


def as_duration(what: str, value: Any) -> Micros:
    """Return seconds or a timedelta in microseconds. Raises InvalidRequest for anything else."""
    if isinstance(value, timedelta):
        return to_micros(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e10:
        instead = "; an instant goes into run_at" if isinstance(value, datetime) else ""
        raise InvalidRequest(f"{what} {value!r}: give seconds or a timedelta{instead}")
    return round(value * SECOND)


def as_seconds(what: str, value: Any) -> float:
    """Return seconds or a timedelta in seconds. Raises InvalidRequest for anything else."""
    return as_duration(what, value) / SECOND


def as_instant(what: str, value: Any) -> Micros:
    """Return an aware datetime in microseconds since the epoch. Raises InvalidRequest for anything else."""
    if not isinstance(value, datetime):
        wanted = "an aware datetime, as datetime.now(timezone.utc) returns"
        raise InvalidRequest(f"{what} {value!r}: give {wanted}")
    return to_micros(value)


def _attempts(count: int) -> int:
    if isinstance(count, int) and count < 1:
        least = "at least 1, the first execution; leave it out for the default"
        raise InvalidRequest(f"max_attempts {count}: {least}")
    return count


def _run_at(request: JobRequest, now: Micros) -> Micros:
    if request.run_at is not None:
        if request.delay is not None:
            both = f"delay {request.delay!r} and run_at {request.run_at}"
            raise InvalidRequest(f"{both}: give one of them, not both")
        return as_instant("run_at", request.run_at)
    assert request.delay is not None
    delay = as_duration("delay", request.delay)
    if delay < 0:
        raise InvalidRequest(f"delay {request.delay!r} lies in the past: give 0 or more")
    return now + delay


def _timeout(timeout: timedelta | float) -> Micros:
    duration = as_duration("timeout", timeout)
    # Of an app's default, a job opts out by 0. What is rounded to it is a mistake.
    if duration <= 0 and timeout:
        raise InvalidRequest(f"timeout {timeout!r}: longer than 0 seconds; 0 itself means no timeout")
    return duration


def _backoff(bounds: tuple[float, float]) -> tuple[Micros, Micros]:
    try:
        shortest, longest = bounds
        is_right = 0 <= shortest <= longest < 1e9
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise InvalidRequest(f"backoff {bounds!r}: give seconds as (shortest, longest), shortest first")
    return round(shortest * SECOND), round(longest * SECOND)


# -- ids -----------------------------------------------------------------------------------------------------


def _noise() -> str:
    """Return the random end of an id, another for every call. Nobody who knows an id can guess the next one of the
    same process."""
    noise = os.urandom(8).hex()
    return f"-{'89ab'[int(noise[0], 16) & 3]}{noise[1:4]}-{noise[4:]}"


def new_ids(count: int) -> list[str]:
    """Return `count` new ids, strictly increasing within this process."""
    start = _next_number(count)
    tail = _noise()
    made: list[str] = []
    for block in range(start & ~_LAST_COUNT, start + count, _LAST_COUNT + 1):
        time_part = f"{block >> 12:012x}"
        head = f"{time_part[:8]}-{time_part[8:]}-7"
        made += [f"{head}{digits}{tail}" for digits in _COUNTS[max(start - block, 0) : start + count - block]]
    return made


def new_id() -> str:
    number = _next_number(1)
    return f"{number >> 28:08x}-{number >> 12 & 0xFFFF:04x}-7{number & _LAST_COUNT:03x}{_noise()}"


def _next_number(count: int) -> int:
    """Return the first of `count` numbers: 48 bits of milliseconds, then a 12-bit counter, as one 60-bit number that
    only grows."""
    global _last
    with _lock:
        start = max(_last + 1, (time.time_ns() // 1_000_000) << 12)
        _last = start + count - 1
    return start


def new_id_head() -> str:
    """Return the common beginning of ids that are made elsewhere. Each id is this text and a number of eight hexadecimal digits.

    It has the time in milliseconds and 42 random bits, so nobody else has the same. The numbers may begin anywhere.
    """
    time_part = f"{time.time_ns() // 1_000_000:012x}"
    noise = os.urandom(6).hex()
    return f"{time_part[:8]}-{time_part[8:]}-7{noise[:3]}-{'89ab'[int(noise[3], 16) & 3]}{noise[4:7]}-{noise[7:11]}"


def new_token() -> str:
    """Return a lease token that nobody can guess. One reserve call may use one token for all its jobs."""
    return secrets.token_hex(12)
