"""Who holds a job: by the token of the lease, or by the worker's name, as the original protocol has it.

The name is the weaker proof. A worker that lost a job and claimed it again under the same name is taken for the one it was.
"""

from __future__ import annotations

from taskharbor.broker.asked import ByHolder
from taskharbor.broker.problems import Problem
from taskharbor.errors import JobError, JobNotFound, LeaseMismatch
from taskharbor.jobs import JobRecord

_NO_LEASE = "none"
"""Where a job is not inflight, the driver has the right word for it whatever the token."""


def token_of(job_id: str, asked: ByHolder, record: JobRecord | None) -> str | JobError:
    """The token to act under. The record is looked at only where the caller gave no token."""
    if asked.token is not None:
        return asked.token
    worker = asked.worker or asked.worker_camel
    if worker is None:
        raise Problem(
            422,
            "invalid_request",
            "the request does not say who holds the job",
            hint="send the token that the claim gave, or the worker's name as worker",
        )
    if record is None:
        return JobNotFound(job_id)
    if record.token is None:
        return _NO_LEASE
    return record.token if record.worker == worker else LeaseMismatch(job_id)
