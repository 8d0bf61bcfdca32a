"""One run of the pipeline: what is new in a log goes through bronze and silver into gold, and takes effect as one.

Every step reads what the steps before it wrote, and of the lake only the dates that the new rows touch. Nothing is cleaned up
on the way out: whatever ends a run before its manifest is there, the lake is as if it had never begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.bulk.tables import Part, Selection
from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake import gold, silver
from taskharbor.spark.lake.layout import Change, Dates, Lake, Progress, Written
from taskharbor.spark.lake.objectives import Objective, attempt_objectives, checked, summed_objectives
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS, QUEUE_COLUMNS
from taskharbor.spark.session import require_shared_store

STEPS = (
    *("bronze.queues", "bronze.attempts", "silver.attempts", "silver.lifecycles", "tallies", "durations"),
    *("gold.minutes", "gold.hours", "gold.concurrency", "gold.backlog", "gold.workers", "gold.errors"),
    *("gold.objectives", "commit", "done"),
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
    zone = spark.conf.get("spark.sql.session.timeZone")
    if zone not in ("UTC", "Etc/UTC"):
        raise InvalidRequest(
            f"the lake's dates are those of UTC, and this session's time zone is {zone}: start it with "
            "spark.sql.session.timeZone=UTC, or by taskharbor.spark.session.local_session"
        )
    known = source_name(source) if isinstance(source, str) else "frame"
    run = _Run(spark, lake, name or known, progress)
    return run.take(source, queues, None if objectives is None else checked(objectives))


class _Run:
    def __init__(self, spark: SparkSession, lake: Lake, name: str, progress: Progress | None) -> None:
        self.spark = spark
        self.change: Change = lake.begin("run")
        self.number = self.change.manifest.run
        self.name = name
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def take(
        self, source: str | DataFrame, queues: DataFrame | None, objectives: list[Objective] | None
    ) -> RunSummary:
        began = time.monotonic()
        manifest = self.change.manifest
        after = manifest.cursors.get(self.name)
        if isinstance(source, str):
            news = news_of_store(self.spark, source, after)
        else:
            # A DataFrame stands for a log in the order of `seq`.
            rows = source.select(*ATTEMPT_COLUMNS.names)
            news = News(rows if after is None else rows.where(F.col("seq") > int(after)), queues, None)
        origin: dict[str, Any] = {"source": self.name, "run": self.number}
        bronze: Written | None = None
        with self._step("bronze.queues"):
            if news.queues is not None:
                seen = silver.bronze_queues(news.queues, **origin, observed_at=datetime.now(UTC))
                self.change.append("bronze.queues", seen)
        with self._step("bronze.attempts"):
            if news.attempts is not None:
                rows = silver.bronze_attempts(news.attempts, **origin, ingested_at=datetime.now(UTC))
                bronze = self.change.append("bronze.attempts", rows)
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

    def _refine(self, bronze: Written, queues: DataFrame | None) -> Written:
        """From new bronze rows to all of silver and gold but the objectives; the new silver attempts."""
        change = self.change
        with self._step("silver.attempts"):
            refined = change.append("silver.attempts", silver.silver_attempts(self._read(bronze)))
        attempts = self._read(refined)
        with self._step("silver.lifecycles"):
            touched: list[date] = [
                row[0] for row in attempts.select(F.to_date("created_at")).distinct().collect()
            ]
            new = silver.single_attempts(attempts, run=self.number)
            merged = silver.merged_lifecycles(self._before("silver.lifecycles", touched).unionByName(new))
            lifecycles = change.replace("silver.lifecycles", merged, touched)
        with self._step("tallies"):
            arrived = self._read(lifecycles).where(F.col("first_seen_run") == self.number)
            summed = gold.summed_tallies(gold.attempt_tallies(attempts), gold.arrival_tallies(arrived))
            tallies = change.scratch("state.tallies", summed)
        dates = tallies.dates
        with self._step("durations"):
            before = self._before("state.durations", dates)
            added = gold.summed_durations(before, gold.attempt_durations(attempts))
            durations = change.replace("state.durations", added, dates)
        with self._step("gold.minutes"):
            counted = gold.all_tallies(self._before("gold.minutes", dates), self._read(tallies))
            minutes = change.replace("gold.minutes", gold.gold_minutes(counted, self._read(durations)), dates)
        with self._step("gold.hours"):
            change.replace("gold.hours", gold.gold_hours(self._read(minutes), self._read(durations)), dates)
        with self._step("gold.concurrency"):
            self._concurrency(minutes, queues)
        with self._step("gold.backlog"):
            self._backlog(tallies)
        with self._step("gold.workers"):
            before = self._before("gold.workers", dates)
            change.replace("gold.workers", gold.summed_workers(before, gold.attempt_workers(attempts)), dates)
        with self._step("gold.errors"):
            before = self._before("gold.errors")
            change.replace("gold.errors", gold.summed_errors(before, gold.attempt_errors(attempts)))
        return refined

    def _concurrency(self, minutes: Written, queues: DataFrame | None) -> None:
        """The limits of this source were just seen; the rows of other sources keep those that they were made with."""
        seen = self.spark.createDataFrame([], QUEUE_COLUMNS) if queues is None else queues
        ours = self._read(minutes).where(F.col("source") == self.name)
        others = self._before("gold.concurrency", minutes.dates).where(F.col("source") != self.name)
        found = gold.gold_concurrency(ours, seen.withColumn("source", F.lit(self.name)))
        self.change.replace("gold.concurrency", found.unionByName(others), minutes.dates)

    def _backlog(self, tallies: Written) -> None:
        new = gold.daily_changes(self._read(tallies))
        # A row per queue and date that this run touched: little, whatever the number of jobs.
        changes = [(row.source, row.queue, row.date, row.change) for row in new.collect()]
        known = [date.fromisoformat(day) for day in self.change.manifest.tables["gold.minutes"]]
        affected = gold.affected_dates(changes, known)
        before = self._before("state.backlog_days")
        added = self.spark.createDataFrame(changes, "source string, queue string, date date, change long")
        summed = gold.sums([before, added], ("source", "queue", "date"), "change")
        days = self.change.replace("state.backlog_days", summed)
        minutes = self._before("gold.minutes", affected)
        self.change.replace("gold.backlog", gold.gold_backlog(minutes, self._read(days)), affected)

    def _objectives(self, refined: Written | None, given: list[Objective] | None) -> None:
        """New rows add to what is there; objectives that changed are computed anew, over all of silver."""
        manifest = self.change.manifest
        known = msgspec.json.decode(manifest.objectives or "[]", type=list[Objective])
        wanted = known if given is None else given
        if wanted == known and (refined is None or not wanted):
            return
        with self._step("gold.objectives"):
            if not wanted:
                manifest.tables.pop("gold.objectives", None)
            elif wanted == known and refined is not None:
                before = self._before("gold.objectives", refined.dates)
                new = attempt_objectives(self._read(refined), wanted)
                self.change.replace("gold.objectives", summed_objectives(before, new), refined.dates)
            else:
                judged = attempt_objectives(self._before("silver.attempts"), wanted)
                self.change.replace("gold.objectives", summed_objectives(judged))
            manifest.objectives = msgspec.json.encode(wanted).decode()

    def _before(self, table: str, dates: Dates = None) -> DataFrame:
        """The table as it is so far, in this run."""
        return self.change.read(self.spark, table, dates)

    def _read(self, written: Written) -> DataFrame:
        return self.change.lake.read_paths(self.spark, written.table, written.paths)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, STEPS.index(name), len(STEPS))
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


# -- sources of rows -------------------------------------------------------------------------------------------------


class News(NamedTuple):
    """Rows of a source that the lake does not have yet."""

    attempts: DataFrame | None
    """None if nothing is new."""
    queues: DataFrame | None
    until: str | None
    """The cursor after these rows; None: it is the highest `seq` among them."""


_NAMING = ("schema", "prefix", "db", "endpoint", "base_url", "account_name")
"""Options that identify the store."""


def source_name(url: str) -> str:
    """Return a name of a store without its secrets, the same from every folder."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidRequest(f"{url!r} is not the URL of a store: use for example sqlite:///jobs.db")
    if scheme == "sqlite":
        return f"sqlite:///{Path(unquote(rest.removeprefix('/').partition('?')[0])).absolute()}"
    parts = urlsplit(url)
    # Only what says which store it is: the other options may hold a password too.
    kept = [(key, value.rpartition("@")[2]) for key, value in parse_qsl(parts.query) if key in _NAMING]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), urlencode(kept), ""))


def news_of_store(spark: SparkSession, url: str, after: str | None) -> News:
    """Return the rows after the cursor, up to the place before which no row can appear any more."""
    require_shared_store(url)
    parallelism = max(2, spark.sparkContext.defaultParallelism)
    with open_store(url) as store:
        begun = store.start() if after is None else after
        until = store.latest()
        parts = [] if until == begun else store.between(begun, until, parallelism=parallelism)
        seen = [
            row
            for part in store.parts("queues", Selection(), parallelism=1)
            for batch in store.read(part)
            for row in batch.to_pylist()
        ]
    attempts = _read_by_tasks(spark, url, parts) if parts else None
    return News(attempts, spark.createDataFrame(seen, QUEUE_COLUMNS), until)


def _read_by_tasks(spark: SparkSession, url: str, parts: Sequence[Part]) -> DataFrame:
    """One task per part: what travels is the part, and the rows go straight from the store to the task."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open_store(url) as store:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    yield from store.read(parts[index])

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read, ATTEMPT_COLUMNS)
