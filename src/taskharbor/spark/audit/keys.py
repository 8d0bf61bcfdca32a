"""Jobs that share a key: never two of them leased at once."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.spark.audit.kinds import Kind
from taskharbor.spark.audit.leases import is_leased, valid_until
from taskharbor.spark.audit.violations import Rule, broken


def check_keys(attempts: DataFrame) -> DataFrame:
    before = (
        Window.partitionBy("key", "queue", "source")
        .orderBy("reserved_at", "until", "job_id", "fence")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    leases = (
        attempts.where(F.col("key").isNotNull() & is_leased())
        .select("source", "queue", "key", "job_id", "fence", "reserved_at", valid_until().alias("until"))
        .withColumn("held", F.max(F.struct("until", "job_id", "fence", "reserved_at")).over(before))
    )
    return broken(
        leases,
        [
            Rule(
                Kind.KEY_HELD_TWICE,
                # Two leases of the same job are another matter.
                (F.col("reserved_at") < F.col("held.until")) & (F.col("held.job_id") != F.col("job_id")),
                F.col("reserved_at"),
                "job {job_id} of key {key} was leased (lease {fence}) at {reserved_at} while job {held.job_id} held lease "
                "{held.fence}, from {held.reserved_at}, until {held.until}",
                other_job_id=F.col("held.job_id"),
                other_fence=F.col("held.fence"),
            )
        ],
    )
