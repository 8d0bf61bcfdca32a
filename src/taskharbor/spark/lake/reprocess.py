"""Some dates again, from bronze: what the tables have of them is replaced, whatever it was.

A run does this as it does everything: it has a number, and a later process can finish it. The rows of a job that was active on
one of the dates are taken from all dates, because a lifecycle is made of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import date
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.lake.delta import Lake, RunRecord, Table
from taskharbor.lake.files import File
from taskharbor.lake.tables import BRONZE
from taskharbor.spark.lake import gold, silver
from taskharbor.spark.lake.frames import declared, read
from taskharbor.spark.lake.objectives import Objective, attempt_objectives, summed_objectives

# The rows that a table gets, and the files that they replace.
Rewritten: TypeAlias = tuple[DataFrame | None, list[File]]


class Again:
    """The tables that an ordinary run adds to, for a run that computes its dates again."""

    def __init__(self, spark: SparkSession, lake: Lake, record: RunRecord) -> None:
        self.spark, self.lake, self.record, self.dates = spark, lake, record, set(record.dates)
        self.computing: dict[str, Callable[[Table], Rewritten]] = {
            "silver.attempts": partial(self._of_dates, silver.silver_attempts),
            "quarantine.attempts": partial(self._of_dates, silver.quarantined),
            "silver.lifecycles": self._lifecycles,
            "gold.minutes": self._minutes,
            "gold.workers": self._workers,
            "gold.errors": self._errors,
            "gold.objectives": self._objectives,
            "gold.ticks": self.ticks,
        }

    def _of(self, table: Table) -> list[File]:
        return table.files(self.dates)

    def _rows(self, dates: Collection[date | None] | None = None) -> DataFrame:
        """Rows of bronze that ended on these dates."""
        bronze = self.lake.table(BRONZE)
        return read(self.spark, bronze, bronze.files(dates)).where(F.col("run") <= self.record.run)

    def _of_dates(self, make: Callable[[DataFrame], DataFrame], table: Table) -> Rewritten:
        return make(self._rows(self.dates)), self._of(table)

    def _lifecycles(self, table: Table) -> Rewritten:
        lives = self._rows(self.dates).select(*silver.LIFE).distinct()
        rows = self._rows().join(lives, list(silver.LIFE), "left_semi")
        made = silver.merged_lifecycles(silver.single_attempts(silver.checked(rows), run=F.col("run")))
        # Jobs that ended on these dates were active on them. Jobs that ended on others, or not yet, may have been.
        others = [one for one in table.files() if one.date not in self.dates]
        found = read(self.spark, table, others, with_file=True).join(lives, list(silver.LIFE), "left_semi")
        names = {row.file for row in found.select("file").distinct().collect()}
        shared = [one for one in others if Path(one.path).name in names]
        kept = read(self.spark, table, shared).join(lives, list(silver.LIFE), "left_anti")
        return made.unionByName(declared(kept, table.name)), [*self._of(table), *shared]

    def _touching(self) -> DataFrame:
        """Silver rows whose lease was valid, or ended, on one of the dates."""
        bronze, first = self.lake.table(BRONZE), min(self.dates)
        later = self._rows([one.date for one in bronze.files() if one.date is not None and one.date >= first])
        return silver.silver_attempts(later).where(
            F.to_date(F.coalesce("reserved_at", "ended_at")) <= max(self.dates)
        )

    def _is_inside(self, day: Column) -> Column:
        return day.between(min(self.dates), max(self.dates))

    def _minutes(self, table: Table) -> Rewritten:
        lifecycles = self.lake.table("silver.lifecycles")
        jobs = read(self.spark, lifecycles, lifecycles.files_with("created_at", self.dates))
        arrived = gold.arrival_cells(jobs.where(self._is_inside(F.to_date("created_at"))))
        cells = gold.attempt_cells(self._touching()).where(self._is_inside(F.to_date("minute")))
        return gold.gold_minutes([cells, arrived]), self._of(table)

    def _workers(self, table: Table) -> Rewritten:
        rows = gold.attempt_workers(self._touching()).where(self._is_inside(F.col("date")))
        return gold.summed_workers(rows), self._of(table)

    def _errors(self, table: Table) -> Rewritten:
        """The table has no dates: it is made anew."""
        return gold.summed_errors(gold.attempt_errors(silver.silver_attempts(self._rows()))), table.files()

    def ticks(self, table: Table) -> Rewritten:
        """All of them, for a lake whose last runs an earlier release made."""
        return gold.summed_ticks(gold.attempt_ticks(silver.silver_attempts(self._rows()))), table.files()

    def _objectives(self, table: Table) -> Rewritten:
        wanted = msgspec.json.decode(self.record.objectives, type=list[Objective])
        rows = silver.silver_attempts(self._rows(self.dates))
        made = summed_objectives(attempt_objectives(rows, wanted)) if wanted else None
        return made, self._of(table)
