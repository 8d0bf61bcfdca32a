"""Gold: counts by minute and hour, concurrency, backlog, workers and errors, each a function from rows to rows.

Tallies and histograms add up over runs. The backlog is a running sum, but never over the whole history of a queue: each day
starts from the sum of the days before it, which are kept.

Instants are counted in whole minutes or hours since the epoch, so that a bucket is one division away. Durations go into
histograms that can be added up: each bucket is wider than the one below by the same factor, so a percentile read from them is off
by at most half a bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.jobs import SECOND, Outcome
from taskharbor.spark.lake.silver import TERMINAL
from taskharbor.spark.lake.tables import CELL_NAMES, TALLY_NAMES, declared

MINUTE_US = 60 * SECOND
HOUR_US = 3600 * SECOND
_BY_OUTCOME = {
    "completions": Outcome.DONE,
    "failures": Outcome.DEAD,
    "retries": Outcome.RETRIED,
    "expiries": Outcome.EXPIRED,
    "releases": Outcome.RELEASED,
    "cancellations": Outcome.CANCELLED,
    "requeues": Outcome.REQUEUED,
}
MINUTE_KEYS = (*CELL_NAMES, "minute", "date")


def attempt_tallies(attempts: DataFrame, length_us: int = MINUTE_US) -> DataFrame:
    """A row for each minute that a silver attempt touches, or for each bucket of another length.

    Starts and outcomes count in the minute in which they were, a lease in every minute in which it was valid.
    """
    spread = attempts.withColumn("at", F.explode(touched_buckets(length_us)))
    at = F.col("at")
    starts = at == bucket_of(F.col("reserved_at"), length_us)
    ends = at == bucket_of(F.col("ended_at"), length_us)
    counted: dict[str, Column] = {
        "starts": starts,
        "finished": ends & F.col("state").isin(*TERMINAL) & (F.col("outcome") != Outcome.REQUEUED.value),
        **{name: ends & (F.col("outcome") == outcome.value) for name, outcome in _BY_OUTCOME.items()},
    }
    rows = spread.select(
        *CELL_NAMES,
        start_of(at, length_us).alias("minute"),
        F.lit(0).cast("long").alias("arrivals"),
        *(F.coalesce(when.cast("long"), F.lit(0)).alias(name) for name, when in counted.items()),
        busy_within(at, length_us).alias("busy_us"),
    )
    return declared(rows.withColumn("date", F.to_date("minute")), "state.tallies")


def arrival_tallies(lifecycles: DataFrame, length_us: int = MINUTE_US) -> DataFrame:
    """Each job in the minute in which it was created, or in the bucket of another length."""
    rows = lifecycles.select(
        *CELL_NAMES,
        start_of(bucket_of(F.col("created_at"), length_us), length_us).alias("minute"),
        *(F.lit(int(name == "arrivals")).cast("long").alias(name) for name in TALLY_NAMES),
        "date",
    )
    return declared(rows, "state.tallies")


def all_tallies(*rows: DataFrame) -> DataFrame:
    """Tallies from several places, not yet summed. Rows of gold minutes will do as well."""
    together = reduce(DataFrame.unionByName, (one.select(*MINUTE_KEYS, *TALLY_NAMES) for one in rows))
    return declared(together, "state.tallies")


def summed_tallies(*rows: DataFrame) -> DataFrame:
    """One row per minute, queue and type."""
    return declared(sums([all_tallies(*rows)], MINUTE_KEYS, *TALLY_NAMES), "state.tallies")


def sums(rows: Iterable[DataFrame], keys: Sequence[str], *counts: str) -> DataFrame:
    """All rows together, with one row for each combination of the keys."""
    together = reduce(DataFrame.unionByName, rows)
    return together.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in counts))


def attempt_durations(attempts: DataFrame, length_us: int = MINUTE_US) -> DataFrame:
    """The waits and runs of silver attempts, in their buckets and in the minute in which each was over."""

    def measurement(metric: str, over: str) -> Column:
        return F.struct(
            bucket_of(F.col(over), length_us).alias("at"),
            F.lit(metric).alias("metric"),
            bucket(F.col(f"{metric}_us")).alias("bucket"),
        )

    both = F.array(measurement("wait", "reserved_at"), measurement("run", "ended_at"))
    leased = attempts.where(F.col("reserved_at").isNotNull())
    measured = leased.select(*CELL_NAMES, F.explode(both).alias("one"))
    rows = measured.select(
        *CELL_NAMES,
        start_of(F.col("one.at"), length_us).alias("minute"),
        "one.metric",
        "one.bucket",
        F.lit(1).cast("long").alias("count"),
    )
    return declared(rows.withColumn("date", F.to_date("minute")), "state.durations")


def summed_durations(*rows: DataFrame) -> DataFrame:
    """One row per bucket of a histogram."""
    return declared(sums(rows, (*MINUTE_KEYS, "metric", "bucket"), "count"), "state.durations")


def gold_minutes(tallies: DataFrame, durations: DataFrame) -> DataFrame:
    """Tallies (several rows per minute may be there, old and new) and histograms of the same dates."""
    return declared(_by(tallies, durations, "minute", MINUTE_US), "gold.minutes")


def gold_hours(minutes: DataFrame, durations: DataFrame) -> DataFrame:
    """The minutes and histograms of whole dates, by hour."""
    hour = F.date_trunc("hour", "minute")
    found = _by(minutes.withColumn("hour", hour), durations.withColumn("hour", hour), "hour", HOUR_US)
    return declared(found, "gold.hours")


def _by(tallies: DataFrame, durations: DataFrame, bucket: str, length_us: int) -> DataFrame:
    keys = (*CELL_NAMES, bucket, "date")
    counted = tallies.select(*keys, *TALLY_NAMES)
    measured = durations.select(*keys, "metric", "bucket", "count")
    grouped = counted.unionByName(measured, allowMissingColumns=True).groupBy(*keys)
    counts = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in TALLY_NAMES]
    found = grouped.agg(*counts, *percentiles("wait"), *percentiles("run"))
    return found.withColumn("concurrency", F.col("busy_us") / F.lit(float(length_us)))


def gold_concurrency(minutes: DataFrame, queues: DataFrame) -> DataFrame:
    """From gold minutes, and one row per source and queue with the limit that holds now (`max_inflight`, null: none)."""
    busy = minutes.groupBy("source", "queue", "minute", "date").agg(F.sum("busy_us").alias("busy_us"))
    limits = F.broadcast(queues.select("source", "queue", "max_inflight"))
    mean = F.col("busy_us") / F.lit(float(MINUTE_US))
    found = busy.withColumn("concurrency", mean).join(limits, ["source", "queue"], "left")
    # A queue with W = 0 is closed: nothing runs, and nothing is the share of it.
    ratio = F.when(F.col("max_inflight") > 0, F.col("concurrency") / F.col("max_inflight"))
    return declared(found.withColumn("ratio", ratio), "gold.concurrency")


def daily_changes(tallies: DataFrame) -> DataFrame:
    """Return the change of the backlog of each queue on each date, from these tallies (or gold minutes)."""
    found = tallies.groupBy("source", "queue", "date").agg(_change().alias("change"))
    return declared(found, "state.backlog_days")


def gold_backlog(minutes: DataFrame, days: DataFrame) -> DataFrame:
    """From gold minutes of some dates, and all days."""
    within_queue = Window.partitionBy("source", "queue").orderBy("date")
    earlier = within_queue.rowsBetween(Window.unboundedPreceding, -1)
    before = F.coalesce(F.sum("change").over(earlier), F.lit(0).cast("long"))
    carried = days.select("source", "queue", "date", before.alias("carried"))
    changes = minutes.groupBy("source", "queue", "date", "minute").agg(_change().alias("change"))
    within_day = Window.partitionBy("source", "queue", "date").orderBy("minute")
    so_far = within_day.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    waiting = F.col("carried") + F.sum("change").over(so_far)
    found = changes.join(F.broadcast(carried), ["source", "queue", "date"]).withColumn("waiting", waiting)
    return declared(found.drop("change", "carried"), "gold.backlog")


def affected_dates(changes: Iterable[tuple[str, str, date, int]], known: Iterable[date]) -> set[date]:
    """The dates whose backlog is another now: those that changed, and those that start from another number than before.

    A job that is heard of days after it was created was waiting on all of them.
    """
    by_queue: dict[tuple[str, str], dict[date, int]] = defaultdict(dict)
    for source, queue, day, change in changes:
        by_queue[source, queue][day] = change
    all_dates = sorted({*known, *(day for days in by_queue.values() for day in days)})
    affected: set[date] = set()
    for days in by_queue.values():
        carried = 0
        for day in all_dates:
            if carried or day in days:
                affected.add(day)
            carried += days.get(day, 0)
    return affected


def _change() -> Column:
    return F.sum(F.col("arrivals") + F.col("requeues") - F.col("finished"))


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


# -- buckets of time and of durations ------------------------------------------------------------------------------


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


GROWTH = 1.04
"""The factor by which each bucket is wider than the one before. Percentiles are within half of the growth: 2%."""
PERCENTS = (50, 95, 99)


def bucket(duration_us: Column) -> Column:
    """Return the bucket of a duration. A negative duration, which clocks of several machines can cause, counts as 0."""
    above_zero = F.greatest(duration_us, F.lit(0).cast("long")) + 1
    return F.floor(F.ln(above_zero) / F.lit(math.log(GROWTH))).cast("int")


def percentiles(metric: str) -> list[Column]:
    """p50, p95 and p99 in microseconds over rows (metric, bucket, count) of a group; null where there are none."""
    fractions = ", ".join(str(percent / 100) for percent in PERCENTS)
    # Interpolates between bucket numbers, that is geometrically between durations.
    found = F.expr(f"percentile(bucket, array({fractions}), count) FILTER (WHERE metric = '{metric}')")
    # The middle of a bucket, by factor.
    middles = [F.exp((found.getItem(n) + 0.5) * F.lit(math.log(GROWTH))) - 1 for n in range(len(PERCENTS))]
    names = [f"{metric}_p{percent}_us" for percent in PERCENTS]
    return [F.round(one).cast("long").alias(name) for one, name in zip(middles, names, strict=True)]
