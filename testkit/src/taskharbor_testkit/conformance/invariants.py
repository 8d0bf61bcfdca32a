"""The invariants, by name, judged from what a driver answered and shows: no model, no knowledge of rules.

They hold after every call, in every interleaving, and a breach reads as what went wrong rather than as a diff.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import LATEST, Attempt, JobRecord, JobState, Lease, Micros
from taskharbor_testkit.conformance.snapshot import Mismatch, Snapshot

INVARIANTS = ["noDoubleLease", "oneLeasePerJob", "terminalIsForever", "noLeaseForTerminal", "nothingLost"]
INVARIANTS += [
    "fenceStrictlyIncreasing",
    "wNeverExceeded",
    "neverEarly",
    "oneInflightPerKey",
    "everyLeaseLogged",
]


class InvariantBroken(Mismatch):
    def __init__(self, name: str, message: str) -> None:
        assert name in INVARIANTS
        super().__init__(f"{name}: {message}")


class Span(msgspec.Struct, frozen=True):
    """The time in which one lease was valid: from `start` up to, not including, `end`."""

    job_id: str
    fence: int
    start: Micros
    end: Micros
    place: tuple[str, str] | None
    """Queue and key, where the job has one."""


class Witness:
    """Remembers what was granted and accepted, and judges every later view of the store by it."""

    def __init__(self) -> None:
        self.accepted: set[str] = set()
        self.granted: dict[tuple[str, int], JobRecord] = {}
        self.rows: dict[int, Attempt] = {}
        """Every row ever seen: retention may remove rows, not what they proved."""
        self._tokens: dict[tuple[str, str], int] = {}
        self._fences: dict[str, int] = {}
        self._ends: dict[str, JobState] = {}
        self._may_leave_dead: set[str] = set()
        self._may_vanish = False
        self._granted_in: set[str] = set()
        self._of_removed_jobs: set[int] = set()

    def saw(self, call: op.Operation[Any], answer: Any) -> None:
        match call:
            case op.Enqueue():
                self.accepted |= {one.id for one in answer if isinstance(one, Enqueued)}
            case op.Reserve():
                for job in answer:
                    self._grant(job, call.now)
            case op.ExtendLease():
                for lease in answer:
                    if isinstance(lease, Lease):
                        self._tokens.setdefault((lease.job_id, lease.token), self._fences[lease.job_id])
            case op.Requeue():
                self._may_leave_dead |= set(call.job_ids)
            case op.Purge() | op.Prune() | op.Remove():
                self._may_vanish = True

    def _grant(self, job: JobRecord, now: Micros) -> None:
        if job.run_at_us > now:
            raise InvariantBroken("neverEarly", f"job {job.id} is due at {job.run_at_us}, leased at {now}")
        if job.fence <= self._fences.get(job.id, 0):
            raise InvariantBroken(
                "fenceStrictlyIncreasing",
                f"job {job.id} had fence {self._fences[job.id]} and was leased with {job.fence}",
            )
        if job.token is None or (job.id, job.token) in self._tokens:
            raise InvariantBroken("oneLeasePerJob", f"job {job.id} was leased again with token {job.token}")
        self._fences[job.id] = job.fence
        self._tokens[job.id, job.token] = job.fence
        self.granted[job.id, job.fence] = job
        self._granted_in.add(job.queue)

    def check(self, shown: Snapshot, now: Micros) -> None:
        self.rows |= {row.seq: row for row in shown.rows if row.seq not in self._of_removed_jobs}
        for job in shown.jobs:
            self._check_job(job)
        self._check_lost(shown)
        self._check_keys(shown)
        self._check_log(shown)
        self._check_w(shown, now)
        self._may_leave_dead.clear()
        self._may_vanish = False
        self._granted_in.clear()

    def _check_job(self, job: JobRecord) -> None:
        lease = (job.token, job.worker, job.expires_at_us, job.reserved_at_us)
        if job.state.is_terminal and any(part is not None for part in lease):
            raise InvariantBroken("noLeaseForTerminal", f"job {job.id} is {job.state} and has lease {lease}")
        if (job.state is JobState.INFLIGHT) != all(part is not None for part in lease):
            raise InvariantBroken("oneLeasePerJob", f"job {job.id} is {job.state} and has lease {lease}")
        if job.fence < self._fences.get(job.id, 0):
            raise InvariantBroken(
                "fenceStrictlyIncreasing", f"job {job.id} went from {self._fences[job.id]} to {job.fence}"
            )
        ended = self._ends.get(job.id)
        left_dead = ended is JobState.DEAD and job.id in self._may_leave_dead
        if ended is not None and job.state is not ended and not left_dead:
            raise InvariantBroken("terminalIsForever", f"job {job.id} was {ended} and is {job.state}")
        if job.state.is_terminal:
            self._ends[job.id] = job.state
        else:
            self._ends.pop(job.id, None)

    def _check_lost(self, shown: Snapshot) -> None:
        lost = self.accepted - {job.id for job in shown.jobs}
        unended = sorted(job_id for job_id in lost if job_id not in self._ends)
        if unended or (lost and not self._may_vanish):
            raise InvariantBroken("nothingLost", f"accepted and gone: {unended or sorted(lost)}")
        self.accepted -= lost
        for job_id in lost:
            # A removed id may be accepted anew: that is another job with a life of its own.
            self._ends.pop(job_id, None)
            self._fences.pop(job_id, None)
            self.granted = {key: job for key, job in self.granted.items() if key[0] != job_id}
            self._of_removed_jobs |= {seq for seq, row in self.rows.items() if row.job_id == job_id}
            self.rows = {seq: row for seq, row in self.rows.items() if row.job_id != job_id}
            self._tokens = {key: fence for key, fence in self._tokens.items() if key[0] != job_id}

    def _check_keys(self, shown: Snapshot) -> None:
        inflight: dict[tuple[str, str], str] = {}
        for job in shown.jobs:
            if job.key is not None and job.state is JobState.INFLIGHT:
                other = inflight.setdefault((job.queue, job.key), job.id)
                if other != job.id:
                    raise InvariantBroken("oneInflightPerKey", f"{other} and {job.id} of key {job.key!r}")

    def _check_log(self, shown: Snapshot) -> None:
        ended: dict[tuple[str, int], Attempt] = {}
        for row in self.rows.values():
            if row.reserved_at_us is None:
                continue
            if (row.job_id, row.fence) in ended:
                raise InvariantBroken("everyLeaseLogged", f"lease {row.fence} of {row.job_id} ended twice")
            ended[row.job_id, row.fence] = row
        current = {(job.id, job.fence) for job in shown.jobs if job.state is JobState.INFLIGHT}
        for lease in self.granted:
            if (lease in ended) == (lease in current):
                raise InvariantBroken(
                    "everyLeaseLogged", f"lease {lease[1]} of {lease[0]} is neither held nor logged, or both"
                )
        check_no_overlap(spans(self.rows.values(), shown.jobs))

    def _check_w(self, shown: Snapshot, now: Micros) -> None:
        """Judged when leases were granted: a limit that was lowered since revokes none."""
        for stats in shown.stats:
            limit = stats.settings.max_inflight
            if limit is None or stats.queue not in self._granted_in:
                continue
            held = [job for job in shown.jobs if job.queue == stats.queue]
            valid = [job.id for job in held if job.expires_at_us is not None and job.expires_at_us > now]
            if len(valid) > limit:
                raise InvariantBroken("wNeverExceeded", f"{len(valid)} valid leases, W is {limit}: {valid}")


def spans(rows: Iterable[Attempt], jobs: Iterable[JobRecord]) -> list[Span]:
    """Every lease there was, ended or held, as the log and the store tell it."""
    leases: list[tuple[Attempt | JobRecord, str, Micros, Micros | None]] = [
        *((row, row.job_id, row.ended_at_us, row.lease_expires_at_us) for row in rows),
        *((job, job.id, LATEST, job.expires_at_us) for job in jobs),
    ]
    return [
        Span(
            job_id,
            one.fence,
            one.reserved_at_us,
            min(end, expiry),
            None if one.key is None else (one.queue, one.key),
        )
        for one, job_id, end, expiry in leases
        if one.reserved_at_us is not None and expiry is not None
    ]


def check_no_overlap(leases: Iterable[Span]) -> None:
    by_job: defaultdict[str, list[Span]] = defaultdict(list)
    by_key: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in leases:
        by_job[span.job_id].append(span)
        if span.place is not None:
            by_key[span.place].append(span)
    for job_id, held in by_job.items():
        held.sort(key=lambda span: span.fence)
        for earlier, later in itertools.pairwise(held):
            if earlier.fence == later.fence or later.start < earlier.end:
                raise InvariantBroken("noDoubleLease", f"job {job_id}: {earlier} overlaps {later}")
    for place, held in by_key.items():
        if most_at_once(held) > 1:
            raise InvariantBroken("oneInflightPerKey", f"{place}: two of these overlap: {held}")


def most_at_once(leases: Iterable[Span]) -> int:
    """Return the number of valid leases at the busiest instant. At one instant, ends come before starts."""
    steps = sorted(
        step for span in leases if span.start < span.end for step in ((span.start, 1), (span.end, -1))
    )
    level = most = 0
    for _, step in steps:
        level += step
        most = max(most, level)
    return most
