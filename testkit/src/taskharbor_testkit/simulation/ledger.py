"""The record of a simulation: every call in the step in which it takes effect, whether or not its caller gets the answer.

The guarantees are judged by this record and the attempt log, never by the state of a worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import Enqueued, Extension, QueueSettings, Settlement
from taskharbor.drivers.operations import Reserve
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, JobRecord, Lease, Micros, Outcome
from taskharbor_testkit.model.records import SUCCEEDS_AGAIN
from taskharbor_testkit.simulation.scheduler import Scheduler


class GrantedLease(msgspec.Struct, eq=False):
    """One lease, from the call that granted it to the row that ended it."""

    job: JobRecord
    """The job as the worker got it."""
    lease: Lease
    """Renewed by heartbeats."""
    granted_in: int
    """Number of the call that granted it: calls are totally ordered."""
    granted_us: Micros
    stamped_us: Micros
    """The same moment by the clock of the worker that asked."""
    ended: Attempt | None = None
    ended_in: int | None = None
    ended_us: Micros = 0

    @property
    def has_expired(self) -> bool:
        return self.ended is not None and self.ended.outcome is Outcome.EXPIRED

    def overlaps(self, later: GrantedLease) -> bool:
        return self.ended_in is None or self.ended_in > later.granted_in

    def __str__(self) -> str:
        end = "still open" if self.ended is None else f"{self.ended.outcome} at {self.ended_us}"
        return (
            f"lease {self.job.fence} of job {self.job.id} ({self.job.worker}, granted at {self.granted_us}, "
            f"expires at {self.lease.expires_at_us}, {end})"
        )


class Claim(msgspec.Struct, eq=False):
    """A settlement or a heartbeat, and its answer."""

    item: Settlement | Extension
    who: str
    at_us: Micros
    now: Micros
    before: JobRecord | None
    """The job before the call."""
    is_valid: bool
    """True if, by this ledger, the lease is the job's current one and has not expired."""
    answer: JobError | None = None
    changed: bool = False
    """The call changed the job. Looked at for claims that are not valid."""

    @property
    def is_repeated(self) -> bool:
        """The job is already in the state that this settlement leads to, so it succeeds again."""
        return self.before is not None and self.before.state in SUCCEEDS_AGAIN.get(type(self.item), ())

    def __str__(self) -> str:
        answer = "accepted" if self.answer is None else type(self.answer).__name__
        return f"{brief(self.item)} by {self.who} at {self.at_us} (now={self.now}): {answer}"


class Execution(msgspec.Struct, eq=False):
    """A handler's run, as the handler itself recorded it."""

    job_id: str
    fence: int
    worker: str
    started_us: Micros
    lease: GrantedLease | None
    """The lease with this fence, where it had been granted at the start."""
    lease_until_us: Micros
    """The expiry of its lease at the start; 0 where the lease had ended."""
    ended_us: Micros | None = None
    result: str = ""
    """`returned`, or the name of the exception it raised; empty where it never ended."""

    def __str__(self) -> str:
        return (
            f"execution of job {self.job_id} under lease {self.fence} on {self.worker} "
            f"({self.started_us} to {self.ended_us}, {self.result or 'unfinished'})"
        )


class Ledger:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_closed = False
        """The run is over: abandoned handlers that are cancelled now are not part of it."""
        self.calls = 0
        """The number of calls that have taken effect."""
        self.accepted: dict[str, JobRecord] = {}
        """Every job the backend accepted, as it was requested."""
        self.leases: list[GrantedLease] = []
        self._granted: dict[tuple[str, int], GrantedLease] = {}
        """Job id and fence -> the newest lease."""
        self.open: defaultdict[str, dict[str, GrantedLease]] = defaultdict(dict)
        """Queue -> job id -> the lease that holds it now, expired or not."""
        self.rows: list[Attempt] = []
        self.claims: list[Claim] = []
        self.executions: list[Execution] = []
        self.inflight: list[tuple[int, list[GrantedLease]]] = []
        """Per grant in a limited queue: the limit, and the leases valid just after."""
        self.overdue: list[tuple[str, Micros, GrantedLease]] = []
        """Expired leases that a reserve did not end: who reserved, when."""
        self.settings: dict[str, QueueSettings] = {}
        self.unknown_rows: list[Attempt] = []
        """Rows that end a lease nobody was granted."""
        self.clock_errors: list[str] = []
        """Calls whose `now` was too far from the backend's time."""
        self.unrepeated: list[str] = []
        """Settlements that were lost on the way and given up."""
        self.mishaps: list[str] = []
        """Processes that crashed, hung or did not stop."""

    def book_rows(self, rows: Sequence[Attempt]) -> None:
        self.rows += rows
        for row in rows:
            if row.reserved_at_us is None:
                continue
            lease = self.open[row.queue].get(row.job_id)
            if lease is None or lease.job.fence != row.fence:
                self.unknown_rows.append(row)
                continue
            del self.open[row.queue][row.job_id]
            lease.ended, lease.ended_in, lease.ended_us = row, self.calls, self._scheduler.now_us

    def book_reserve(self, who: str, call: Reserve, records: Sequence[JobRecord]) -> None:
        held, now = self.open[call.queue], call.now
        self.overdue += [(who, now, lease) for lease in held.values() if lease.lease.expires_at_us <= now]
        for job in records:
            assert job.lease is not None
            lease = GrantedLease(job, job.lease, self.calls, self._scheduler.now_us, now)
            held[job.id] = self._granted[job.id, job.fence] = lease
            self.leases.append(lease)
        limit = self.settings[call.queue].max_inflight if call.queue in self.settings else None
        if records and limit is not None:
            self.inflight.append((limit, [one for one in held.values() if one.lease.expires_at_us > now]))

    def claim(self, item: Settlement | Extension, before: JobRecord | None, who: str, now: Micros) -> Claim:
        """Judge a claim by the ledger, before the backend does."""
        held = self.lease_of(item.job_id)
        is_valid = held is not None and held.lease.token == item.token and held.lease.expires_at_us > now
        claim = Claim(item, who, self._scheduler.now_us, now, before, is_valid)
        self.claims.append(claim)
        return claim

    def lease_of(self, job_id: str) -> GrantedLease | None:
        return next((held[job_id] for held in self.open.values() if job_id in held), None)

    def begin(self, job_id: str, fence: int, worker: str) -> Execution:
        lease = self._granted.get((job_id, fence))
        until_us = lease.lease.expires_at_us if lease is not None and lease.ended is None else 0
        execution = Execution(job_id, fence, worker, self._scheduler.now_us, lease, until_us)
        self.executions.append(execution)
        return execution


def brief(value: Any) -> str:
    """A call's argument or answer, short enough for a trace."""
    match value:
        case list() | tuple():
            return "[" + " ".join(map(brief, value)) + "]"
        case JobRecord():
            return f"{value.id}:{value.type}:{value.state}#{value.fence}"
        case Enqueued():
            return f"{value.id}{'=' if value.existed else '+'}"
        case Lease():
            return f"{value.job_id}>{value.expires_at_us}"
        case Exception():
            return type(value).__name__
        case _ if hasattr(value, "token"):
            return f"{type(value).__name__}({value.job_id} {value.token})"
    return str(value)
