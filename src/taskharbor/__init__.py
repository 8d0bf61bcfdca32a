"""TaskHarbor: a leased job queue with one contract and interchangeable backends.

    from taskharbor import Harbor

    harbor = Harbor("sqlite:///jobs.db")

    @harbor.job
    async def greet(name: str) -> None:
        print(f"Hello, {name}")

    greet.enqueue("Ada")        # then: taskharbor worker module:harbor

What is exported here is the public API; the driver contract is public too, in `taskharbor.drivers.contract`.
"""

from taskharbor.client import AsyncClient, Client
from taskharbor.clock import BackendClock, Clock, FakeClock, SystemClock
from taskharbor.codec import JSON, MSGPACK, Codec, CodecRegistry
from taskharbor.context import Job, current_job
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings, QueueStats
from taskharbor.drivers.registry import connect
from taskharbor.errors import (
    BackendUnavailable,
    CodecError,
    InvalidRequest,
    JobError,
    JobFailed,
    JobNotFound,
    JobNotInflight,
    JobTimeout,
    LeaseExpired,
    LeaseMismatch,
    MissingExtra,
    PayloadInvalid,
    TaskHarborError,
    WaitTimeout,
)
from taskharbor.handle import JobHandle
from taskharbor.harbor import AsyncJobType, Harbor, JobType, SyncJobType
from taskharbor.jobs import Attempt, Failure, JobRecord, JobRequest, JobState, Lease, Outcome, UpdateFlags
from taskharbor.middleware import Middleware
from taskharbor.requests import Defaults
from taskharbor.retry import ExponentialBackoff, FixedDelays, RetryPolicy
from taskharbor.signals import Discard, Retry, Snooze, Unrecoverable
from taskharbor.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "JSON",
    "MSGPACK",
    "AsyncClient",
    "AsyncJobType",
    "Attempt",
    "BackendClock",
    "BackendUnavailable",
    "Client",
    "Clock",
    "Codec",
    "CodecError",
    "CodecRegistry",
    "Defaults",
    "Discard",
    "Driver",
    "ExponentialBackoff",
    "Failure",
    "FakeClock",
    "FixedDelays",
    "Harbor",
    "InvalidRequest",
    "Job",
    "JobError",
    "JobFailed",
    "JobFilter",
    "JobHandle",
    "JobNotFound",
    "JobNotInflight",
    "JobRecord",
    "JobRequest",
    "JobState",
    "JobTimeout",
    "JobType",
    "Lease",
    "LeaseExpired",
    "LeaseMismatch",
    "Middleware",
    "MissingExtra",
    "Outcome",
    "PayloadInvalid",
    "QueueSettings",
    "QueueStats",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "SyncJobType",
    "SystemClock",
    "TaskHarborError",
    "Unrecoverable",
    "UpdateFlags",
    "WaitTimeout",
    "Worker",
    "__version__",
    "connect",
    "current_job",
]
