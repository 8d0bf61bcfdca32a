"""A lease over time: which minutes or hours it touches, and how much of each.

Instants are counted in whole buckets since the epoch, so that a bucket is one division away.
"""

from __future__ import annotations

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
    """Of a silver attempt: the buckets in which its lease began, was valid or ended; of one without a lease, that of its end.

    Between the expiry of a lease and the moment somebody noticed there may be days: those are left out.
    """
    ended = bucket_of(F.col("ended_at"), length_us)
    began = bucket_of(F.col("reserved_at"), length_us)
    last = bucket_of(F.greatest("valid_until", "reserved_at"), length_us)
    late = F.when(ended > last, F.array(ended)).otherwise(F.array().cast("array<long>"))
    return F.when(
        F.col("reserved_at").isNotNull(), F.concat(F.sequence(began, last, F.lit(1).cast("long")), late)
    ).otherwise(F.array(ended))


def busy_within(bucket: Column, length_us: int) -> Column:
    """For how many microseconds of the bucket the lease was valid."""
    start = bucket * F.lit(length_us).cast("long")
    until = F.least(F.unix_micros("valid_until"), start + F.lit(length_us).cast("long"))
    since = F.greatest(F.unix_micros("reserved_at"), start)
    nothing = F.lit(0).cast("long")
    return F.when(F.col("reserved_at").isNotNull(), F.greatest(until - since, nothing)).otherwise(nothing)
