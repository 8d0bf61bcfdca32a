"""Values that come back changed: cut short, trimmed, folded, or sent through a float or a text.

Their author trusted a column type, a collation, a header parser, or `if value:`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from taskharbor.drivers import operations as op
from taskharbor.drivers import records as rec
from taskharbor.drivers.contract import JobFilter, Release
from taskharbor.errors import JobError, LeaseMismatch
from taskharbor.jobs import SECOND, Failure, JobRecord, Lease, Micros, Outcome
from taskharbor_testkit.model.records import matches
from taskharbor_testkit.planted.leasing import _OtherOrder
from taskharbor_testkit.planted.registry import Bug, HandleBug


def _cut(length: int, value: Any) -> Any:
    return value[:length]


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _most(largest: int, value: int) -> int:
    return min(value, largest)


def _utf8(data: bytes) -> bytes:
    return data.decode(errors="replace").encode()


def _unix_lines(value: Any) -> Any:
    return value.replace(b"\r\n", b"\n") if isinstance(value, bytes) else value.replace("\r\n", "\n")


def _millis(us: Micros) -> Micros:
    return us // 1000 * 1000


class _Altered(HandleBug):
    """Changes one field of every struct of one kind, on its way into the store."""

    kind: ClassVar[type]
    field: ClassVar[str]
    change: ClassVar[Callable[[Any], Any]]

    async def run(self, call: Any) -> Any:
        return await super().run(self._altered(call))

    def _altered(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._altered(one) for one in value]
        if not isinstance(value, msgspec.Struct):
            return value
        parts: dict[str, Any] = {
            name: self._altered(part)
            for name in value.__struct_fields__
            if isinstance(part := getattr(value, name), msgspec.Struct | list)
        }
        if isinstance(value, self.kind) and getattr(value, self.field, None) is not None:
            parts[self.field] = type(self).change(getattr(value, self.field))
        return replace(value, **parts)


def _items(change: Callable[[str], str], headers: dict[str, str]) -> dict[str, str]:
    return {name: change(text) for name, text in headers.items()}


def _small_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): text for name, text in headers.items()}


_R, _C = JobRecord, op.Configure
_ALTERED: tuple[tuple[str, str, type, str, Callable[[Any], Any]], ...] = (
    ("IdCut", "An id of 200 characters is kept.", _R, "id", partial(_cut, 64)),
    ("IdTrimmed", "A line break at the end of an id is kept.", _R, "id", str.rstrip),
    ("TypeFolded", "A type keeps its case.", _R, "type", str.lower),
    ("TypeTrimmed", "Blanks around a type are kept.", _R, "type", str.strip),
    ("TypeCut", "A type of 200 characters is kept.", _R, "type", partial(_cut, 128)),
    ("CodecFolded", "A codec keeps its case.", _R, "codec", str.lower),
    ("KeyCut", "A key of 200 characters is kept, to the last one.", _R, "key", partial(_cut, 191)),
    ("KeyNormalized", "A key is kept as it was written, accent by accent.", _R, "key", _nfc),
    ("KeyTrimmedOfLines", "A line break around a key is kept.", _R, "key", lambda key: key.strip("\r\n")),
    (
        "IdempotencyKeyCut",
        "An idempotency key of 200 characters is kept, to the last one.",
        _R,
        "idempotency_key",
        partial(_cut, 100),
    ),
    (
        "IdempotencyKeyOfWideFolded",
        "Wide letters are not narrow ones.",
        _R,
        "idempotency_key",
        partial(unicodedata.normalize, "NFKC"),
    ),
    ("HeaderNamesFolded", "Names of headers keep their case.", _R, "headers", _small_names),
    ("HeadersTrimmed", "Blanks around a header are kept.", _R, "headers", partial(_items, str.strip)),
    ("HeadersCut", "A header of 8,000 bytes is kept.", _R, "headers", partial(_items, partial(_cut, 4096))),
    ("HeadersOfOneLine", "Line breaks in a header are kept.", _R, "headers", partial(_items, _unix_lines)),
    ("PayloadTrimmed", "Blanks and NUL at the end of a payload are kept.", _R, "payload", bytes.rstrip),
    ("PayloadWithoutNul", "NUL at the end is kept.", _R, "payload", lambda data: data.rstrip(b"\0")),
    ("PayloadWithUnixLines", "Line breaks of a payload are kept.", _R, "payload", _unix_lines),
    ("PayloadCut", "A payload of some megabytes is kept.", _R, "payload", partial(_cut, 2**21)),
    ("WorkerCut", "A worker's name of 200 characters is kept.", op.Reserve, "worker", partial(_cut, 64)),
    ("WorkerOfAscii", "A worker's name is kept in any script.", op.Reserve, "worker", _ascii),
    ("WorkerTrimmed", "Blanks around a worker's name are kept.", op.Reserve, "worker", str.strip),
    ("ErrorTypeCut", "The type of an error is kept.", Failure, "type", partial(_cut, 100)),
    ("ErrorTypeTrimmed", "Blanks around the type of an error are kept.", Failure, "type", str.strip),
    ("ErrorMessageOfOneLine", "All lines of an error's message are kept.", Failure, "message", _first_line),
    ("ErrorMessageCut", "A message of 65,536 characters is kept.", Failure, "message", partial(_cut, 4000)),
    ("ErrorDetailOfAscii", "The detail of an error is kept in any script.", Failure, "detail", _ascii),
    ("ErrorDetailTrimmed", "Blanks at the end of an error are kept.", Failure, "detail", str.rstrip),
    ("ErrorDetailCut", "A detail of 65,536 characters is kept.", Failure, "detail", partial(_cut, 2**15)),
    ("ResultCut", "A result of a mebibyte is kept.", rec.Ack, "result", partial(_cut, 2**16 - 1)),
    ("ResultTrimmed", "Blanks and NUL around a result are kept.", rec.Ack, "result", bytes.strip),
    ("ResultAsText", "A result is bytes, no text.", rec.Ack, "result", _utf8),
    ("EmptyResultIsNone", "An empty result is not none.", rec.Ack, "result", lambda data: data or None),
    ("ProgressCut", "Progress of a mebibyte is kept.", rec.Extension, "progress", partial(_cut, 4096)),
    ("ProgressAsText", "Progress is bytes, no text.", rec.Extension, "progress", _utf8),
    (
        "EmptyProgressIsNone",
        "Empty progress replaces what was there.",
        rec.Extension,
        "progress",
        lambda data: data or None,
    ),
    (
        "FailureQueueFolded",
        "The name of a failure queue keeps its case.",
        rec.QueueSettings,
        "failure_queue",
        str.lower,
    ),
    (
        "FailureQueueTrimmed",
        "Blanks around a failure queue's name are kept.",
        rec.QueueSettings,
        "failure_queue",
        str.strip,
    ),
    (
        "DeclarationCut",
        "A declaration of 65,536 characters is kept.",
        rec.QueueSettings,
        "declaration",
        partial(_cut, 8192),
    ),
    (
        "DeclarationTrimmed",
        "Blanks around a declaration are kept.",
        rec.QueueSettings,
        "declaration",
        str.strip,
    ),
    (
        "RetentionInMillis",
        "Retention counts in microseconds.",
        rec.QueueSettings,
        "keep_dead_us",
        lambda us: (us + 999) // 1000 * 1000,
    ),
    (
        "LimitOfSixteenBits",
        "max_inflight is kept up to the largest number.",
        rec.QueueSettings,
        "max_inflight",
        partial(_most, 2**15 - 1),
    ),
    ("BlobCut", "A blob of some megabytes is kept.", op.PutBlob, "data", partial(_cut, 2**20)),
    ("TimeoutCut", "A timeout is kept up to the longest.", _R, "timeout_us", partial(_most, 2**31 - 1)),
    ("BackoffCut", "A backoff is kept up to the longest.", _R, "backoff_max_us", partial(_most, 2**32)),
    (
        "TriesOfSixteenBits",
        "max_attempts is kept up to a million.",
        _R,
        "max_attempts",
        partial(_most, 2**15),
    ),
    ("StallsOfSixteenBits", "max_stalls is kept up to a million.", _R, "max_stalls", partial(_most, 2**15)),
    ("AttemptsOfAByte", "Failures are counted beyond 255.", rec.RetryAt, "attempts", partial(_most, 255)),
    (
        "LeaseInMillis",
        "A lease lasts for microseconds.",
        op.Reserve,
        "lease_for",
        lambda us: max(_millis(us), 1),
    ),
    (
        "LeaseOfTwelveHours",
        "A lease lasts as long as asked.",
        op.Reserve,
        "lease_for",
        partial(_most, 43_200 * SECOND),
    ),
    (
        "CreatedAtThroughAFloat",
        "An instant is exact to the microsecond, in any year.",
        _R,
        "created_at_us",
        lambda us: round(float(us) / SECOND * SECOND) if abs(us) < 2**50 else us // 2 * 2,
    ),
    (
        "RetryAtThroughAFloat",
        "The instant of a retry is exact in any year.",
        rec.RetryAt,
        "run_at_us",
        lambda us: us if abs(us) < 2**52 else us // 4 * 4,
    ),
    (
        "SnoozeNeverInThePast",
        "A release names any instant, one before 1970 too.",
        Release,
        "run_at_us",
        lambda us: max(us, 0),
    ),
    (
        "SnoozeToZeroIsNone",
        "The first instant of 1970 is an instant.",
        Release,
        "run_at_us",
        lambda us: us or None,
    ),
    (
        "RequeueAtZeroIsNow",
        "A requeue at 0 is not one without a time.",
        op.Requeue,
        "run_at_us",
        lambda us: us or None,
    ),
)
for _name, _rule, _kind, _field, _change in _ALTERED:
    type(_name, (_Altered,), {"__doc__": _rule, "kind": _kind, "field": _field, "change": _change})


class QueuesFolded(_Altered):
    """The name of a queue keeps its case."""

    kind, field, change = object, "queue", str.lower


class QueuesCut(_Altered):
    """The name of a queue counts to its last character."""

    kind, field, change = object, "queue", staticmethod(partial(_cut, 190))


class PriorityOrderedAsText(_OtherOrder):
    """A priority of 10 is higher than one of 9."""

    def rank(self, job: JobRecord) -> Any:
        text = f"{job.priority:+d}"
        return ([-ord(character) for character in text], job.run_at_us, self.places[job.id])


class InstantsOrderedAsText(_OtherOrder):
    """An instant with fewer digits comes first, and a negative one before."""

    def rank(self, job: JobRecord) -> Any:
        return (-job.priority, str(job.run_at_us), self.places[job.id])


class InstantsOrderedAsFloats(_OtherOrder):
    """Two instants are different if a microsecond is between them."""

    def rank(self, job: JobRecord) -> Any:
        return (-job.priority, round(job.run_at_us / SECOND, 5), self.places[job.id])


class FilterByZeroIsNone(Bug):
    """A filter by an end before 0 is a filter."""

    def purgeable(self, selection: JobFilter) -> list[str]:
        return super().purgeable(replace(selection, finished_before_us=selection.finished_before_us or None))


class HeadAtZeroIsNone(Bug):
    """The head of a queue may be due at 0."""

    def stats_of(self, queue: str, now: Micros) -> Any:
        stats = super().stats_of(queue, now)
        return replace(stats, head_run_at_us=stats.head_run_at_us or None)


class _OtherMatch(Bug):
    """Compares texts of a filter in a way of its own."""

    def selects(self, selection: JobFilter, job: JobRecord) -> bool:
        raise NotImplementedError

    def listing(self, selection: JobFilter, *, now: Micros) -> list[JobRecord]:
        every = super().listing(replace(selection, key=None, types=None, worker=None), now=now)
        return [job for job in every if self.selects(selection, job)]


class FilterByKeyIsAPattern(_OtherMatch):
    """A filter's key is a text, no pattern."""

    def selects(self, selection: JobFilter, job: JobRecord) -> bool:
        is_any = selection.key == "%" and job.key is not None
        return is_any or matches(job, selection)


class FilterByTypeFolds(_OtherMatch):
    """A filter by type finds that type and no other."""

    def selects(self, selection: JobFilter, job: JobRecord) -> bool:
        types = None if selection.types is None else frozenset(map(str.lower, selection.types))
        return matches(replace(job, type=job.type.lower()), replace(selection, types=types))


class FilterByWorkerTrims(_OtherMatch):
    """A filter by worker finds that worker's jobs and no others."""

    def selects(self, selection: JobFilter, job: JobRecord) -> bool:
        trimmed = replace(job, worker=job.worker and job.worker.strip())
        return matches(trimmed, replace(selection, worker=selection.worker and selection.worker.strip()))


class TokensFolded(Bug):
    """A token in another case proves nothing."""

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super().refuse(job_id, token, now)
        held = self.jobs[job_id].token if isinstance(error, LeaseMismatch) else None
        return super().refuse(job_id, held, now) if held and held.lower() == token.lower() else error


class TokensTrimmed(Bug):
    """A token with a blank at its end proves nothing."""

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        return super().refuse(job_id, token.strip(), now)


class TokensComparedAtTheirBeginning(Bug):
    """The whole token proves a lease, not its beginning."""

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super().refuse(job_id, token, now)
        held = self.jobs[job_id].token if isinstance(error, LeaseMismatch) else None
        return super().refuse(job_id, held, now) if held and token and held.startswith(token) else error


class PayloadSizeInCharacters(Bug):
    """A row of the log counts the payload's bytes."""

    def append(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        as_text = held.payload.decode(errors="replace")
        super().append(job, replace(held, payload=b"." * len(as_text)), outcome, now, error)


class LogOfHalfAName(Bug):
    """A row of the log has the names of its job in full."""

    def append(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        super().append(job, replace(held, type=held.type[:100]), outcome, now, error)


class ExtensionRoundedToMillis(Bug):
    """A heartbeat's lease ends at the microsecond that its answer names."""

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        lease = super().extend(job, expires_at, progress)
        job.expires_at_us = _millis(lease.expires_at_us)
        return lease


class ErrorReadAsNone(Bug):
    """An error of the type `None` is an error."""

    def record_failure(self, job: JobRecord, attempts: int, error: Failure, now: Micros) -> None:
        super().record_failure(job, attempts, error, now)
        job.last_error = None if job.last_error == "None" else job.last_error
