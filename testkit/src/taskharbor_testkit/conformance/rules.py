"""What happens to one record, whatever the store around it: the smallest rules of the reference model."""

from __future__ import annotations

from taskharbor.drivers.contract import JobFilter
from taskharbor.jobs import Failure, JobRecord, JobState, Micros, UpdateFlags


def matches(job: JobRecord, selection: JobFilter) -> bool:
    finished_before = selection.finished_before_us
    return (
        (selection.queue is None or job.queue == selection.queue)
        and (selection.states is None or job.state in selection.states)
        and (selection.types is None or job.type in selection.types)
        and (selection.key is None or job.key == selection.key)
        and (selection.worker is None or job.worker == selection.worker)
        and (
            finished_before is None
            or (job.finished_at_us is not None and job.finished_at_us < finished_before)
        )
    )


def change(job: JobRecord, by: JobRecord, flags: UpdateFlags) -> None:
    """What the record `by` changes in `job` under these flags."""
    if flags.payload:
        job.type, job.payload, job.codec = by.type, by.payload, by.codec
        job.headers, job.timeout_us = dict(by.headers), by.timeout_us
    if flags.run_at == "yes":
        job.run_at_us = by.run_at_us
    elif flags.run_at == "later":
        job.run_at_us = max(job.run_at_us, by.run_at_us)
    elif flags.run_at == "earlier":
        job.run_at_us = min(job.run_at_us, by.run_at_us)
    if flags.retry:
        job.max_attempts, job.max_stalls = by.max_attempts, by.max_stalls
        job.backoff_min_us, job.backoff_max_us = by.backoff_min_us, by.backoff_max_us
    if flags.reset_counts:
        job.attempts = job.stalls = 0


def wait_by_run_at(job: JobRecord, now: Micros) -> None:
    job.state = JobState.SCHEDULED if job.run_at_us > now else JobState.READY


def record_failure(job: JobRecord, error: Failure, now: Micros) -> None:
    job.last_error = error.text
    job.failed_at_us = now


def ended_at(held: JobRecord, now: Micros) -> Micros:
    """When what ends now ended: never before its lease began, however early `now` was read."""
    return now if held.reserved_at_us is None else max(now, held.reserved_at_us)


def clear_lease(job: JobRecord) -> None:
    job.token = job.worker = job.expires_at_us = job.reserved_at_us = None
    job.cancel_requested = False
