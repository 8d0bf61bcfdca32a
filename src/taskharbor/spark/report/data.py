"""Everything the report shows, already counted: small enough to hold, and all that rendering needs.

Lists called "per bucket" have one entry for each of the `buckets` equal steps of time from `start_us` on. None stands for
"nothing to measure in this bucket", which is not the same as zero.
"""

from __future__ import annotations

import msgspec

from taskharbor.jobs import Micros


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit found."""

    leases: int
    jobs: int
    kinds: dict[str, int] = {}
    """How many violations of which kind; empty where there is none."""
    examples: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not any(self.kinds.values())


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    jobs: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    open: int = 0
    """Jobs that the log knows and that had not ended."""
    executions: int = 0
    retried: int = 0
    expired: int = 0
    released: int = 0
    wait_p50_us: float | None = None
    wait_p95_us: float | None = None
    run_p50_us: float | None = None
    run_p95_us: float | None = None
    queues: int = 0
    workers: int = 0
    busiest_queue: str | None = None
    """Where most executions began."""
    busiest_executions: int = 0


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What came and went, per bucket."""

    arrivals: list[int] = []
    completions: list[int] = []
    failures: list[int] = []
    """Jobs that died."""
    retries: list[int] = []
    expiries: list[int] = []


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Per bucket, in microseconds."""

    p50: list[float | None] = []
    p95: list[float | None] = []
    p99: list[float | None] = []


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    waiting: list[float]
    """Jobs that were there and had not ended at the end of each bucket."""


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    running: list[float]
    """Time-weighted mean of the leases held, per bucket."""
    limit: int | None = None
    """W, where the queue has one."""


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    executions: int
    p50_us: float
    p95_us: float
    p99_us: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    executions: int
    load: list[float | None]
    """Mean number of jobs held at once, per bucket of `ReportData.worker_bucket_us`."""


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    error_type: str
    fingerprint: str
    queue: str
    type: str
    count: int
    first_seen_us: Micros
    last_seen_us: Micros
    sample_message: str
    sample_job: str


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    queue: str
    type: str
    state: str
    executions: int
    total_us: float | None
    waited_us: float | None
    """All of the total in which it did not run, pauses between two tries included."""
    ran_us: float | None
    last_error: str | None = None


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queue: str
    total: int
    bad: int
    burn: list[float | None]
    """Burn rate per bucket of `ReportData.objective_bucket_us`: at 1 the allowed share of misses is used up exactly."""


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    sources: list[str]
    """The stores, named without secrets."""
    start_us: Micros
    bucket_us: Micros
    buckets: int
    made_at_us: Micros
    verdict: Verdict | None = None
    """None where no audit was made."""
    totals: Totals = Totals()
    flow: Flow = Flow()
    backlog: list[Backlog] = []
    wait: Percentiles = Percentiles()
    run_times: list[RunTimes] = []
    concurrency: list[Concurrency] = []
    workers: list[WorkerLoad] = []
    worker_bucket_us: Micros = 1
    workers_left_out: int = 0
    errors: list[ErrorGroup] = []
    lease_ends: dict[str, int] = {}
    """Rows of the log that had a lease, by outcome."""
    job_ends: dict[str, int] = {}
    """Jobs by state: done, dead, cancelled, open."""
    slowest: list[JobLine] = []
    most_tried: list[JobLine] = []
    objectives: list[Objective] = []
    objective_bucket_us: Micros = 1

    @property
    def end_us(self) -> Micros:
        return self.start_us + self.bucket_us * self.buckets

    @property
    def is_empty(self) -> bool:
        return self.totals.jobs == 0 and self.totals.executions == 0
