"""Gold objectives: the rate at which a queue uses up the failures that its objective allows.

A burn rate of 1 uses up the allowance exactly; 14 uses up that of a month in about two days.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobState
from taskharbor.spark.lake.frames import declared
from taskharbor.spark.lake.gold import sums

_KEYS = ("source", "objective", "queue", "type", "kind", "hour", "target", "date")


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wait`: starts within the threshold. `run`: executions within it. `success`: jobs that end done and not dead."""

    name: str
    kind: Literal["wait", "run", "success"]
    # None: all queues together.
    queue: str | None = None
    type: str | None = None
    threshold_ms: float | None = None
    target: float = 0.99


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    objectives: list[Objective]


def load_objectives(path: Path) -> list[Objective]:
    """Read objectives from a TOML file with tables `[[objectives]]`, or a JSON file with a list or an object `{"objectives":
    [...]}`."""
    try:
        text = path.read_text()
        found = tomllib.loads(text) if path.suffix == ".toml" else msgspec.json.decode(text)
        objectives = msgspec.convert({"objectives": found} if isinstance(found, list) else found, _Document)
    except OSError as error:
        raise InvalidRequest(f"the objectives {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(
            f"{path} does not declare objectives: {error}. Each needs name and kind (wait, run or success), a target "
            "below 1, and threshold_ms for wait and run; queue and type are optional"
        ) from error
    return checked(objectives.objectives)


def checked(objectives: Sequence[Objective]) -> list[Objective]:
    """Check objectives. Raises InvalidRequest if one cannot be computed."""
    for one in objectives:
        if not 0 < one.target < 1:
            raise InvalidRequest(
                f"objective {one.name!r}: target must be between 0 and 1, such as 0.99, not {one.target}"
            )
        if (one.threshold_ms is None) != (one.kind == "success"):
            word = "takes no" if one.kind == "success" else "needs a"
            raise InvalidRequest(f"objective {one.name!r} of kind {one.kind!r} {word} threshold_ms")
    names = [one.name for one in objectives]
    if twice := ", ".join(sorted({name for name in names if names.count(name) > 1})):
        raise InvalidRequest(f"objectives must have different names; these are there twice: {twice}")
    return list(objectives)


def attempt_objectives(attempts: DataFrame, objectives: Sequence[Objective]) -> DataFrame:
    """Count by objective the silver attempts that it judges, in the hour in which they ended."""
    hour = F.date_trunc("hour", "ended_at").alias("hour")
    counts = [
        count.alias(f"{name}_{number}")
        for number, one in enumerate(objectives)
        for name, count in (("total", F.count(_is_bad(one))), ("bad", F.count_if(_is_bad(one))))
    ]
    # Counted before there is a row for each objective: rows for each attempt would be many times as many.
    by_hour = attempts.groupBy("source", hour, "date").agg(*counts)
    one_each = by_hour.withColumn("one", F.explode(F.array(*(_row(*pair) for pair in enumerate(objectives)))))
    rows = one_each.select("source", "hour", "date", "one.*").where("total > 0")
    return declared(rows.withColumn("burn_rate", _burn_rate()), "gold.objectives")


def summed_objectives(*rows: DataFrame) -> DataFrame:
    """One row per objective and hour."""
    summed = sums(rows, _KEYS, "total", "bad")
    return declared(summed.withColumn("burn_rate", _burn_rate()), "gold.objectives")


def _burn_rate() -> Column:
    return F.col("bad") / F.col("total") / (F.lit(1.0) - F.col("target"))


def _is_bad(one: Objective) -> Column:
    """Return true or false for an attempt, as the objective judges it; null if it does not apply."""
    if one.kind == "success":
        concerned = F.col("state").isin(JobState.DONE.value, JobState.DEAD.value)
        bad = F.col("state") == JobState.DEAD.value
    else:
        concerned = F.col("reserved_at").isNotNull()
        bad = F.col(f"{one.kind}_us") > F.lit(round((one.threshold_ms or 0) * 1000))
    if one.queue is not None:
        concerned &= F.col("queue") == one.queue
    if one.type is not None:
        concerned &= F.col("type") == one.type
    return F.when(concerned, bad)


def _row(number: int, one: Objective) -> Column:
    """The row of an objective, from the counts under its number."""
    return F.struct(
        F.lit(one.name).alias("objective"),
        F.lit(one.queue).cast("string").alias("queue"),
        F.lit(one.type).cast("string").alias("type"),
        F.lit(one.kind).alias("kind"),
        F.lit(one.target).cast("double").alias("target"),
        *(F.col(f"{name}_{number}").alias(name) for name in ("total", "bad")),
    )
