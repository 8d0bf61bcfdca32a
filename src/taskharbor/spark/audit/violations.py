"""The one shape of a violation, and how rules over rows become such rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from taskharbor.spark.audit.kinds import Kind

SCHEMA = StructType(
    [
        StructField("kind", StringType()),
        StructField("source", StringType()),
        StructField("queue", StringType()),
        StructField("job_id", StringType()),
        StructField("other_job_id", StringType()),
        StructField("fence", LongType()),
        StructField("other_fence", LongType()),
        StructField("at", TimestampType()),
        StructField("text", StringType()),
    ]
)

_NAME = re.compile(r"\{([\w.]+)\}")


class Rule(NamedTuple):
    """Broken by a row where `broken` is true of it. The row must have source, queue, job_id and fence.

    `text` has a {name} for every value: a column of the row, `at`, or one of `values`.
    """

    kind: Kind
    broken: Column
    at: Column
    text: str
    other_job_id: Column | None = None
    other_fence: Column | None = None
    values: Mapping[str, Column] = {}


def broken(rows: DataFrame, rules: Sequence[Rule]) -> DataFrame:
    """One violation for every rule that a row breaks, in one pass over the rows."""
    # Almost no row breaks any rule: those that do are found before any sentence is made.
    suspects = rows.where(reduce(or_, (F.coalesce(rule.broken, F.lit(False)) for rule in rules)))
    findings = F.array(*(F.when(rule.broken, _finding(rule)) for rule in rules))
    return suspects.select(
        "source", "queue", "job_id", "fence", F.explode(F.array_compact(findings)).alias("finding")
    ).select(
        *(
            F.col(name if name in ("source", "queue", "job_id", "fence") else f"finding.{name}")
            for name in SCHEMA.names
        )
    )


def _finding(rule: Rule) -> Column:
    return F.struct(
        F.lit(str(rule.kind)).alias("kind"),
        _or_null(rule.other_job_id, "string").alias("other_job_id"),
        _or_null(rule.other_fence, "bigint").alias("other_fence"),
        rule.at.alias("at"),
        _sentence(rule).alias("text"),
    )


def _or_null(column: Column | None, kind: str) -> Column:
    return (F.lit(None) if column is None else column).cast(kind)


def _sentence(rule: Rule) -> Column:
    """Instants are written as in ISO 8601, a missing value as `none`."""
    values = {"at": rule.at, **rule.values}
    names = _NAME.findall(rule.text)
    columns = (F.coalesce(values.get(name, F.col(name)).cast("string"), F.lit("none")) for name in names)
    return F.format_string(_NAME.sub("%s", rule.text), *columns)
