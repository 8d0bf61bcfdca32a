"""Gold errors: failures that are the same but for the ids, numbers and names in them, with a sample to look at."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.tables import GOLD_ERRORS, declared

FINGERPRINT_CHARS = 200
SAMPLE_CHARS = 500
_KEYS = ("source", "queue", "type", "error_type", "fingerprint")

# In this order: what a later pattern would tear apart comes first.
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"(?s)\n.*", ""),
    (r"\"[^\"]*\"|(?<![A-Za-z0-9])'[^']*'(?![A-Za-z0-9])|`[^`]*`", "<text>"),
    (r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s,;)\]}]+", "<url>"),
    (r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "<address>"),
    (r"\b[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "<id>"),
    (r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", "<address>"),
    (r"\[?\b[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{0,4}){3,7}\]?(:\d+)?", "<address>"),
    (r"\b0[xX][0-9a-fA-F]+\b", "<hex>"),
    (r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b", "<id>"),
    (r"\b(?=[0-9A-Za-z_-]*\d)(?=[0-9A-Za-z_-]*[A-Za-z])[0-9A-Za-z_-]{16,}\b", "<id>"),
    (r"[-+]?\b\d+([.,:]\d+)*([eE][-+]?\d+)?", "<n>"),
    (r"\s+", " "),
)


def fingerprint(message: Column) -> Column:
    """The first line of a message without what differs from one failure to the next."""
    text = reduce(
        lambda text, rule: F.regexp_replace(text, rule[0], rule[1]),
        PATTERNS,
        F.substring(F.coalesce(message, F.lit("")), 1, 1000),
    )
    return F.substring(F.trim(text), 1, FINGERPRINT_CHARS)


def attempt_errors(attempts: DataFrame) -> DataFrame:
    """Every silver attempt that carries an error, whatever its outcome."""
    failed = attempts.where(F.col("error_type").isNotNull() | F.col("error_message").isNotNull())
    rows = failed.select(
        "source",
        "queue",
        "type",
        F.coalesce("error_type", F.lit("")).alias("error_type"),
        fingerprint(F.col("error_message")).alias("fingerprint"),
        F.lit(1).cast("long").alias("count"),
        F.col("ended_at").alias("first_seen"),
        F.col("ended_at").alias("last_seen"),
        F.substring("error_message", 1, SAMPLE_CHARS).alias("sample_message"),
        F.col("job_id").alias("sample_job"),
        "date",
    )
    return declared(rows, GOLD_ERRORS)


def summed_errors(*rows: DataFrame) -> DataFrame:
    """One row per fingerprint. The sample is the earliest failure: the same one however the log was cut into runs."""
    earliest = F.min(F.struct("first_seen", "sample_job", "sample_message"))
    summed = (
        reduce(DataFrame.unionByName, rows)
        .groupBy(*_KEYS)
        .agg(F.sum("count").alias("count"), F.max("last_seen").alias("last_seen"), earliest.alias("sample"))
    )
    return declared(
        summed.select(*_KEYS, "count", "last_seen", "sample.*").withColumn("date", F.to_date("first_seen")),
        GOLD_ERRORS,
    )
