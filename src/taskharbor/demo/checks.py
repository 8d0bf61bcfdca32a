"""What happened, as the store and the attempt log tell it: pure functions over jobs and rows, nothing remembered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from taskharbor.demo.workload import MEANT_TO_END
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers; `well` says whether they are as they must be."""

    accepted: int
    done: int
    dead: int
    cancelled: int
    lost: int
    """Accepted, and in no terminal state at the end (or gone)."""
    doubled: int
    """Ended more than once, by the attempt log."""
    unlogged: int
    """In a terminal state that the attempt log knows nothing of."""
    unexpected: int
    """Ended otherwise than their kind is meant to."""
    overlapping_leases: int
    """Pairs of leases of one job that were valid at the same time."""
    executions: int
    retried: int
    expired: int
    """Leases that ran out."""
    w_limit: int
    w_max_overlap: int
    """Most leases of the limited queue that were valid at the same instant, by the attempt log."""

    @property
    def well(self) -> bool:
        sums_up = self.accepted == self.done + self.dead + self.cancelled
        faults = self.lost + self.doubled + self.unlogged + self.unexpected + self.overlapping_leases
        return sums_up and not faults and self.w_max_overlap <= self.w_limit


def judge(
    accepted: Sequence[str],
    jobs: Mapping[str, JobRecord],
    attempts: Sequence[Attempt],
    *,
    cancelled_by_us: frozenset[str],
    limited_queue: str,
    limit: int,
) -> Verdict:
    states = Counter(jobs[job_id].state for job_id in accepted if job_id in jobs)
    ends = Counter(one.job_id for one in attempts if one.state.is_terminal)
    ended = [job_id for job_id in accepted if job_id in jobs and jobs[job_id].state.is_terminal]
    outcomes = Counter(one.outcome for one in attempts)
    return Verdict(
        accepted=len(accepted),
        done=states[JobState.DONE],
        dead=states[JobState.DEAD],
        cancelled=states[JobState.CANCELLED],
        lost=len(accepted) - len(ended),
        doubled=sum(count > 1 for count in ends.values()),
        unlogged=sum(ends[job_id] == 0 for job_id in ended),
        unexpected=sum(not _as_meant(jobs[job_id], cancelled_by_us) for job_id in ended),
        overlapping_leases=overlapping_leases(attempts),
        executions=sum(one.reserved_at_us is not None for one in attempts),
        retried=outcomes[Outcome.RETRIED],
        expired=outcomes[Outcome.EXPIRED],
        w_limit=limit,
        w_max_overlap=most_at_once(
            validity
            for one in attempts
            if one.queue == limited_queue and (validity := _validity(one)) is not None
        ),
    )


def _as_meant(job: JobRecord, cancelled_by_us: frozenset[str]) -> bool:
    if job.id in cancelled_by_us:
        return job.state is JobState.CANCELLED
    return job.state in MEANT_TO_END.get(job.type, {JobState.DONE})


def _validity(attempt: Attempt) -> tuple[Micros, Micros] | None:
    """When the lease of this row was valid: from its grant until it was ended or ran out, whichever was first."""
    if attempt.reserved_at_us is None:
        return None
    over = attempt.ended_at_us
    if attempt.lease_expires_at_us is not None:
        over = min(over, attempt.lease_expires_at_us)
    return attempt.reserved_at_us, over


def overlapping_leases(attempts: Iterable[Attempt]) -> int:
    leases: defaultdict[str, list[tuple[Micros, Micros]]] = defaultdict(list)
    for attempt in attempts:
        validity = _validity(attempt)
        if validity is not None:
            leases[attempt.job_id].append(validity)
    pairs = 0
    for of_one_job in leases.values():
        of_one_job.sort()
        for index, (_, end) in enumerate(of_one_job):
            pairs += sum(start < end for start, _ in of_one_job[index + 1 :])
    return pairs


def most_at_once(intervals: Iterable[tuple[Micros, Micros]]) -> int:
    """The largest number of half-open intervals that share an instant."""
    edges: list[tuple[Micros, int]] = []
    for start, end in intervals:
        if start < end:
            edges += [(start, 1), (end, -1)]
    most = now = 0
    for _, step in sorted(edges):  # At one instant the ends come before the beginnings.
        now += step
        most = max(most, now)
    return most


def recovery(held: Sequence[str], attempts: Iterable[Attempt], killed_at: Micros) -> tuple[int, Micros]:
    """How many of the jobs that a killed worker held went on, and how long after the kill the last one did: another worker took
    them up, or they died with their lease because it was their last execution."""
    wanted = set(held)
    taken_up: dict[str, Micros] = {}
    for attempt in attempts:
        start = attempt.reserved_at_us
        if attempt.job_id in wanted and start is not None and start > killed_at:
            taken_up.setdefault(attempt.job_id, start)
        elif attempt.job_id in wanted and attempt.outcome is Outcome.EXPIRED and attempt.state.is_terminal:
            taken_up.setdefault(attempt.job_id, attempt.ended_at_us)
    return len(taken_up), max((at - killed_at for at in taken_up.values()), default=0)
