"""Request -> record: fill in what was left open, convert, encode, give an id.

The client stores effective limits in the record, so a driver never needs a policy to apply them. Records are checked as every
driver checks them (`drivers.validation`), all of a batch before any of it is sent: bad input changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec

from taskharbor.alike import AlikeJobs
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.validation import check_records
from taskharbor.errors import InvalidRequest
from taskharbor.ids import new_ids
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
    to_micros,
)

_MOST_TEMPLATES = 1_000

_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]
"""Straight from msgspec: less than half the cost of making a record of its fields."""


class EncodedPayload(msgspec.Struct, frozen=True, gc=False):
    """A payload that is bytes already (checked and encoded against a handler's types)."""

    data: bytes


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a client fills in where a request leaves it open."""

    queue: str = DEFAULT_QUEUE
    codec: str = "json"
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_stalls: int = 0
    timeout: timedelta | float | None = None
    backoff: tuple[float, float] = (DEFAULT_BACKOFF_MIN / SECOND, DEFAULT_BACKOFF_MAX / SECOND)
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


class RecordBuilder:
    """Makes records of requests, by one client's defaults and codecs."""

    def __init__(self, defaults: Defaults | None = None, codecs: CodecRegistry | None = None) -> None:
        self.defaults = defaults or Defaults()
        self.codecs = codecs or CodecRegistry()
        self._templates: dict[tuple[str, str, str], JobRecord] = {}
        """By type, queue and codec: a record with the client's defaults."""

    def build(self, requests: Sequence[JobRequest], now: Micros) -> list[JobRecord]:
        ids = new_ids(len(requests))
        records = [self._record(*pair, now) for pair in zip(requests, ids, strict=True)]
        check_records(records)
        return records

    def build_like(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> list[JobRecord]:
        """Jobs that differ in nothing but their (encoded) payloads: checked once, then copied."""
        return self.alike(request, payloads, now).records() if payloads else []

    def alike(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> AlikeJobs:
        """The same, for who stores them without making a record of each."""
        # What is checked of a payload is its length.
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
        template = self._templates.get((request.type, queue, codec))
        record = _copy(template or self._template(request.type, queue, codec))
        record.id = job_id
        record.payload = data
        record.created_at_us = now
        record.run_at_us = now if request.run_at is None and request.delay is None else _run_at(request, now)
        if request.headers:
            record.headers = dict(request.headers)
        if request.priority is not None:
            record.priority = request.priority
        if request.timeout is not None:
            record.timeout_us = _timeout(request.timeout)
        if request.key is not None:
            record.key = _printable("key", request.key)
            record.update = request.update
        elif request.update is not None:
            raise InvalidRequest("update flags say how to change a job with the same key: give a key too")
        if request.idempotency_key is not None:
            record.idempotency_key = _printable("idempotency_key", request.idempotency_key)
        if request.max_attempts:  # 0 is the seeds' way to say "not set".
            record.max_attempts = request.max_attempts
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
            max_attempts=defaults.max_attempts,
            max_stalls=defaults.max_stalls,
            backoff_min_us=shortest,
            backoff_max_us=longest,
        )
        if len(self._templates) < _MOST_TEMPLATES:
            self._templates[type, queue, codec] = template
        return template


def _printable(what: str, text: str) -> str:
    """A driver takes any text; one with a line break in it is a mistake of the caller."""
    if isinstance(text, str) and not text.isprintable():
        raise InvalidRequest(f"{what} {text!r} has characters that cannot be printed")
    return text


def _duration(what: str, value: timedelta | float) -> Micros:
    if isinstance(value, timedelta):
        return to_micros(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e10:
        raise InvalidRequest(f"{what} {value!r}: give seconds or a timedelta")
    return round(value * SECOND)


def _run_at(request: JobRequest, now: Micros) -> Micros:
    if request.run_at is not None:
        if request.delay is not None:
            raise InvalidRequest("give either run_at or delay, not both")
        return to_micros(request.run_at)
    assert request.delay is not None
    delay = _duration("delay", request.delay)
    if delay < 0:
        raise InvalidRequest(f"delay {request.delay!r} lies in the past")
    return now + delay


def _timeout(timeout: timedelta | float) -> Micros:
    duration = _duration("timeout", timeout)
    if duration <= 0:
        raise InvalidRequest(f"timeout {timeout!r} must be longer than nothing")
    return duration


def _backoff(bounds: tuple[float, float]) -> tuple[Micros, Micros]:
    try:
        shortest, longest = bounds
        is_right = 0 <= shortest <= longest < 1e9
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise InvalidRequest(f"backoff {bounds!r}: seconds as (shortest, longest), shortest first")
    return round(shortest * SECOND), round(longest * SECOND)
