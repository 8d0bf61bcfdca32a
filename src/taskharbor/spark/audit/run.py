"""All checks together, over a DataFrame, a lake or a store, and their result."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from functools import reduce

import msgspec
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, JobState
from taskharbor.lake.delta import Lake, LakeUnreadable, Snapshot
from taskharbor.spark.audit import checks
from taskharbor.spark.audit.violations import Kind, Rule, Violation, broken
from taskharbor.spark.lake.frames import read
from taskharbor.spark.lake.quality import whole_log

EXAMPLES_PER_KIND = 5
_SHARES = 64
STORE = "store"
"""The source that rows straight from a store are given."""


def audit(
    attempts: DataFrame,
    *,
    live_jobs: DataFrame | None = None,
    limits: DataFrame | None = None,
    as_logged: DataFrame | None = None,
) -> DataFrame:
    """Every violation of the guarantees that the log shows, as rows of `Violation`.

    `attempts`: the columns of `bulk.tables.ATTEMPTS` and `source`. `live_jobs`: source, id, state, fence and created_at of all
    jobs in the store, read after the attempts; without them lost jobs are not looked for. `limits`: source, queue, max_inflight
    and observed_at; without them W is not checked. `as_logged`: the same rows before anybody dropped any as doubled.
    """
    found = [
        checks.check_single_rows(attempts),
        checks.check_lives(attempts),
        checks.check_keys(attempts),
        checks.check_row_numbers(attempts if as_logged is None else as_logged),
    ]
    if limits is not None:
        found.append(checks.check_limits(attempts, limits))
    if live_jobs is not None:
        found.append(check_live_jobs(attempts, live_jobs))
    return reduce(DataFrame.unionByName, found)


def audit_lake(
    spark: SparkSession, lake: Lake | Snapshot, *, live_jobs: DataFrame | None = None
) -> AuditResult:
    """Audit the whole lake, with the limits that the pipeline saw at its runs. Raises LakeUnreadable if anything is missing."""
    snapshot = lake.snapshot() if isinstance(lake, Lake) else lake
    attempts, expected = whole_log(spark, snapshot)
    queues, as_logged = (read(spark, snapshot.tables[name]) for name in ("bronze.queues", "bronze.attempts"))
    limits = queues.select("source", "queue", "max_inflight", "observed_at")
    result = summarise(audit(attempts, live_jobs=live_jobs, limits=limits, as_logged=as_logged), attempts)
    if result.rows != expected:
        raise LakeUnreadable(f"{result.rows:,} rows of the log were read, and the commits name {expected:,}")
    return result


def audit_store(spark: SparkSession, url: str) -> AuditResult:
    """Audit a store directly, without a lake: the present log, against the present jobs and limits."""
    # Read once and kept: a log that grows or is pruned between two checks would contradict itself.
    attempts = _read(spark, url, "attempts").persist(StorageLevel.MEMORY_AND_DISK)
    jobs = _read(spark, url, "jobs").select("source", "id", "state", "fence", "created_at")
    queues = _read(spark, url, "queues").select("source", "queue", "max_inflight")
    try:
        # Read now, so that the jobs are read after the log.
        attempts.count()
        jobs = jobs.persist(StorageLevel.MEMORY_AND_DISK)
        limits = queues.withColumn("observed_at", F.lit(datetime.now(UTC)))
        against_jobs = check_live_jobs(attempts, jobs)
        if not against_jobs.where(F.col("kind") == str(Kind.LOST_JOB)).isEmpty():
            against_jobs = _without_ended(against_jobs, _read(spark, url, "attempts"))
        return summarise(audit(attempts, limits=limits).unionByName(against_jobs), attempts)
    finally:
        attempts.unpersist()
        jobs.unpersist()


def _without_ended(found: DataFrame, log: DataFrame) -> DataFrame:
    """Remove lost jobs that have ended since. A job may have ended, and been removed, after the log was read and before the jobs
    were. The newer log has its end."""
    last = log.groupBy(F.col("job_id").alias("ended")).agg(F.max_by("state", "seq").alias("state"))
    is_ended = (F.col("kind") == str(Kind.LOST_JOB)) & (F.col("job_id") == F.col("ended"))
    return found.join(last.where(has_ended()), is_ended, "left_anti")


def _read(spark: SparkSession, url: str, table: str) -> DataFrame:
    reader = spark.read.format("taskharbor").option("url", url).option("table", table)
    return reader.load().withColumn("source", F.lit(STORE))


# -- the log against the store ---------------------------------------------------------------------------------------


def check_live_jobs(attempts: DataFrame, live_jobs: DataFrame) -> DataFrame:
    """Compare the log with the store. `live_jobs`: source, id, state, fence and created_at of the stored jobs, read after the
    attempts."""
    row = F.max_by(F.struct("queue", "fence", "state", "ended_at", "created_at"), F.col("seq"))
    last = attempts.groupBy("job_id", "source").agg(row.alias("last")).select("source", "job_id", "last.*")
    stored = F.struct("state", "fence", "created_at")
    live = live_jobs.select("source", F.col("id").alias("job_id"), stored.alias("live"))
    # Only `dead` can be left, by a requeue that the log as it was read may not have had yet.
    is_final = F.col("state").isin(str(JobState.DONE), str(JobState.CANCELLED))
    left_its_end = is_final & (F.col("live.state") != F.col("state"))
    return broken(
        last.join(live, ["source", "job_id"], "left"),
        Rule(
            Kind.LOST_JOB,
            F.col("live").isNull() & ~has_ended(),
            "job {job_id} was {state} after lease {fence} ended at {ended_at}, and the store does not have it",
        ),
        Rule(
            Kind.STORE_CONTRADICTS_LOG,
            (F.col("live.created_at") == F.col("created_at"))
            & ((F.col("live.fence") < F.col("fence")) | left_its_end),
            "job {job_id} was {state} with fence {fence} at {ended_at}, and the store has it as {live.state} with "
            "fence {live.fence}",
            other_fence=F.col("live.fence"),
        ),
    )


def has_ended() -> Column:
    return F.col("state").isin(*map(str, sorted(TERMINAL_STATES)))


# -- the result ------------------------------------------------------------------------------------------------------


class AuditResult(msgspec.Struct, frozen=True, kw_only=True):
    rows: int
    """Rows of the log that were checked."""
    jobs: int
    kinds: dict[str, int] = {}
    """Violations per kind, most first; only kinds that were found."""
    examples: list[Violation] = []
    """A few of each kind, the earliest first."""

    @property
    def violations(self) -> int:
        return sum(self.kinds.values())

    @property
    def is_clean(self) -> bool:
        return not self.kinds


def summarise(violations: DataFrame, attempts: DataFrame) -> AuditResult:
    """Run the audit and count. The data that comes to the driver is bounded, whatever the number of violations."""
    # The earliest of each share instead of the earliest of all: one pass, nothing kept or sorted, and the very first is always
    # among them.
    share = F.pmod(F.hash("source", "job_id"), F.lit(_SHARES))
    earliest = F.min(F.struct("at", *(name for name in Violation.__struct_fields__ if name != "at")))
    found = violations.groupBy("kind", share.alias("share")).agg(
        F.count("*").alias("count"), earliest.alias("earliest")
    )
    counts: Counter[str] = Counter()
    examples: defaultdict[str, list[Violation]] = defaultdict(list)
    for row in found.collect():
        counts[row["kind"]] += row["count"]
        examples[row["kind"]].append(Violation(**row["earliest"].asDict()))
    (size,) = attempts.agg(
        F.count("*").alias("rows"), F.count_distinct(F.struct("source", "job_id")).alias("jobs")
    ).collect()
    kinds = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    for of_kind in examples.values():
        of_kind.sort(key=lambda one: (0.0 if one.at is None else one.at.timestamp(), one.job_id or ""))
    few = [one for kind in kinds for one in examples[kind][:EXAMPLES_PER_KIND]]
    return AuditResult(rows=size["rows"], jobs=size["jobs"], kinds=kinds, examples=few)
