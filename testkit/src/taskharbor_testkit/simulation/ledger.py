"""The record of a simulation: every call in the step in which it takes effect, whether or not its caller gets the answer.

The guarantees are judged by this record and the attempt log, never by the state of a worker.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import Ack, Discard, Enqueued, Extension, Fail, QueueSettings, Settlement
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, JobRecord, JobState, Lease, Micros

_SUCCEEDS_AGAIN: dict[type, tuple[JobState, ...]] = {
    Ack: (JobState.DONE,),
    Fail: (JobState.DONE, JobState.DEAD),
    Discard: (JobState.CANCELLED,),
}


class LeaseSeen(msgspec.Struct, eq=False):
    """One lease, from the call that granted it to the row that ended it."""

    job_id: str
    fence: int
    queue: str
    key: str | None
    token: str
    worker: str | None
    run_at_us: Micros
    expires_at_us: Micros
    granted_in: int
    """Number of the call that granted it: calls are totally ordered."""
    granted_us: Micros
    stamped_us: Micros
    """The same moment by the clock of the worker that asked."""
    ended: Attempt | None = None
    ended_in: int | None = None
    ended_us: Micros | None = None

    def __str__(self) -> str:
        end = "still open" if self.ended is None else f"{self.ended.outcome} at {self.ended_us}"
        return (
            f"lease {self.fence} of job {self.job_id} ({self.worker}, granted at {self.granted_us}, "
            f"to expire at {self.expires_at_us}, {end})"
        )


class Claim(msgspec.Struct, eq=False):
    """A holder's attempt to act under a lease: a settlement or a heartbeat, and its answer."""

    verb: str
    job_id: str
    who: str
    at_us: Micros
    now: Micros
    is_valid: bool
    """By this ledger: the lease was the job's current one and not over."""
    repeats: bool
    """The job was already where this would bring it: succeeding again is right."""
    answer: JobError | None = None
    changed: bool = False
    """The job's record differs from before. Looked at for claims that are not valid."""

    def __str__(self) -> str:
        answer = "accepted" if self.answer is None else type(self.answer).__name__
        return f"{self.verb} of job {self.job_id} by {self.who} at {self.at_us} (now={self.now}): {answer}"


class Execution(msgspec.Struct, eq=False):
    """A handler's run, as the handler itself wrote it down."""

    job_id: str
    fence: int
    worker: str
    started_us: Micros
    lease_until_us: Micros
    """When its lease was to expire, as things stood at the start; 0 where the lease was gone."""
    ended_us: Micros | None = None
    result: str = ""
    """`returned`, or the name of the exception it raised; empty where it never came to an end."""

    def __str__(self) -> str:
        return (
            f"execution of job {self.job_id} under lease {self.fence} on {self.worker} "
            f"({self.started_us} to {self.ended_us}, {self.result or 'unfinished'})"
        )


class Ledger:
    def __init__(self) -> None:
        self.is_closed = False
        """The run is over: what abandoned handlers do while they are buried is not part of it."""
        self.number = 0
        """How many calls have taken effect."""
        self.accepted: dict[str, JobRecord] = {}
        """Every job the backend ever took, as it was asked for."""
        self.leases: list[LeaseSeen] = []
        self.open: defaultdict[str, dict[str, LeaseSeen]] = defaultdict(dict)
        """Queue -> job id -> the lease that holds it now, valid or not."""
        self.rows: list[Attempt] = []
        self.claims: list[Claim] = []
        self.executions: list[Execution] = []
        self.crowds: list[tuple[int, list[LeaseSeen]]] = []
        """Per grant in a limited queue: W, and the leases valid just after."""
        self.overdue: list[tuple[str, Micros, LeaseSeen]] = []
        """Leases that were over and still not ended after a look for work: who looked, when."""
        self.settings: dict[str, QueueSettings] = {}
        self.unknown_rows: list[Attempt] = []
        """Rows that end a lease nobody was granted."""

    # -- bookings -----------------------------------------------------------------------------------------

    def book_rows(self, rows: Sequence[Attempt], true_us: Micros) -> None:
        self.rows += rows
        for row in rows:
            if row.reserved_at_us is None:
                continue
            lease = self.open[row.queue].get(row.job_id)
            if lease is None or lease.fence != row.fence:
                self.unknown_rows.append(row)
                continue
            del self.open[row.queue][row.job_id]
            lease.ended = row
            lease.ended_in = self.number
            lease.ended_us = true_us

    def book_enqueue(self, records: Sequence[JobRecord], answers: Sequence[Enqueued]) -> None:
        for record, answer in zip(records, answers, strict=True):
            if not answer.existed:
                self.accepted[answer.id] = record

    def book_reserve(
        self, queue: str, records: Sequence[JobRecord], *, who: str, true_us: Micros, now: Micros
    ) -> None:
        held = self.open[queue]
        for lease in held.values():
            if lease.expires_at_us <= now:
                self.overdue.append((who, now, lease))
        for record in records:
            same = {
                name: getattr(record, name) for name in LeaseSeen.__struct_fields__ if hasattr(record, name)
            }
            lease = LeaseSeen(
                job_id=record.id, granted_in=self.number, granted_us=true_us, stamped_us=now, **same
            )
            self.leases.append(lease)
            held[record.id] = lease
        limit = self.settings[queue].max_inflight if queue in self.settings else None
        if records and limit is not None:
            self.crowds.append((limit, [one for one in held.values() if one.expires_at_us > now]))

    def claim(
        self, item: Settlement | Extension, state: JobState | None, *, who: str, true_us: Micros, now: Micros
    ) -> Claim:
        """Judge a claim by the books, before the backend does. `state` is the job's at this moment."""
        lease = self.lease_of(item.job_id)
        is_valid = lease is not None and lease.token == item.token and lease.expires_at_us > now
        repeats = state in _SUCCEEDS_AGAIN.get(type(item), ())
        claim = Claim(type(item).__name__, item.job_id, who, true_us, now, is_valid, repeats)
        self.claims.append(claim)
        return claim

    def book_extension(self, answer: Lease) -> None:
        lease = self.lease_of(answer.job_id)
        if lease is not None:
            lease.token = answer.token
            lease.expires_at_us = answer.expires_at_us

    def lease_of(self, job_id: str) -> LeaseSeen | None:
        for held in self.open.values():
            if job_id in held:
                return held[job_id]
        return None

    def is_quiet(self) -> bool:
        """Nobody holds anything: a cheap look before a thorough one."""
        return not any(self.open.values())

    def begin(self, job_id: str, fence: int, worker: str, true_us: Micros) -> Execution:
        lease = self.lease_of(job_id)
        until_us = lease.expires_at_us if lease is not None and lease.fence == fence else 0
        execution = Execution(job_id, fence, worker, true_us, until_us)
        self.executions.append(execution)
        return execution


def brief(value: Any) -> str:
    """A call's argument or answer, short enough for a trace."""
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(brief(item) for item in value) + "]"
    if isinstance(value, JobRecord):
        return f"{value.id}:{value.type}:{value.state}#{value.fence}"
    if isinstance(value, Enqueued):
        return f"{value.id}{'=' if value.existed else '+'}"
    if isinstance(value, Lease):
        return f"{value.job_id}>{value.expires_at_us}"
    if isinstance(value, (JobError, BaseException)):
        return type(value).__name__
    if isinstance(value, (Settlement, Extension)):
        return f"{type(value).__name__}({value.job_id} {value.token})"
    return str(value)


class Trace:
    """The story of a run, line by line: two runs of one seed agree in every byte of it."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str, str]] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, at: float, who: str, what: str) -> None:
        self._events.append((at, who, what))

    def lines(self) -> list[str]:
        return [f"{at:12.6f} {who:<8} {what}" for at, who, what in self._events]

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()
