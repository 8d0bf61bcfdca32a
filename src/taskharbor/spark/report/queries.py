"""Queries over the tables of a lake: each takes DataFrames and gives a small one, however large the lake is.

Short histories are counted from tallies that are made of the rows of silver, long ones from gold, which has the same columns.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import JobState
from taskharbor.spark.lake.gold import PERCENTS, merged_sketches
from taskharbor.spark.report.data import Buckets

COUNTED = ("arrivals", "completions", "failures", "retries", "expiries", "requeues", "finished", "busy_us")
LEASE_ENDS = ("done", "retried", "expired", "dead", "released")
TYPES_SHOWN = 16
ERRORS_SHOWN = 12
JOBS_SHOWN = 8
OBJECTIVES_SHOWN = 12
MESSAGE_CHARS = 500

# -- over time ----------------------------------------------------------------------------------------------------


def movements(tallies: DataFrame, buckets: Buckets, label: Column) -> DataFrame:
    """(label, index, COUNTED...) from tallies, gold minutes or gold hours."""
    return _by_bucket(tallies, buckets, label, *(F.sum(name).alias(name) for name in COUNTED))


def waits(cells: DataFrame, buckets: Buckets) -> DataFrame:
    """(index, wait_p50_us, wait_p95_us, wait_p99_us) from the sketches of gold minutes or hours, over all queues."""
    return _by_bucket(cells, buckets, F.lit(""), *merged_sketches()).select("index", *interpolated("wait"))


def loads(workers: DataFrame, buckets: Buckets) -> DataFrame:
    """(label, index, value): the mean number of leases that a worker held in a bucket."""
    mean = F.sum("busy_us") / F.lit(buckets.bucket_us)
    return _by_bucket(workers, buckets, F.col("worker"), mean.alias("value"))


def burn_rates(objectives: DataFrame, buckets: Buckets) -> DataFrame:
    """(label, index, value): how fast an objective used up its allowed share of misses."""
    rate = F.sum("bad") / F.sum("total") / (F.lit(1.0) - F.max("target"))
    return _by_bucket(objectives, buckets, F.col("objective"), rate.alias("value"))


def _by_bucket(rows: DataFrame, buckets: Buckets, label: Column, *values: Column) -> DataFrame:
    since = F.unix_micros("minute" if "minute" in rows.columns else "hour") - F.lit(buckets.start_us)
    index = F.floor(since / F.lit(buckets.bucket_us)).cast("long")
    found = rows.groupBy(label.alias("label"), index.alias("index")).agg(*values)
    return found.where(F.col("index").between(0, buckets.number - 1))


# -- over the whole history ---------------------------------------------------------------------------------------


def job_counts(lifecycles: DataFrame) -> DataFrame:
    """One row: jobs by state, executions, and `leases` with the leases by outcome."""
    final = ("done", "dead", "cancelled")
    by_state = [F.count_if(F.col("state") == state).alias(state) for state in final]
    by_state.append(F.count_if(~F.col("state").isin(*final)).alias("open"))
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in ("executions", *LEASE_ENDS)]
    leases = F.struct(*sums[1:]).alias("leases")
    return lifecycles.agg(F.count("*").alias("jobs"), *by_state, sums[0], leases)


def durations(hours: DataFrame) -> DataFrame:
    """(type, executions, wait_p50_us ... run_p99_us) of the most frequent types; the row without a type is for all."""
    executions = F.kll_sketch_get_n_bigint("run_sketch").alias("executions")
    found = hours.rollup("type").agg(*merged_sketches())
    times = found.select("type", executions, *interpolated("wait"), *interpolated("run"))
    return times.orderBy(F.desc("executions"), F.col("type").asc_nulls_first()).limit(TYPES_SHOWN + 1)


def errors(gold: DataFrame) -> DataFrame:
    """Columns of `ErrorGroup` over all sources and days, the most frequent first."""
    keys = ("error_type", "fingerprint", "queue", "type")
    grouped = gold.groupBy(*keys).agg(
        F.sum("count").alias("count"),
        F.unix_micros(F.min("first_seen")).alias("first_seen_us"),
        F.unix_micros(F.max("last_seen")).alias("last_seen_us"),
        F.min(F.struct("first_seen", "sample_job", "sample_message")).alias("sample"),
    )
    frequent = grouped.orderBy(F.desc("count"), *keys).limit(ERRORS_SHOWN)
    named = frequent.select("*", "sample.sample_job", "sample.sample_message").drop("sample")
    return named.fillna("").replace("", "Error", ["error_type"])


def busiest_minute(minutes: DataFrame) -> DataFrame:
    """One row with fields of `Totals`: the minute with most completions over all queues, and their number."""
    sums = minutes.groupBy("minute").agg(F.sum("completions").alias("completions"))
    highest = F.max(F.struct("completions", (-F.unix_micros("minute")).alias("earlier"))).alias("one")
    return sums.agg(highest).selectExpr(
        "coalesce(one.completions, 0) AS busiest_minute_completions",
        "IF(one.completions > 0, -one.earlier, NULL) AS busiest_minute_us",
    )


def queue_ends(minutes: DataFrame, label: Column) -> DataFrame:
    """(label, waiting, limit) of the last minutes of queues."""
    newest = [F.max_by(name, "minute").alias(name) for name in ("waiting", "max_inflight")]
    last = minutes.groupBy("source", "queue").agg(*newest)
    # Queues of several stores that share a name have no common limit to draw.
    limit = F.when(F.count("*") == 1, F.max("max_inflight")).alias("limit")
    return last.groupBy(label.alias("label")).agg(F.sum("waiting").alias("waiting"), limit)


def waiting(jobs: DataFrame) -> DataFrame:
    """Columns of `Waiting`, the most first, of jobs as they are in a store."""
    is_ready = F.col("state") == JobState.READY.value
    counts = (F.count_if(is_ready).alias("ready"), F.count_if(~is_ready).alias("later"))
    due = F.unix_micros(F.min(F.when(is_ready, F.col("run_at")))).alias("due_us")
    found = jobs.groupBy("queue", "type").agg(*counts, due)
    return found.orderBy(F.desc(F.col("ready") + F.col("later")), "queue", "type").limit(TYPES_SHOWN * 2)


def slowest(lifecycles: DataFrame) -> DataFrame:
    """Columns of `JobLine`, by the time from when a job might first run to its end."""
    ended = _job_lines(lifecycles.where(F.col("state").isin("done", "dead")))
    return ended.orderBy(F.desc("total_us"), "source", "job_id").limit(JOBS_SHOWN)


def most_tried(lifecycles: DataFrame) -> DataFrame:
    """Columns of `JobLine`, by the number of executions."""
    tried = _job_lines(lifecycles.where(F.col("executions") > 1))
    return tried.orderBy(F.desc("executions"), F.desc("ran_us"), "source", "job_id").limit(JOBS_SHOWN)


def worst_objectives(objectives: DataFrame) -> DataFrame:
    """Fields of `ObjectiveFigures`, of the objectives that were missed most."""
    sums = objectives.groupBy(F.col("objective").alias("name")).agg(
        F.coalesce(F.first("queue"), F.lit("all queues")).alias("queue"),
        F.sum("total").alias("total"),
        F.sum("bad").alias("bad"),
    )
    return sums.orderBy(F.desc(F.col("bad") / F.col("total")), "name").limit(OBJECTIVES_SHOWN)


def _job_lines(lifecycles: DataFrame) -> DataFrame:
    # A delay that was asked for is not slowness.
    total = F.unix_micros("finished_at") - F.unix_micros(F.greatest("first_run_at", "created_at"))
    waited = F.when(total.isNotNull(), F.greatest(total - F.col("total_run_us"), F.lit(0)))
    message = F.substring("last_error_message", 1, MESSAGE_CHARS)
    error = F.concat_ws(": ", F.nullif("last_error_type", F.lit("")), message)
    return lifecycles.select(
        *("source", "job_id", "queue", "type", "state", "executions"),
        total.alias("total_us"),
        waited.alias("waited_us"),
        F.col("total_run_us").alias("ran_us"),
        F.nullif(error, F.lit("")).alias("last_error"),
    )


# Up to so many values, each can be told by its rank.
FEW = 100


def interpolated(metric: str) -> list[Column]:
    """p50, p95 and p99 of a metric in microseconds, from its sketch.

    Of few values they lie between the two nearest ones, as PERCENTILE_CONT has it: with two, the nearest recorded value would
    be half of the median or twice it. This costs too much for every minute in gold.
    """
    sketch = F.col(f"{metric}_sketch")
    number = F.kll_sketch_get_n_bigint(sketch)
    # Ranks must be constants: one of these is within the share of each value.
    ranks = [(n + 0.5) / FEW for n in range(FEW)] + [percent / 100 for percent in PERCENTS]

    def each(values: Column) -> Column:
        def nth(n: Column) -> Column:
            return values[F.floor((n + 0.5) / number * FEW).cast("int")]

        def one(place: int, percent: int) -> Column:
            wanted = (number - 1) * (percent / 100)
            low = nth(F.floor(wanted))
            between = low + (nth(F.ceil(wanted)) - low) * (wanted - F.floor(wanted))
            return F.when(number > FEW, values[FEW + place]).otherwise(F.round(between).cast("long"))

        return F.array(*(one(place, percent) for place, percent in enumerate(PERCENTS)))

    known = F.kll_sketch_get_quantile_bigint(sketch, F.array(*map(F.lit, ranks)))
    found = F.when(number > 0, F.transform(F.array(known), each)[0])
    return [found.getItem(n).alias(f"{metric}_p{percent}_us") for n, percent in enumerate(PERCENTS)]
