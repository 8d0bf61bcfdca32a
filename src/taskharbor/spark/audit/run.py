"""All checks together, over a DataFrame, a lake or a store, and their result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.errors import InvalidRequest
from taskharbor.lake.delta import Lake, LakeUnreadable, Snapshot
from taskharbor.spark.audit.checks import STORE_KINDS, check
from taskharbor.spark.audit.stored import Stored, check_store, read_store, read_table
from taskharbor.spark.audit.violations import Kind, Violation
from taskharbor.spark.lake.frames import read
from taskharbor.spark.lake.quality import whole_log
from taskharbor.spark.lake.run import source_name

EXAMPLES_PER_KIND = 5
_SHARES = 64
# The source that rows straight from a store are given.
STORE = "store"


def audit(
    attempts: DataFrame,
    *,
    stored: Stored | None = None,
    limits: DataFrame | None = None,
    as_logged: DataFrame | None = None,
) -> DataFrame:
    """Every violation of the guarantees that the log shows, as rows of `Violation`.

    `attempts`: the columns of `bulk.tables.ATTEMPTS` and `source`. Without `source` all rows are of one without a name. `stored`:
    the store of this log; without it `STORE_KINDS` are not looked for. `limits`: source, queue, max_inflight and observed_at;
    without them W is not checked. `as_logged`: the same rows before anybody dropped any as doubled.
    """
    attempts = _named(attempts)
    found = [check(name, attempts) for name in ("rows", "lives", "keys", "ticks")]
    found.append(check("numbers", attempts if as_logged is None else _named(as_logged)))
    if limits is not None:
        found.append(check("limits", attempts, limits=_named(limits)))
    if stored is not None:
        found.append(check_store(attempts, stored))
    return reduce(DataFrame.unionByName, found)


def _named(rows: DataFrame) -> DataFrame:
    return rows if "source" in rows.columns else rows.withColumn("source", F.lit(""))


def audit_lake(
    spark: SparkSession,
    lake: Lake | Snapshot,
    *,
    url: str | None = None,
    waiting_limit: timedelta | None = None,
) -> AuditResult:
    """Audit the whole lake, with the limits that the pipeline saw at its runs, and with `url` the rows of that store beside it.
    `waiting_limit`: how long a job of that store may be due without being claimed.

    Raises LakeUnreadable if anything is missing, and InvalidRequest if the lake has no rows of that store.
    """
    snapshot = lake.snapshot() if isinstance(lake, Lake) else lake
    source = None if url is None else held_source(snapshot, url)
    if url is not None and source is None:
        there = ", ".join(snapshot.record.totals)
        raise InvalidRequest(
            f"the lake {snapshot.lake} has no rows of {source_name(url)}: it has those of {there}"
        )
    attempts, expected = whole_log(spark, snapshot)
    queues, as_logged = (read(spark, snapshot.tables[name]) for name in ("bronze.queues", "bronze.attempts"))
    limits = queues.select("source", "queue", "max_inflight", "observed_at")
    violations = audit(attempts, limits=limits, as_logged=as_logged)
    if url is None or source is None:
        result = summarise(violations, attempts, unchecked=STORE_KINDS)
    else:
        with read_store(spark, url, source, waiting_limit) as stored:
            beside = check_store(attempts.where(F.col("source") == source), stored)
            result = summarise(violations.unionByName(beside), attempts, unchecked=stored.unchecked)
        result = msgspec.structs.replace(
            result, without_store=sorted(snapshot.record.totals.keys() - {source})
        )
        # Rows that the lake does not have yet are read from the store. Had it removed some, a job could seem lost.
        with open_store(url) as store:
            store.between(snapshot.record.cursors[source], store.latest(), parallelism=1)
    if result.rows != expected:
        raise LakeUnreadable(f"{result.rows:,} rows of the log were read, and the commits name {expected:,}")
    return result


def held_source(snapshot: Snapshot, url: str) -> str | None:
    """Return the name that this store has in the lake; None if the lake has no rows of it."""
    return name if (name := source_name(url)) in snapshot.record.cursors else None


def audit_store(spark: SparkSession, url: str, *, waiting_limit: timedelta | None = None) -> AuditResult:
    """Audit a store directly, without a lake: the present log, against the present jobs and limits."""
    # Read once and kept: a log that grows or is pruned between two checks would contradict itself.
    attempts = read_table(spark, url, "attempts", STORE).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        # Read now, so that the jobs are read after the log.
        attempts.count()
        with read_store(spark, url, STORE, waiting_limit) as stored:
            limits = stored.queues.select(
                "source", "queue", "max_inflight", F.lit(stored.read_at).alias("observed_at")
            )
            violations = audit(attempts, stored=stored, limits=limits)
            return summarise(violations, attempts, unchecked=stored.unchecked)
    finally:
        attempts.unpersist()


# -- the result ------------------------------------------------------------------------------------------------------


class AuditResult(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` of the log were checked. `kinds` has the violations of each kind that was found, most first; `examples` has a few of
    each, the earliest first. `unchecked` kinds were not looked for: they need a store, or a limit that was not given.
    `without_store`: the sources where `STORE_KINDS` were not looked for, if the store of another one was given."""

    rows: int
    jobs: int
    kinds: dict[str, int] = {}
    examples: list[Violation] = []
    unchecked: list[str] = []
    without_store: list[str] = []

    @property
    def violations(self) -> int:
        return sum(self.kinds.values())

    @property
    def is_clean(self) -> bool:
        """True if there was something to judge, and no violation."""
        return self.rows > 0 and not self.kinds


def summarise(violations: DataFrame, attempts: DataFrame, *, unchecked: Sequence[Kind] = ()) -> AuditResult:
    """Run the audit and count. The data that comes to the driver is bounded, whatever the number of violations."""
    # The earliest of each share instead of the earliest of all: one pass, nothing kept or sorted, and the very first is always
    # among them.
    attempts = _named(attempts)
    share = F.pmod(F.hash("source", "job_id"), F.lit(_SHARES)).alias("share")
    first = ("at", "job_id")
    fields = F.struct(*first, *(name for name in Violation.__struct_fields__ if name not in first))
    shares = violations.groupBy("kind", share).agg(
        F.count("*").alias("count"), F.min(fields).alias("earliest")
    )
    few = F.slice(F.sort_array(F.collect_list("earliest")), 1, EXAMPLES_PER_KIND).alias("examples")
    found = (
        shares.groupBy("kind")
        .agg(F.sum("count").alias("count"), few)
        .orderBy(F.desc("count"), "kind")
        .collect()
    )
    jobs = F.count_distinct(F.struct("source", "job_id")).alias("jobs")
    (size,) = attempts.agg(F.count("*").alias("rows"), jobs).collect()
    return AuditResult(
        rows=size["rows"],
        jobs=size["jobs"],
        kinds={row["kind"]: row["count"] for row in found},
        examples=[Violation(**one.asDict()) for row in found for one in row["examples"]],
        unchecked=list(map(str, unchecked)),
    )
