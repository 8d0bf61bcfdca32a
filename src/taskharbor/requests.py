"""Request -> record: validate, fill in what was left open, encode, give an id.

The client stores effective limits in the record, so a driver never needs a policy to apply them. All of a batch
is checked before any of it is sent: bad input changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec

from taskharbor.alike import AlikeJobs
from taskharbor.codec import CodecRegistry
from taskharbor.errors import InvalidRequest
from taskharbor.ids import new_id, new_ids
from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    MAX_HEADERS_BYTES,
    MAX_NAME_LENGTH,
    MAX_PAYLOAD_BYTES,
    MAX_PRIORITY,
    SECOND,
    JobRecord,
    JobRequest,
    Micros,
    to_micros,
)

MAX_COUNT = 1_000_000
_NO_HEADERS: dict[str, str] = {}


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


class Policy(NamedTuple):
    """How long and how often a job may be tried, checked."""

    timeout: Micros
    max_attempts: int
    max_stalls: int
    backoff_min: Micros
    backoff_max: Micros


class RecordBuilder:
    """Makes records of requests, by one client's defaults and codecs."""

    def __init__(self, defaults: Defaults | None = None, codecs: CodecRegistry | None = None) -> None:
        self.defaults = defaults or Defaults()
        self.codecs = codecs or CodecRegistry()
        self._checked_names: set[str] = set()
        self._usual: Policy | None = None
        """What the defaults come to, once they were checked."""

    def build_one(self, request: JobRequest, now: Micros) -> JobRecord:
        return self._record(request, new_id(), now)

    def build(self, requests: Sequence[JobRequest], now: Micros) -> list[JobRecord]:
        return [self._record(*pair, now) for pair in zip(requests, new_ids(len(requests)), strict=True)]

    def build_like(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> list[JobRecord]:
        """Jobs that differ in nothing but their (encoded) payloads: checked once, then copied."""
        return self.alike(request, payloads, now).records() if payloads else []

    def alike(self, request: JobRequest, payloads: Sequence[bytes], now: Micros) -> AlikeJobs:
        """The same, for who stores them without making a record of each."""
        # What is checked of a payload is its length.
        longest = max(payloads, key=len, default=b"")
        template = self._record(msgspec.structs.replace(request, payload=EncodedPayload(longest)), "", now)
        template.payload = b""
        return AlikeJobs(template, payloads)

    def _record(self, request: JobRequest, job_id: str, now: Micros) -> JobRecord:
        defaults = self.defaults
        queue = defaults.queue if request.queue is None else request.queue
        codec_name = request.codec or defaults.codec
        payload = request.payload
        if isinstance(payload, EncodedPayload):
            data = payload.data
        else:
            data = self.codecs.get(codec_name).encode(payload)
        if len(data) > defaults.max_payload_bytes:
            raise InvalidRequest(
                f"payload of {len(data)} bytes for {request.type!r}: at most {defaults.max_payload_bytes} are "
                "accepted; store the data elsewhere and enqueue a reference to it"
            )
        checked = self._checked_names
        if request.type not in checked:
            self._check_name("type", request.type)
        if queue not in checked:
            self._check_name("queue", queue)
        if request.update is not None and request.key is None:
            raise InvalidRequest("update flags say how to change a job with the same key: give a key too")
        timeout, max_attempts, max_stalls, backoff_min, backoff_max = self._policy(request)
        return JobRecord(
            id=job_id,
            type=request.type,
            queue=queue,
            payload=data,
            codec=codec_name,
            headers=_NO_HEADERS if not request.headers else _checked_headers(request.headers),
            priority=0 if request.priority is None else _checked_priority(request.priority),
            run_at_us=now if request.run_at is None and request.delay is None else _run_at(request, now),
            created_at_us=now,
            timeout_us=timeout,
            key=None if request.key is None else _checked_text("key", request.key),
            update=request.update,
            idempotency_key=None
            if request.idempotency_key is None
            else _checked_text("idempotency_key", request.idempotency_key),
            max_attempts=max_attempts,
            max_stalls=max_stalls,
            backoff_min_us=backoff_min,
            backoff_max_us=backoff_max,
        )

    def _policy(self, request: JobRequest) -> Policy:
        # 0 is the seeds' way to say "not set".
        is_usual = (
            request.timeout is None
            and not request.max_attempts
            and request.max_stalls is None
            and request.backoff is None
        )
        if is_usual and self._usual is not None:
            return self._usual
        defaults = self.defaults
        minimum, maximum = defaults.backoff if request.backoff is None else request.backoff
        policy = Policy(
            _timeout(request.timeout if request.timeout is not None else defaults.timeout),
            _checked_count("max_attempts", request.max_attempts or defaults.max_attempts, 1),
            _checked_count(
                "max_stalls", defaults.max_stalls if request.max_stalls is None else request.max_stalls, 0
            ),
            _backoff(minimum, minimum, maximum),
            _backoff(maximum, minimum, maximum),
        )
        if is_usual:
            self._usual = policy
        return policy

    def _check_name(self, what: str, name: str) -> None:
        _checked_text(what, name)
        if len(self._checked_names) < 10_000:
            self._checked_names.add(name)


def _checked_text(what: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{what} must be a non-empty string, not {text!r}")
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"{what} of {len(text)} characters: at most {MAX_NAME_LENGTH} are accepted")
    if not text.isprintable():
        raise InvalidRequest(f"{what} {text!r} has characters that cannot be printed")
    return text


def check_queue_name(name: str) -> str:
    return _checked_text("queue", name)


def _checked_priority(priority: int) -> int:
    if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority {priority!r}: a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(priority)


def _checked_count(what: str, value: int, least: int) -> int:
    if not isinstance(value, int) or not least <= value <= MAX_COUNT:
        raise InvalidRequest(f"{what} {value!r}: a whole number from {least} to {MAX_COUNT}")
    return value


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    plain = dict(headers)
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in plain.items()):
        raise InvalidRequest("headers must map strings to strings")
    size = sum(len(name.encode()) + len(value.encode()) for name, value in plain.items())
    if size > MAX_HEADERS_BYTES:
        raise InvalidRequest(f"headers of {size} bytes: at most {MAX_HEADERS_BYTES} are accepted")
    return plain


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


def _timeout(timeout: timedelta | float | None) -> Micros:
    if timeout is None:
        return 0
    duration = _duration("timeout", timeout)
    if duration <= 0:
        raise InvalidRequest(f"timeout {timeout!r} must be longer than nothing")
    return duration


def _backoff(value: float, minimum: float, maximum: float) -> Micros:
    if not 0 <= minimum <= maximum < 1e9:
        raise InvalidRequest(
            f"backoff {(minimum, maximum)!r}: seconds as (shortest, longest), shortest first"
        )
    return round(value * SECOND)
