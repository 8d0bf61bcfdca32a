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


def passing(rows: DataFrame, *, is_unique: bool) -> DataFrame:
    """The rows that pass. `is_unique`: no number is there twice, so none is looked for."""
    # One condition, which is quicker than the reason of each row.
    fails = F.expr(" OR ".join(f"({condition})" for condition in CHECKS.values()))
    return _with_copies(rows, is_unique).where(~F.coalesce(fails, F.lit(False))).drop("is_copy")


def failing(rows: DataFrame, *, is_unique: bool) -> DataFrame:
    """The other rows, with a column `reason`."""
    reasons = (F.when(F.expr(condition), F.lit(reason)) for reason, condition in CHECKS.items())
    judged = _with_copies(rows, is_unique).withColumn("reason", F.coalesce(*reasons)).drop("is_copy")
    return judged.where(F.col("reason").isNotNull())


def _with_copies(rows: DataFrame, is_unique: bool) -> DataFrame:
    same = Window.partitionBy("source", "seq").orderBy("ended_at", "job_id", "fence")
    return rows.withColumn("is_copy", F.lit(False) if is_unique else F.row_number().over(same) > 1)


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
