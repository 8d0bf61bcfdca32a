"""One run of the pipeline: what is new in a log goes through bronze and silver into gold, and takes effect as one.

Every step reads what the steps before it wrote, and of the lake only the dates that the new rows touch. Nothing is cleaned up
on the way out: whatever ends a run before its manifest is there, the lake is as if it had never begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake import gold, silver
from taskharbor.spark.lake.layout import Change, Lake, Progress, Written
from taskharbor.spark.lake.objectives import Objective, attempt_objectives, checked, summed_objectives
from taskharbor.spark.lake.sources import News, news_of_frame, news_of_store, source_name
from taskharbor.spark.lake.tables import QUEUE_COLUMNS

STEPS = (
    "bronze.queues",
    "bronze.attempts",
    "silver.attempts",
    "silver.lifecycles",
    "tallies",
    "durations",
    "gold.minutes",
    "gold.hours",
    "gold.concurrency",
    "gold.backlog",
    "gold.workers",
    "gold.errors",
    "gold.objectives",
    "commit",
    "done",
)


class RunSummary(msgspec.Struct, kw_only=True):
    """The work of one run. `tables` has the rows written by table, `steps` the seconds by step; `startup_seconds` is the time
    that starting Spark took, apart from `seconds`."""

    source: str
    run: int
    rows_read: int
    tables: dict[str, int]
    seconds: float
    steps: dict[str, float]
    startup_seconds: float = 0.0


def run_pipeline(
    spark: SparkSession,
    lake: Lake,
    source: str | DataFrame,
    *,
    name: str | None = None,
    queues: DataFrame | None = None,
    objectives: Sequence[Objective] | None = None,
    progress: Progress | None = None,
) -> RunSummary:
    """Take in what is new in a store (its URL), or in a DataFrame of attempts, which needs a `name` and may come with `queues`.

    Objectives, once given, hold for later runs until others are given.
    """
    _require_utc(spark)
    known = source_name(source) if isinstance(source, str) else "frame"
    run = _Run(spark, lake, name or known, progress)
    if objectives is not None:
        checked(objectives)
    return run.take(source, queues, objectives)


def _require_utc(spark: SparkSession) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    if zone not in ("UTC", "Etc/UTC"):
        raise InvalidRequest(
            f"the lake's dates are those of UTC, and this session's time zone is {zone}: start it with "
            "spark.sql.session.timeZone=UTC, or by taskharbor.spark.session.local_session"
        )


class _Run:
    def __init__(self, spark: SparkSession, lake: Lake, name: str, progress: Progress | None) -> None:
        self.spark = spark
        self.change: Change = lake.begin("run")
        self.number = self.change.manifest.run
        self.name = name
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def take(
        self, source: str | DataFrame, queues: DataFrame | None, objectives: Sequence[Objective] | None
    ) -> RunSummary:
        began = time.monotonic()
        manifest = self.change.manifest
        after = manifest.cursors.get(self.name)
        if isinstance(source, str):
            news = news_of_store(self.spark, source, after)
        else:
            news = news_of_frame(source, queues, after)
        with self._step("bronze.queues"):
            if news.queues is not None:
                seen = silver.bronze_queues(
                    news.queues, source=self.name, run=self.number, observed_at=datetime.now(UTC)
                )
                self.change.append("bronze.queues", seen)
        with self._step("bronze.attempts"):
            bronze = self._bronze(news)
        refined = self._refine(bronze, news.queues) if bronze is not None and bronze.rows else None
        self._objectives(refined, objectives)
        if news.until is not None:
            manifest.cursors[self.name] = news.until
        elif bronze is not None and bronze.rows:
            manifest.cursors[self.name] = str(self._read(bronze).agg(F.max("seq")).head()[0])  # type: ignore[index]
        with self._step("commit"):
            self.change.commit()
        with self._step("done"):
            self.change.sweep()
        return RunSummary(
            source=self.name,
            run=self.number,
            rows_read=0 if bronze is None else bronze.rows,
            tables=self.change.written,
            seconds=time.monotonic() - began,
            steps=self.seconds,
        )

    def _bronze(self, news: News) -> Written | None:
        if news.attempts is None:
            return None
        rows = silver.bronze_attempts(
            news.attempts, source=self.name, run=self.number, ingested_at=datetime.now(UTC)
        )
        return self.change.append("bronze.attempts", rows)

    def _refine(self, bronze: Written, queues: DataFrame | None) -> Written:
        """From new bronze rows to all of silver and gold but the objectives; the new silver attempts."""
        change = self.change
        with self._step("silver.attempts"):
            refined = change.append("silver.attempts", silver.silver_attempts(self._read(bronze)))
        attempts = self._read(refined)
        with self._step("silver.lifecycles"):
            lifecycles = self._lifecycles(attempts)
        with self._step("tallies"):
            arrived = self._read(lifecycles).where(F.col("first_seen_run") == self.number)
            summed = gold.summed_tallies(gold.attempt_tallies(attempts), gold.arrival_tallies(arrived))
            tallies = change.scratch("state.tallies", summed)
        dates = tallies.dates
        with self._step("durations"):
            before = change.read(self.spark, "state.durations", dates)
            added = gold.summed_durations(before, gold.attempt_durations(attempts))
            durations = change.replace("state.durations", added, dates)
        with self._step("gold.minutes"):
            old = change.read(self.spark, "gold.minutes", dates)
            counted = gold.all_tallies(old, self._read(tallies))
            minutes = change.replace("gold.minutes", gold.gold_minutes(counted, self._read(durations)), dates)
        with self._step("gold.hours"):
            change.replace("gold.hours", gold.gold_hours(self._read(minutes), self._read(durations)), dates)
        with self._step("gold.concurrency"):
            self._concurrency(minutes, queues)
        with self._step("gold.backlog"):
            self._backlog(tallies)
        with self._step("gold.workers"):
            before = change.read(self.spark, "gold.workers", dates)
            change.replace("gold.workers", gold.summed_workers(before, gold.attempt_workers(attempts)), dates)
        with self._step("gold.errors"):
            before = change.read(self.spark, "gold.errors")
            change.replace("gold.errors", gold.summed_errors(before, gold.attempt_errors(attempts)))
        return refined

    def _lifecycles(self, attempts: DataFrame) -> Written:
        touched: list[date] = [
            row[0] for row in attempts.select(F.to_date("created_at")).distinct().collect()
        ]
        before = self.change.read(self.spark, "silver.lifecycles", touched)
        new = silver.single_attempts(attempts, run=self.number)
        merged = silver.merged_lifecycles(before.unionByName(new))
        return self.change.replace("silver.lifecycles", merged, touched)

    def _concurrency(self, minutes: Written, queues: DataFrame | None) -> None:
        """The limits of this source were just seen; the rows of other sources keep those that they were made with."""
        seen = self.spark.createDataFrame([], QUEUE_COLUMNS) if queues is None else queues
        ours = self._read(minutes).where(F.col("source") == self.name)
        others = self.change.read(self.spark, "gold.concurrency", minutes.dates).where(
            F.col("source") != self.name
        )
        found = gold.gold_concurrency(ours, seen.withColumn("source", F.lit(self.name)))
        self.change.replace("gold.concurrency", found.unionByName(others), minutes.dates)

    def _backlog(self, tallies: Written) -> None:
        new = gold.daily_changes(self._read(tallies))
        # A row per queue and date that this run touched: little, whatever the number of jobs.
        changes = [(row.source, row.queue, row.date, row.change) for row in new.collect()]
        known = [date.fromisoformat(day) for day in self.change.manifest.tables["gold.minutes"]]
        affected = gold.affected_dates(changes, known)
        before = self.change.read(self.spark, "state.backlog_days")
        added = self.spark.createDataFrame(changes, "source string, queue string, date date, change long")
        summed = gold.summed_days(before, added.select(*before.columns))
        days = self.change.replace("state.backlog_days", summed)
        minutes = self.change.read(self.spark, "gold.minutes", affected)
        self.change.replace("gold.backlog", gold.gold_backlog(minutes, self._read(days)), affected)

    def _objectives(self, refined: Written | None, given: Sequence[Objective] | None) -> None:
        """New rows add to what is there; objectives that changed are computed anew, over all of silver."""
        manifest = self.change.manifest
        known = msgspec.json.decode(manifest.objectives or "[]", type=list[Objective])
        wanted = known if given is None else list(given)
        if wanted == known and (refined is None or not wanted):
            return
        with self._step("gold.objectives"):
            if not wanted:
                manifest.tables.pop("gold.objectives", None)
            elif wanted == known and refined is not None:
                before = self.change.read(self.spark, "gold.objectives", refined.dates)
                new = attempt_objectives(self._read(refined), wanted)
                self.change.replace("gold.objectives", summed_objectives(before, new), refined.dates)
            else:
                attempts = self.change.read(self.spark, "silver.attempts")
                self.change.replace(
                    "gold.objectives", summed_objectives(attempt_objectives(attempts, wanted))
                )
            manifest.objectives = msgspec.json.encode(wanted).decode()

    def _read(self, written: Written) -> DataFrame:
        return self.change.lake.read_paths(self.spark, written.table, written.paths)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, STEPS.index(name), len(STEPS))
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
