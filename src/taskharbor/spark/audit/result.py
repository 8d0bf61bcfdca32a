"""What an audit comes to: how much was looked at, what was found, and a few examples of each kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.audit.violations import SCHEMA

EXAMPLES_PER_KIND = 5
_SHARES = 64


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    source: str | None
    queue: str | None
    job_id: str | None
    other_job_id: str | None
    fence: int | None
    other_fence: int | None
    at: datetime | None
    text: str


class AuditResult(msgspec.Struct, frozen=True, kw_only=True):
    rows: int
    """Rows of the log that were checked."""
    jobs: int
    kinds: dict[str, int] = {}
    """Violations per kind, most first; only kinds that were found."""
    examples: list[Violation] = []
    """A few of each kind, the earliest first."""

    @property
    def violations(self) -> int:
        return sum(self.kinds.values())

    @property
    def is_clean(self) -> bool:
        return not self.kinds


def summarise(violations: DataFrame, attempts: DataFrame) -> AuditResult:
    """Runs the audit and counts. What comes to the driver is bounded, however much is wrong."""
    # The earliest of each share rather than of all: one pass, nothing kept or sorted, and the very first is always among them.
    share = F.pmod(F.hash("source", "job_id"), F.lit(_SHARES))
    earliest = F.min(F.struct("at", *(name for name in SCHEMA.names if name != "at")))
    found = violations.groupBy("kind", share.alias("share")).agg(
        F.count("*").alias("count"), earliest.alias("earliest")
    )
    counts: Counter[str] = Counter()
    examples: defaultdict[str, list[Violation]] = defaultdict(list)
    for row in found.collect():
        counts[row["kind"]] += row["count"]
        examples[row["kind"]].append(Violation(**row["earliest"].asDict()))
    (size,) = attempts.agg(
        F.count("*").alias("rows"), F.count_distinct(F.struct("source", "job_id")).alias("jobs")
    ).collect()
    kinds = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return AuditResult(
        rows=size["rows"],
        jobs=size["jobs"],
        kinds=kinds,
        examples=[one for kind in kinds for one in sorted(examples[kind], key=_age)[:EXAMPLES_PER_KIND]],
    )


def replaced(result: AuditResult, kind: str, by: AuditResult) -> AuditResult:
    """The same, with what another look at one kind came to."""
    kinds = {name: count for name, count in result.kinds.items() if name != kind} | by.kinds
    examples = [example for example in result.examples if example.kind != kind] + by.examples
    return msgspec.structs.replace(result, kinds=kinds, examples=examples)


def _age(violation: Violation) -> tuple[float, str]:
    return (0.0 if violation.at is None else violation.at.timestamp(), violation.job_id or "")
