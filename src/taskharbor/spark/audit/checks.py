"""The checks: each is a file of SQL, whose rows have a condition for each kind of violation, with rules (`rules.toml`) that make
violations of the conditions that are true. `rows` judges single rows, `numbers` their numbers, `lives` a job's rows in their
order, `keys` jobs that share a key, `limits` max_inflight, `ticks` jobs of one tick, `stored` the jobs in the store, and `due`
the ticks that schedules in the store had to make."""

from __future__ import annotations

import re
from datetime import datetime
from functools import reduce
from importlib.resources import files
from operator import or_

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.drivers.contract import DAY
from taskharbor.jobs import SECOND
from taskharbor.schedules.tick_ids import PATTERN
from taskharbor.spark.audit.violations import Kind, Violation

# The largest difference between the clocks of two callers, in seconds, for calls whose order the log does not tell. Far more than
# the error of a sampled backend clock, and far less than a lease.
CLOCK_SLACK_SECONDS = 5
_NAME = re.compile(r"\{([\w.]+)\}")


class Rules(msgspec.Struct, forbid_unknown_fields=True):
    """What is said of a job by kind of violation, where a row's column of the kind's name is true. A sentence has a {name} for
    every value: a column of the row, or `at`, the instant of the violation. `begins` is the beginning of each sentence. The other
    fields are SQL. The row must have source, queue, job_id and fence."""

    said: dict[Kind, str]
    begins: str = ""
    at: str = "ended_at"
    other_job_id: str = "NULL"
    other_fence: str = "NULL"

    def finding(self, kind: Kind) -> Column:
        """Return the violation of a row. Instants are written as in ISO 8601, a missing value as `none`."""
        sentence = f"job {{job_id}} {self.begins}{self.said[kind]}"
        names = [self.at if name == "at" else name for name in _NAME.findall(sentence)]
        values = (F.coalesce(F.expr(name).cast("string"), F.lit("none")) for name in names)
        return F.struct(
            F.lit(str(kind)).alias("kind"),
            *("source", "queue", "job_id", "fence"),
            F.expr(self.other_job_id).cast("string").alias("other_job_id"),
            F.expr(self.other_fence).cast("bigint").alias("other_fence"),
            F.expr(self.at).alias("at"),
            F.format_string(_NAME.sub("%s", sentence), *values).alias("text"),
        )


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


RULES = msgspec.toml.decode(_text("rules.toml"), type=dict[str, list[Rules]])
# The kinds that only the store and its log together show.
STORE_KINDS = tuple(kind for name in ("stored", "due") for rules in RULES[name] for kind in rules.said)


def check(name: str, attempts: DataFrame, before: datetime | None = None, **tables: DataFrame) -> DataFrame:
    """Return one violation for every rule that a row breaks. `before`: jobs that were due earlier should have been claimed."""
    known = {"slack": CLOCK_SLACK_SECONDS, "longest": DAY // SECOND, "before": before, "tick_id": PATTERN}
    rows = attempts.sparkSession.sql(_text(f"{name}.sql"), known, attempts=attempts, **tables)
    pairs = [(F.col(str(kind)), rules.finding(kind)) for rules in RULES[name] for kind in rules.said]
    # Almost no row breaks a rule. The rows that do are found before any sentence is made.
    suspects = rows.where(reduce(or_, (F.coalesce(is_broken, F.lit(False)) for is_broken, _ in pairs)))
    findings = F.array(*(F.when(is_broken, finding) for is_broken, finding in pairs))
    found = suspects.select(F.explode(F.array_compact(findings)).alias("finding"))
    return found.select(*(f"finding.{name}" for name in Violation.__struct_fields__))
