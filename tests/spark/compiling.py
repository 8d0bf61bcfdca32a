"""Spark as users have it: queries compiled, and adapted on the way. The session of the tests does neither, as rows are few."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from taskharbor.demo.analysis import SMALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def compiling(spark: SparkSession) -> Iterator[SparkSession]:
    changed = {name: spark.conf.get(name) for name in SMALL if name != "spark.sql.shuffle.partitions"}
    for name in changed:
        spark.conf.unset(name)
    try:
        yield spark
    finally:
        for name, value in changed.items():
            spark.conf.set(name, value)
