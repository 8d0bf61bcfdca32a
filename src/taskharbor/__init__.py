"""TaskHarbor: a leased job queue with one contract and interchangeable backends.

    from taskharbor import Harbor

    harbor = Harbor("sqlite:///jobs.db")

    @harbor.job
    async def greet(name: str) -> None:
        print(f"Hello, {name}")

    greet.enqueue("Ada")        # then: taskharbor worker module:harbor

The names that are exported here are the public API. The driver contract is public too, in `taskharbor.drivers.contract`. A name
is imported when it is first used, so `taskharbor --help` and a test run without a queue do not pay for it.

The modules, in the order in which a job passes through them:

- `harbor`: the app. It declares jobs, enqueues them and runs them.
- `handlers`, `batch_jobs`: the function behind a job type, for one job or for many jobs as a table.
- `failures`: the functions that run for jobs that died.
- `requests`: a request becomes a record. `codec` encodes its payload.
- `client`: producers and operators. `transactions` enqueues within the caller's transaction.
- `drivers`: the contract and the backends. `jobs` has the records that they store. `bulk` moves whole tables.
- `broker`: a server that offers any driver over HTTP.
- `worker`: claims jobs, runs their handlers, settles them. `middleware` is around each handler, `signals` are the exceptions that
  a handler can raise, `retry` says when a failed job runs again.
- `schedules`: makes jobs by cron expressions and at intervals.
- `clock`, `errors`: the time and the exceptions that all of them use.
- `cli` (with `__main__`), `testing`, `demo`, `spark`: the command line, helpers for tests, the demo, the Spark pipeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskharbor.client import AsyncClient as AsyncClient
    from taskharbor.client import Client as Client
    from taskharbor.client import JobHandle as JobHandle
    from taskharbor.codec import JSON as JSON
    from taskharbor.codec import MSGPACK as MSGPACK
    from taskharbor.codec import Codec as Codec
    from taskharbor.drivers.contract import JobFilter as JobFilter
    from taskharbor.drivers.contract import QueueSettings as QueueSettings
    from taskharbor.drivers.contract import QueueStats as QueueStats
    from taskharbor.errors import BackendUnavailable as BackendUnavailable
    from taskharbor.errors import CodecError as CodecError
    from taskharbor.errors import Forbidden as Forbidden
    from taskharbor.errors import HandlerMissing as HandlerMissing
    from taskharbor.errors import InvalidRequest as InvalidRequest
    from taskharbor.errors import JobDamaged as JobDamaged
    from taskharbor.errors import JobError as JobError
    from taskharbor.errors import JobFailed as JobFailed
    from taskharbor.errors import JobFinished as JobFinished
    from taskharbor.errors import JobNotDead as JobNotDead
    from taskharbor.errors import JobNotFound as JobNotFound
    from taskharbor.errors import JobNotInflight as JobNotInflight
    from taskharbor.errors import JobTimeout as JobTimeout
    from taskharbor.errors import KeyConflict as KeyConflict
    from taskharbor.errors import LeaseExpired as LeaseExpired
    from taskharbor.errors import LeaseMismatch as LeaseMismatch
    from taskharbor.errors import MissingExtra as MissingExtra
    from taskharbor.errors import PayloadInvalid as PayloadInvalid
    from taskharbor.errors import QueueNotFound as QueueNotFound
    from taskharbor.errors import RemoteError as RemoteError
    from taskharbor.errors import ResultNotKept as ResultNotKept
    from taskharbor.errors import ScheduleNotFound as ScheduleNotFound
    from taskharbor.errors import SchemaMismatch as SchemaMismatch
    from taskharbor.errors import TaskHarborError as TaskHarborError
    from taskharbor.errors import ThreadsLost as ThreadsLost
    from taskharbor.errors import UnknownDriver as UnknownDriver
    from taskharbor.errors import WaitTimeout as WaitTimeout
    from taskharbor.errors import WorkerProcessDied as WorkerProcessDied
    from taskharbor.failures import FailedJob as FailedJob
    from taskharbor.handlers import Options as Options
    from taskharbor.harbor import AsyncJobType as AsyncJobType
    from taskharbor.harbor import Harbor as Harbor
    from taskharbor.harbor import JobType as JobType
    from taskharbor.harbor import SyncJobType as SyncJobType
    from taskharbor.jobs import Attempt as Attempt
    from taskharbor.jobs import Failure as Failure
    from taskharbor.jobs import JobRecord as JobRecord
    from taskharbor.jobs import JobRequest as JobRequest
    from taskharbor.jobs import JobState as JobState
    from taskharbor.jobs import Lease as Lease
    from taskharbor.jobs import Outcome as Outcome
    from taskharbor.jobs import UpdateFlags as UpdateFlags
    from taskharbor.middleware import Job as Job
    from taskharbor.middleware import Middleware as Middleware
    from taskharbor.middleware import current_job as current_job
    from taskharbor.retry import ExponentialBackoff as ExponentialBackoff
    from taskharbor.retry import FixedDelays as FixedDelays
    from taskharbor.retry import RetryPolicy as RetryPolicy
    from taskharbor.schedules import Schedule as Schedule
    from taskharbor.schedules import ScheduleInfo as ScheduleInfo
    from taskharbor.signals import Cancel as Cancel
    from taskharbor.signals import Retry as Retry
    from taskharbor.signals import Snooze as Snooze
    from taskharbor.signals import Unrecoverable as Unrecoverable
    from taskharbor.worker import Worker as Worker

__version__ = "0.1.0"

_HOMES = {
    "client": "AsyncClient Client JobHandle",
    "codec": "JSON MSGPACK Codec",
    "drivers.contract": "JobFilter QueueSettings QueueStats",
    "errors": "BackendUnavailable CodecError Forbidden HandlerMissing InvalidRequest JobDamaged JobError JobFailed JobFinished"
    " JobNotDead JobNotFound JobNotInflight JobTimeout KeyConflict LeaseExpired LeaseMismatch MissingExtra PayloadInvalid"
    " QueueNotFound RemoteError ResultNotKept ScheduleNotFound SchemaMismatch TaskHarborError ThreadsLost UnknownDriver"
    " WaitTimeout WorkerProcessDied",
    "failures": "FailedJob",
    "handlers": "Options",
    "harbor": "AsyncJobType Harbor JobType SyncJobType",
    "jobs": "Attempt Failure JobRecord JobRequest JobState Lease Outcome UpdateFlags",
    "middleware": "Job Middleware current_job",
    "retry": "ExponentialBackoff FixedDelays RetryPolicy",
    "schedules": "Schedule ScheduleInfo",
    "signals": "Cancel Retry Snooze Unrecoverable",
    "worker": "Worker",
}
"""Names by the module that has them."""
_HOME_OF = {name: f"taskharbor.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
