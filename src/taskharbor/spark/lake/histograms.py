"""Durations as histograms that can be added up: each bucket is wider than the one below by the same factor.

A percentile read from them is off by at most half a bucket, whatever the size of the durations.
"""

from __future__ import annotations

import math

from pyspark.sql import Column
from pyspark.sql import functions as F

GROWTH = 1.04
"""How much wider each bucket is. Percentiles are within half of this: 2%."""
PERCENTS = (50, 95, 99)


def bucket(duration_us: Column) -> Column:
    """The bucket of a duration. Less than nothing, which clocks of several machines can make, counts as nothing."""
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
