"""Where a history goes: into a folder of Parquet, or through a lake as if it were a store's log."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from taskharbor.spark.lake.layout import Lake
from taskharbor.spark.lake.run import run_pipeline
from taskharbor_testkit.histories.generation import generate, queues_table


def write_parquet(
    spark: SparkSession, folder: Path, *, rows: int, days: int, seed: int, violations: int
) -> int:
    """Makes `attempts`, `queues` and `planted` below the folder; how many violations were planted."""
    attempts, planted = generate(spark, rows=rows, seed=seed, days=days, violations=violations)
    queues = queues_table(spark, rows=rows, days=days)
    for name, frame in (("attempts", attempts), ("queues", queues), ("planted", planted)):
        frame.write.mode("errorifexists").parquet(str(folder / name))
    return spark.read.schema(planted.schema).parquet(str(folder / "planted")).count()


def fill_lake(spark: SparkSession, folder: Path, *, rows: int, days: int, seed: int, violations: int) -> int:
    """One run of the pipeline over it. Every seed is a source of its own, so that several fit into one lake."""
    attempts, planted = generate(spark, rows=rows, seed=seed, days=days, violations=violations)
    queues = queues_table(spark, rows=rows, days=days)
    run_pipeline(spark, Lake(folder), attempts, name=f"history-{seed}", queues=queues)
    return planted.count() if violations else 0
