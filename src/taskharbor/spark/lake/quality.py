"""Quality checks: which rows of the log go into silver, and which into quarantine, each with the check that it does not pass.

A row that says nothing of sense would make wrong numbers in every table behind it. The audit judges it all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.jobs import JobState, Outcome
from taskharbor.lake.delta import Snapshot, Table
from taskharbor.lake.files import File, counted
from taskharbor.spark.lake.frames import read

COPY = "a row with this number is there already"
# Reasons, each with the condition of a row that it is true of. The first one counts.
CHECKS: dict[str, str] = {
    **{f"{one.name} is missing": f"{one.name} IS NULL" for one in ATTEMPTS if not one.nullable},
    COPY: "is_copy",
    "ended before it began": "ended_at < reserved_at",
    "unknown outcome": f"outcome NOT IN {tuple(str(one) for one in Outcome)}",
    "unknown state": f"state NOT IN {tuple(str(one) for one in JobState)}",
}


def judged(rows: DataFrame, *, is_unique: bool) -> DataFrame:
    """The rows with a column `reason`, null where a row passes. `is_unique`: no number is there twice, so none is looked for."""
    same = Window.partitionBy("source", "seq").orderBy("ended_at", "job_id", "fence")
    is_copy = F.lit(False) if is_unique else F.row_number().over(same) > 1
    failed = (F.when(F.expr(condition), F.lit(reason)) for reason, condition in CHECKS.items())
    return rows.withColumn("is_copy", is_copy).withColumn("reason", F.coalesce(*failed)).drop("is_copy")


def reasons(table: Table, files: Sequence[File] | None = None) -> Counter[str]:
    """Count the rows in quarantine by reason: those of these files, or all."""
    return counted(table.files() if files is None else files, table.place, table.name, "reason")


def whole_log(spark: SparkSession, snapshot: Snapshot) -> tuple[DataFrame, int]:
    """Return the rows of silver and of quarantine, each number once, and how many they are."""
    silver, apart = snapshot.tables["silver.attempts"], snapshot.tables["quarantine.attempts"]
    if not apart.rows:
        return read(spark, silver), silver.rows
    kept = read(spark, apart).where(F.col("reason") != COPY).drop("reason")
    return read(spark, silver).unionByName(kept), silver.rows + apart.rows - reasons(apart)[COPY]
