"""Buckets of time and of durations, which the gold tables count in.

Instants are counted in whole minutes or hours since the epoch, so that a bucket is one division away. Durations go into
histograms that can be added up: each bucket is wider than the one below by the same factor, so a percentile read from them is off
by at most half a bucket.
"""

from __future__ import annotations

import math

from pyspark.sql import Column
from pyspark.sql import functions as F

from taskharbor.jobs import SECOND

MINUTE_US = 60 * SECOND
HOUR_US = 3600 * SECOND


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
    return F.when(
        F.col("reserved_at").isNotNull(), F.concat(F.sequence(began, last, F.lit(1).cast("long")), late)
    ).otherwise(F.array(ended))


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


def percentiles(metric: str, *, prefix: str) -> list[Column]:
    """p50, p95 and p99 in microseconds over rows (metric, bucket, count) of a group; null where there are none."""
    fractions = ", ".join(str(percent / 100) for percent in PERCENTS)
    # Interpolates between bucket numbers, that is geometrically between durations.
    found = F.expr(f"percentile(bucket, array({fractions}), count) FILTER (WHERE metric = '{metric}')")
    return [
        _duration(found.getItem(index)).alias(f"{prefix}_p{percent}_us")
        for index, percent in enumerate(PERCENTS)
    ]


def _duration(bucket_number: Column) -> Column:
    """The middle of a bucket, by factor."""
    return F.round(F.exp((bucket_number + 0.5) * F.lit(math.log(GROWTH))) - 1).cast("long")
