"""What the core checks before it calls a driver, a broker has to check again: who calls it may be anything.

Only what every store can keep passes: no number that overflows in one of them, no name that is longer than a core would send.
Payloads are bounded by the size of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taskharbor.drivers.contract import Extension, Fail, JobFilter, QueueSettings, Release, Retry
from taskharbor.drivers.http.settlements import Settlements
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import (
    MAX_HEADERS_BYTES,
    MAX_NAME_LENGTH,
    MAX_PAYLOAD_BYTES,
    MAX_PRIORITY,
    Failure,
    JobRecord,
    Micros,
)

LATEST: Micros = 2**53 - 1
"""Exact as a floating-point number too, which some stores count in; far beyond any year that matters."""
MOST = 2**31 - 1
LONGEST_ERROR = 65_536


def check_records(records: Sequence[JobRecord]) -> None:
    for record in records:
        if (
            not record.id
            or len(record.id) > MAX_NAME_LENGTH
            or len(record.type) > MAX_NAME_LENGTH
            or len(record.queue) > MAX_NAME_LENGTH
            or len(record.codec) > MAX_NAME_LENGTH
            or (record.key is not None and len(record.key) > MAX_NAME_LENGTH)
            or (record.idempotency_key is not None and len(record.idempotency_key) > MAX_NAME_LENGTH)
        ):
            raise InvalidRequest(
                f"id, type, queue, codec, key and idempotency_key of a job have at most {MAX_NAME_LENGTH} characters"
            )
        if not -MAX_PRIORITY <= record.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority {record.priority}: a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if not (abs(record.run_at_us) <= LATEST and abs(record.created_at_us) <= LATEST):
            raise InvalidRequest("run_at and created_at are microseconds since 1970")
        if not (
            0 <= record.max_attempts <= MOST
            and 0 <= record.max_stalls <= MOST
            and 0 <= record.timeout_us <= LATEST
            and 0 <= record.backoff_min_us <= LATEST
            and 0 <= record.backoff_max_us <= LATEST
        ):
            raise InvalidRequest(
                "max_attempts, max_stalls, timeout and backoff are not negative, nor endless"
            )
        if record.headers:
            _check_headers(record.headers)


def _check_headers(headers: dict[str, str]) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    if size > MAX_HEADERS_BYTES:
        raise InvalidRequest(f"headers of {size} bytes: at most {MAX_HEADERS_BYTES} are accepted")


def check_settlements(told: Settlements) -> None:
    for ack in told.acks:
        if ack.result is not None and len(ack.result) > MAX_PAYLOAD_BYTES:
            raise _too_long("result", ack.result)
    failed: tuple[Retry | Fail, ...] = (*told.retries, *told.fails)
    for settlement in failed:
        if not 0 <= settlement.attempts <= MOST:
            raise InvalidRequest(f"attempts {settlement.attempts}: the number of failures so far")
        _check_error(settlement.error)
    waiting: tuple[Retry | Release, ...] = (*told.retries, *told.releases)
    for one in waiting:
        check_instant("run_at", one.run_at_us)
    for discard in told.discards:
        if discard.reason is not None:
            _check_error(discard.reason)


def _too_long(what: str, data: bytes) -> InvalidRequest:
    return InvalidRequest(f"{what} of {len(data)} bytes: at most {MAX_PAYLOAD_BYTES} are kept")


def _check_error(error: Failure) -> None:
    if len(error.type) + len(error.message) + len(error.detail) > LONGEST_ERROR:
        raise InvalidRequest(f"an error of more than {LONGEST_ERROR} characters: shorten its detail")


def check_extensions(extensions: Sequence[Extension]) -> None:
    for extension in extensions:
        if extension.progress is not None and len(extension.progress) > MAX_PAYLOAD_BYTES:
            raise _too_long("progress", extension.progress)


def check_filter(selection: JobFilter) -> None:
    check_instant("finished_before", selection.finished_before_us)


def check_settings(queue: str, settings: QueueSettings) -> None:
    check_names([queue] if settings.failure_queue is None else [queue, settings.failure_queue])
    if settings.max_inflight is not None and not 0 <= settings.max_inflight <= MOST:
        raise InvalidRequest(f"max_inflight {settings.max_inflight}: a number of jobs, or none for no limit")
    for kept in (settings.keep_done_us, settings.keep_dead_us, settings.keep_attempts_us):
        if kept is not None and not 0 <= kept <= LATEST:
            raise InvalidRequest("retention is a number of microseconds, or none to keep for ever")


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if len(name) > MAX_NAME_LENGTH:
            raise InvalidRequest(f"a name of {len(name)} characters: at most {MAX_NAME_LENGTH} are accepted")


def check_instant(what: str, instant: Micros | None) -> None:
    if instant is not None and abs(instant) > LATEST:
        raise InvalidRequest(f"{what} is given in microseconds since 1970")
