"""Numbers of the report, and the buckets of time that they are counted in.

`ReportData` holds everything that the page and the summary show. Lists "per bucket" have one entry for each bucket from
`start_us` on. None means that there was nothing to measure in a bucket, which differs from zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.report.formatting import DAY, HOUR, MINUTE, count, duration, plural, time_of

MOST_BUCKETS = 500
# Up to each length of a history: the number of buckets at most, and their possible lengths.
# Minutes are too coarse for a short history, so it is counted from its rows. It gets fewer buckets: with only a few jobs
# in each, rates would be noise. Hours are fine enough for a long one.
SCALES = (
    (10 * MINUTE, 60, (SECOND // 5, SECOND // 2, SECOND, 2 * SECOND, 5 * SECOND, 10 * SECOND)),
    (10 * DAY, MOST_BUCKETS, tuple(MINUTE * n for n in (1, 2, 5, 10, 15, 30))),
    (math.inf, MOST_BUCKETS, tuple(HOUR * n for n in (1, 2, 3, 6, 12, 24))),
)


class Buckets(NamedTuple):
    """Equal steps of time: the time axis of a chart."""

    start_us: Micros
    bucket_us: Micros
    number: int

    @property
    def end_us(self) -> Micros:
        """End of the last bucket."""
        return self.start_us + self.bucket_us * self.number

    @property
    def span_us(self) -> Micros:
        """Length of all buckets together."""
        return self.bucket_us * self.number

    def moment(self, index: int) -> str:
        """Start of a bucket as text."""
        return time_of(self.start_us + index * self.bucket_us, self.bucket_us, self.span_us)

    @property
    def origin(self) -> str:
        """The table that has rows fine enough for these buckets."""
        if self.bucket_us < MINUTE:
            return "silver.attempts"
        return "gold.minutes" if self.bucket_us < HOUR else "gold.hours"

    def coarser(self, least_us: Micros, most: int) -> Buckets:
        """At most about `most` buckets over the same time. Their length is a multiple of `least_us`."""
        step = least_us * max(1, -(-self.span_us // (least_us * most)))
        return cut(self.start_us, self.end_us - 1, step)


def cut(first_us: Micros, last_us: Micros, step: Micros) -> Buckets:
    """Buckets of this length from `first_us` up to and including `last_us`."""
    start = first_us // step * step
    return Buckets(start, step, (last_us - start) // step + 1)


def choose(first_us: Micros, last_us: Micros) -> Buckets:
    """Buckets few enough to draw and fine enough to see something."""
    span = last_us - first_us + 1
    most, steps = next((most, steps) for longest, most, steps in SCALES if span <= longest)
    step = next((one for one in steps if span / one <= most - 1), steps[-1])
    return cut(first_us, last_us, step * -(-span // (step * most)))


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the audit. `kinds` has the number of violations of each kind and is empty if there are none."""

    leases: int
    jobs: int
    kinds: dict[str, int] = {}
    examples: list[str] = []

    @property
    def is_clean(self) -> bool:
        """True if there is no violation."""
        return not any(self.kinds.values())

    @property
    def headline(self) -> str:
        """The result in one sentence, without the full stop."""
        found = "No violation" if self.is_clean else plural(sum(self.kinds.values()), "violation")
        return f"{found} in {plural(self.leases, 'lease')} of {plural(self.jobs, 'job')}"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the whole history. `open` jobs had not ended; most executions began in `busiest_queue`."""

    jobs: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    open: int = 0
    executions: int = 0
    retried: int = 0
    expired: int = 0
    released: int = 0
    wait_p50_us: float | None = None
    wait_p95_us: float | None = None
    wait_p99_us: float | None = None
    run_p50_us: float | None = None
    run_p95_us: float | None = None
    queues: int = 0
    workers: int = 0
    busiest_queue: str | None = None
    busiest_executions: int = 0
    busiest_minute_us: Micros | None = None
    busiest_minute_completions: int = 0


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Events per bucket. `failures` are jobs that died."""

    arrivals: list[int] = []
    completions: list[int] = []
    failures: list[int] = []
    retries: list[int] = []
    expiries: list[int] = []


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds, per bucket."""

    p50: list[float | None] = []
    p95: list[float | None] = []
    p99: list[float | None] = []


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`waiting`: jobs that existed and had not ended at the end of each bucket. `running`: time-weighted mean of the leases held
    per bucket. `limit` is W, if the queue has one."""

    queue: str
    waiting: list[float]
    running: list[float]
    limit: int | None = None


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of the time that leases of a job type were held."""

    type: str
    executions: int
    run_p50_us: float
    run_p95_us: float
    run_p99_us: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Mean number of jobs that a worker held at once, per bucket of `ReportData.worker_bucket_us`."""

    worker: str
    executions: int
    load: list[float | None]


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Errors whose messages differ only in ids, numbers or addresses."""

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
    """One job of a table. `waited_us` is the part of the total in which it did not run, pauses between tries included."""

    job_id: str
    queue: str
    type: str
    state: str
    executions: int
    total_us: float | None
    waited_us: float | None
    ran_us: float | None
    last_error: str | None = None


class ObjectiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Burn rate per bucket of `ReportData.objective_bucket_us`: at 1 the allowed share of misses is used up exactly."""

    name: str
    queue: str
    total: int
    bad: int
    burn: list[float | None]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a store that wait to run. `later`: not due yet, or blocked by their key; `due_us`: since when the first is due."""

    queue: str
    type: str | None = None
    ready: int = 0
    later: int = 0
    due_us: Micros | None = None


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of the report. `sources` names the stores without secrets; `verdict` is None without an audit.

    `lease_ends` counts the rows of the log that had a lease by outcome, `job_ends` the jobs by state. The jobs of `waiting` were
    counted at `waiting_at_us`.
    """

    sources: list[str] = []
    start_us: Micros = 0
    bucket_us: Micros = 1
    buckets: int = 0
    made_at_us: Micros
    verdict: Verdict | None = None
    totals: Totals = Totals()
    flow: Flow = Flow()
    backlog: list[QueueLoad] = []
    wait: Percentiles = Percentiles()
    run_times: list[RunTimes] = []
    workers: list[WorkerLoad] = []
    worker_bucket_us: Micros = 1
    errors: list[ErrorGroup] = []
    lease_ends: dict[str, int] = {}
    job_ends: dict[str, int] = {}
    slowest: list[JobLine] = []
    most_tried: list[JobLine] = []
    objectives: list[ObjectiveFigures] = []
    objective_bucket_us: Micros = 1
    waiting: list[Waiting] = []
    waiting_at_us: Micros = 0
    quarantined: int = 0

    @property
    def timeline(self) -> Buckets:
        """Buckets of all lists without a bucket length of their own."""
        return Buckets(self.start_us, self.bucket_us, self.buckets)

    @property
    def concurrency(self) -> list[QueueLoad]:
        """The queues, those with a limit first."""
        return sorted(self.backlog, key=lambda one: one.limit is None)

    @property
    def total_backlog(self) -> list[float]:
        """Jobs of all queues that had not ended, per bucket."""
        return [sum(values) for values in zip(*(one.waiting for one in self.backlog), strict=True)]

    @property
    def waiting_text(self) -> str:
        """How many jobs wait, in one sentence."""
        ready, later = (sum(getattr(one, name) for one in self.waiting) for name in ("ready", "later"))
        due = min((one.due_us for one in self.waiting if one.due_us is not None), default=None)
        age = "" if due is None else f"; the first has been due for {duration(self.waiting_at_us - due)}"
        return (
            f"{plural(ready, 'job')} ready to run{age}. {count(later)} not due yet or blocked by their key."
        )

    @property
    def is_empty(self) -> bool:
        """True if the log has no rows."""
        return self.totals.jobs == 0 and self.totals.executions == 0
