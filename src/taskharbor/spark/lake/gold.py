"""Gold: counts by minute and hour, concurrency, backlog, workers, errors and ticks, each a function from rows to rows.

Counts and sketches of durations add up over runs. The backlog is a running sum, but never over the whole history of a queue:
each day starts from the sum of the days before it, which are kept.

Instants are counted in whole minutes or hours since the epoch, so that a bucket is one division away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.jobs import SECOND, JobState, Outcome
from taskharbor.lake.tables import CELL_NAMES, TALLY_NAMES
from taskharbor.schedules import QUEUE
from taskharbor.schedules.tick_ids import PATTERN
from taskharbor.schedules.ticking import SKIPPED
from taskharbor.spark.lake.frames import declared
from taskharbor.spark.lake.silver import TERMINAL, elapsed

MINUTE_US = 60 * SECOND
HOUR_US = 3600 * SECOND
_BY_OUTCOME = {
    "completions": Outcome.DONE,
    "retries": Outcome.RETRIED,
    "expiries": Outcome.EXPIRED,
    "releases": Outcome.RELEASED,
    "cancellations": Outcome.CANCELLED,
    "requeues": Outcome.REQUEUED,
}
METRICS = ("wait", "run")
_DURATIONS = tuple(f"{metric}_us" for metric in METRICS)
SKETCHES = tuple(f"{metric}_sketch" for metric in METRICS)


def attempt_cells(attempts: DataFrame, length_us: int = MINUTE_US) -> DataFrame:
    """A row for each minute that a silver attempt touches, or for each bucket of another length.

    Starts and outcomes count in the minute in which they were, a lease in every minute in which it was valid. A wait and a run
    are in the minute in which they were over.
    """
    spread = attempts.withColumn("at", F.explode(touched_buckets(length_us)))
    at = F.col("at")
    starts = at == bucket_of(F.col("reserved_at"), length_us)
    ends = at == bucket_of(F.col("ended_at"), length_us)
    counted: dict[str, Column] = {
        "starts": starts,
        # Its last lease may have ended in a failure, or expired.
        "failures": ends & (F.col("state") == JobState.DEAD.value),
        "finished": ends & F.col("state").isin(*TERMINAL) & (F.col("outcome") != Outcome.REQUEUED.value),
        **{name: ends & (F.col("outcome") == outcome.value) for name, outcome in _BY_OUTCOME.items()},
    }
    return spread.select(
        *CELL_NAMES,
        start_of(at, length_us).alias("minute"),
        F.lit(0).cast("long").alias("arrivals"),
        *(F.coalesce(when.cast("long"), F.lit(0)).alias(name) for name, when in counted.items()),
        busy_within(at, length_us).alias("busy_us"),
        F.when(starts, F.col("wait_us")).alias("wait_us"),
        F.when(ends, F.col("run_us")).alias("run_us"),
    )


def arrival_cells(lifecycles: DataFrame, length_us: int = MINUTE_US) -> DataFrame:
    """The jobs that were created in each minute, or in each bucket of another length."""
    minute = start_of(bucket_of(F.col("created_at"), length_us), length_us).alias("minute")
    # Counted first: among rows with sketches, a row for each job would cost as much as all executions.
    arrived = lifecycles.groupBy(*CELL_NAMES, minute).agg(F.count("*").alias("arrivals"))
    return arrived.select(
        *CELL_NAMES,
        "minute",
        *(F.col(name) if name == "arrivals" else F.lit(0).cast("long").alias(name) for name in TALLY_NAMES),
        *(F.lit(None).cast("long").alias(name) for name in _DURATIONS),
    )


def gold_minutes(cells: Iterable[DataFrame], before: DataFrame | None = None) -> DataFrame:
    """One row per minute, queue and type, from cells and the rows that were there before."""
    keys = (*CELL_NAMES, "minute")
    rows = reduce(DataFrame.unionByName, cells)
    new = rows.groupBy(*keys).agg(
        *(F.sum(name).alias(name) for name in TALLY_NAMES),
        *(F.kll_sketch_agg_bigint(f"{metric}_us").alias(f"{metric}_sketch") for metric in METRICS),
    )
    if before is not None:
        new = _added_up(new.unionByName(before.select(*new.columns)), *keys)
    return declared(_measured(new, MINUTE_US).withColumn("date", F.to_date("minute")), "gold.minutes")


def gold_hours(minutes: DataFrame) -> DataFrame:
    """The minutes of whole dates, by hour."""
    summed = _added_up(
        minutes.withColumn("hour", F.date_trunc("hour", "minute")), *CELL_NAMES, "hour", "date"
    )
    return declared(_measured(summed, HOUR_US), "gold.hours")


def _added_up(rows: DataFrame, *keys: str) -> DataFrame:
    """Minutes or hours as one row per combination of the keys, without what is derived from their sums."""
    counts = (F.sum(name).alias(name) for name in TALLY_NAMES)
    return rows.groupBy(*keys).agg(*counts, *merged_sketches())


def _measured(rows: DataFrame, length_us: int) -> DataFrame:
    found = rows.select("*", *percentiles("wait"), *percentiles("run"))
    return found.withColumn("concurrency", F.col("busy_us") / F.lit(float(length_us)))


def sums(rows: Iterable[DataFrame], keys: Sequence[str], *counts: str) -> DataFrame:
    """All rows together, with one row for each combination of the keys."""
    together = reduce(DataFrame.unionByName, rows)
    return together.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in counts))


def gold_queue_minutes(
    minutes: DataFrame, carried: DataFrame, limits: DataFrame, before: DataFrame
) -> DataFrame:
    """Load and backlog per queue and minute, from gold minutes of whole dates.

    `carried`: the backlog with which each queue begins each date. `limits`: the `max_inflight` of queues as they were just seen;
    a minute that was there `before` keeps the one that it was made with.
    """
    changed = F.sum(F.col("arrivals") + F.col("requeues") - F.col("finished"))
    keys = ("source", "queue", "minute", "date")
    queues = minutes.groupBy(*keys).agg(F.sum("busy_us").alias("busy_us"), changed.alias("change"))
    within_day = Window.partitionBy("source", "queue", "date").orderBy("minute")
    so_far = within_day.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    known = before.select("source", "queue", "minute", F.struct("max_inflight").alias("known"))
    seen = F.broadcast(limits.withColumnRenamed("max_inflight", "seen"))
    mean = F.col("busy_us") / F.lit(float(MINUTE_US))
    limit = F.when(F.col("known").isNotNull(), F.col("known.max_inflight")).otherwise(F.col("seen"))
    found = (
        queues.join(F.broadcast(carried), ["source", "queue", "date"])
        .join(known, ["source", "queue", "minute"], "left")
        .join(seen, ["source", "queue"], "left")
        .withColumn("waiting", F.col("carried") + F.sum("change").over(so_far))
        .withColumns({"concurrency": mean, "max_inflight": limit})
        # A queue with W = 0 is closed: nothing runs, and nothing is the share of it.
        .withColumn("ratio", F.when(F.col("max_inflight") > 0, mean / F.col("max_inflight")))
    )
    return declared(found.drop("change", "carried", "known", "seen"), "gold.queue_minutes")


# Source and queue, date: by how much the backlog changed on it.
Days = dict[tuple[str, str], dict[date, int]]


def carried_backlog(days: Days) -> dict[tuple[str, str, date], int]:
    """The backlog with which each queue begins each date."""
    found = {}
    for (source, queue), changes in days.items():
        carried = 0
        for day in sorted(changes):
            found[source, queue, day] = carried
            carried += changes[day]
    return found


def affected_dates(before: Days, after: Days, touched: Iterable[date]) -> set[date]:
    """The dates whose backlog is another now: those that were touched, and those that start from another number than before.

    A job that is heard of days after it was created was waiting on all of them.
    """
    old = carried_backlog(before)
    return {*touched, *(key[2] for key, carried in carried_backlog(after).items() if old.get(key) != carried)}


def attempt_workers(attempts: DataFrame, length_us: int = HOUR_US) -> DataFrame:
    """A row for each hour that a silver attempt touches, or for each bucket of another length. An execution counts in the hour
    in which it ended."""
    leased = attempts.where(F.col("reserved_at").isNotNull() & F.col("worker").isNotNull())
    rows = leased.withColumn("at", F.explode(touched_buckets(length_us))).select(
        "source",
        "worker",
        start_of(F.col("at"), length_us).alias("hour"),
        (F.col("at") == bucket_of(F.col("ended_at"), length_us)).cast("long").alias("executions"),
        busy_within(F.col("at"), length_us).alias("busy_us"),
    )
    more = {"utilisation": _utilisation(), "date": F.to_date("hour")}
    return declared(rows.withColumns(more), "gold.workers")


def summed_workers(*rows: DataFrame) -> DataFrame:
    """One row per worker and hour."""
    summed = sums(rows, ("source", "worker", "hour", "date"), "executions", "busy_us")
    return declared(summed.withColumn("utilisation", _utilisation()), "gold.workers")


def _utilisation() -> Column:
    """More than 1 where a worker runs several jobs at once."""
    return F.col("busy_us") / F.lit(float(HOUR_US))


FINGERPRINT_CHARS = 200
SAMPLE_CHARS = 500
_KEYS = ("source", "queue", "type", "error_type", "fingerprint")

# In this order: what a later pattern would tear apart comes first.
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"(?s)\n.*", ""),
    (r"\"[^\"]*\"|(?<![A-Za-z0-9])'[^']*'(?![A-Za-z0-9])|`[^`]*`", "<text>"),
    (r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s,;)\]}]+", "<url>"),
    (r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "<address>"),
    (r"\b[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "<id>"),
    (r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", "<address>"),
    (r"\[?\b[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{0,4}){3,7}\]?(:\d+)?", "<address>"),
    (r"\b0[xX][0-9a-fA-F]+\b", "<hex>"),
    (r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b", "<id>"),
    (r"\b(?=[0-9A-Za-z_-]*\d)(?=[0-9A-Za-z_-]*[A-Za-z])[0-9A-Za-z_-]{16,}\b", "<id>"),
    (r"[-+]?\b\d+([.,:]\d+)*([eE][-+]?\d+)?", "<n>"),
    (r"\s+", " "),
)


def fingerprint(message: Column) -> Column:
    """The first line of a message without what differs from one failure to the next."""
    text = F.substring(F.coalesce(message, F.lit("")), 1, 1000)
    for pattern, placeholder in PATTERNS:
        text = F.regexp_replace(text, pattern, placeholder)
    return F.substring(F.trim(text), 1, FINGERPRINT_CHARS)


def attempt_errors(attempts: DataFrame) -> DataFrame:
    """Every silver attempt that carries an error, whatever its outcome."""
    failed = attempts.where(F.col("error_type").isNotNull() | F.col("error_message").isNotNull())
    rows = failed.select(
        *CELL_NAMES,
        F.coalesce("error_type", F.lit("")).alias("error_type"),
        fingerprint(F.col("error_message")).alias("fingerprint"),
        F.lit(1).cast("long").alias("count"),
        F.col("ended_at").alias("first_seen"),
        F.col("ended_at").alias("last_seen"),
        F.substring("error_message", 1, SAMPLE_CHARS).alias("sample_message"),
        F.col("job_id").alias("sample_job"),
        "date",
    )
    return declared(rows, "gold.errors")


def summed_errors(*rows: DataFrame) -> DataFrame:
    """One row per fingerprint. The sample is the earliest failure: the same one however the log was cut into runs."""
    earliest = F.min(F.struct("first_seen", "sample_job", "sample_message"))
    both = (F.sum("count").alias("count"), F.max("last_seen").alias("last_seen"))
    summed = reduce(DataFrame.unionByName, rows).groupBy(*_KEYS).agg(*both, earliest.alias("sample"))
    flat = summed.select(*_KEYS, "count", "last_seen", "sample.*")
    return declared(flat.withColumn("date", F.to_date("first_seen")), "gold.errors")


# The ids that the jobs of skipped ticks would have, as SQL. The error in the log of the schedule's own job names the ticks.
_SKIPPED = """transform(regexp_extract_all(error_message, '[-0-9]{10} [:.0-9]+[+]00:00', 0), at ->
    concat('tick:', key, ':', right(job_id, 12), ':', replace(replace(at, ' ', 'T'), '+00:00', 'Z')))"""


def attempt_ticks(attempts: DataFrame) -> DataFrame:
    """Every silver attempt of a job that a schedule made, and every tick that was skipped."""
    is_skip = (F.col("queue") == QUEUE) & F.col("error_type").eqNullSafe(SKIPPED)
    ids = F.when(is_skip, F.expr(_SKIPPED)).when(F.col("job_id").rlike(PATTERN), F.array("job_id"))
    return attempts.withColumn("job_id", F.explode(ids)).select(
        "source",
        "job_id",
        F.when(~is_skip, F.col("created_at")).alias("made"),
        F.when(~is_skip, F.col("reserved_at")).alias("actual"),
        F.when(is_skip, "skipped").otherwise(F.col("outcome")).alias("outcome"),
        F.col("seq").alias("last_seq"),
        F.to_date(F.when(is_skip, F.col("ended_at")).otherwise(F.col("created_at"))).alias("date"),
    )


def summed_ticks(new: DataFrame, *kept: DataFrame) -> DataFrame:
    """One row per tick. A tick that was doubled has one for each of its jobs."""
    rows = reduce(DataFrame.unionByName, [new, *(one.select(new.columns) for one in kept)])
    summed = rows.groupBy("source", "job_id", "date").agg(
        *(F.min(name).alias(name) for name in ("made", "actual")),
        F.max_by("outcome", "last_seq").alias("outcome"),
        F.max("last_seq").alias("last_seq"),
    )
    texts = [F.regexp_extract("job_id", PATTERN, n + 1) for n in range(4)]
    parts = dict(zip(("made_by", "schedule", "generation"), texts, strict=False))
    found = summed.withColumns({**parts, "nominal": texts[3].try_cast("timestamp")})
    late = {"lateness_us": elapsed("nominal", "actual"), "made_lateness_us": elapsed("nominal", "made")}
    return declared(found.withColumns(late), "gold.ticks")


# -- buckets of time, and durations ------------------------------------------------------------------------------------


def bucket_of(instant: Column, length_us: int) -> Column:
    return F.floor(F.unix_micros(instant) / F.lit(length_us)).cast("long")


def start_of(bucket: Column, length_us: int) -> Column:
    return F.timestamp_micros(bucket * F.lit(length_us).cast("long"))


def touched_buckets(length_us: int) -> Column:
    """Return the buckets in which a silver attempt's lease began, was valid or ended; without a lease, the bucket of its end.

    Between the expiry of a lease and its end in the log there may be days. They are left out.
    """
    ended = bucket_of(F.col("ended_at"), length_us)
    began = bucket_of(F.col("reserved_at"), length_us)
    last = bucket_of(F.greatest("valid_until", "reserved_at"), length_us)
    late = F.when(ended > last, F.array(ended)).otherwise(F.array().cast("array<long>"))
    leased = F.concat(F.sequence(began, last, F.lit(1).cast("long")), late)
    return F.when(F.col("reserved_at").isNotNull(), leased).otherwise(F.array(ended))


def busy_within(bucket: Column, length_us: int) -> Column:
    """Return the microseconds of the bucket in which the lease was valid."""
    start = bucket * F.lit(length_us).cast("long")
    until = F.least(F.unix_micros("valid_until"), start + F.lit(length_us).cast("long"))
    since = F.greatest(F.unix_micros("reserved_at"), start)
    nothing = F.lit(0).cast("long")
    return F.when(F.col("reserved_at").isNotNull(), F.greatest(until - since, nothing)).otherwise(nothing)


PERCENTS = (50, 95, 99)


def percentiles(metric: str) -> list[Column]:
    """p50, p95 and p99 of a metric in microseconds, from its sketch; null where nothing was measured.

    They are recorded values, the nearest by rank: exact of some 200 values or fewer, and otherwise within 1.3% of the rank.
    """
    sketch = F.col(f"{metric}_sketch")
    has_values = F.kll_sketch_get_n_bigint(sketch) > 0
    ranks = F.array(*(F.lit(percent / 100) for percent in PERCENTS))
    found = F.when(has_values, F.kll_sketch_get_quantile_bigint(sketch, ranks))
    return [found.getItem(n).alias(f"{metric}_p{percent}_us") for n, percent in enumerate(PERCENTS)]


def merged_sketches() -> list[Column]:
    """The sketches of a group of minutes or hours, as aggregates."""
    return [F.kll_merge_agg_bigint(name).alias(name) for name in SKETCHES]
