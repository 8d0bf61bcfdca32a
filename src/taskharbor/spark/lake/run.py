"""One run of the pipeline: what is new in a log goes into bronze, and from there into silver and gold.

The commit of bronze is the run. Every other table is computed from the rows of that run and from what the table held before, and
committed for itself. So the same code finishes a run whose process died, and two processes that run at once do no harm.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.bulk.tables import ATTEMPTS, INSTANT, QUEUES, Part, Selection
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import InvalidRequest
from taskharbor.lake.delta import Lake, LakeChanged, LakeUnreadable, RunRecord, Table
from taskharbor.lake.files import FACTS, File, read_files, write_files, write_table
from taskharbor.lake.storage import LakePlace
from taskharbor.lake.tables import BRONZE, TABLES
from taskharbor.schedules import QUEUE
from taskharbor.schedules.tick_ids import Made
from taskharbor.spark.lake import gold, quality, silver
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS, FACT_COLUMNS, read, write
from taskharbor.spark.lake.objectives import Objective, attempt_objectives, checked, summed_objectives
from taskharbor.spark.lake.reprocess import Again, Rewritten
from taskharbor.spark.session import FEW_ROWS, require_shared_store

STEPS = (BRONZE, *(name for name in TABLES if name != BRONZE), "done")
# Called as each step begins: its name, its number from 0, and how many there are. Steps overlap.
Progress: TypeAlias = Callable[[str, int, int], None]
# Steps at once: while Spark plans one, the cores work on others.
_SIDE_BY_SIDE = 2
_TRIES = 5
# Tables that may change in a run without rows.
_ALWAYS = ("bronze.queues", "gold.objectives", "gold.ticks")


class RunSummary(msgspec.Struct, kw_only=True):
    """The work of one run. `tables` has the rows written by table, `quarantined` the rows that did not pass a check by reason,
    `steps` the seconds by step; `startup_seconds` is the time that starting Spark took, apart from `seconds`. `run` is the
    number of the lake's last run, also if nothing was new."""

    source: str
    run: int
    rows_read: int
    tables: dict[str, int]
    quarantined: dict[str, int] = {}
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

    Objectives, once given, hold for later runs until others are given. Raises LakeChanged if another run was first.
    """
    known = name or (source_name(source) if isinstance(source, str) else "frame")
    steps = _Steps(spark, lake, progress)
    last = lake.record()
    # A run that ended between two tables.
    steps.derive(last)
    news = steps.news(source, known, last.cursors.get(known), queues)
    new = steps.take_in(news, known, last, None if objectives is None else checked(objectives))
    if new is not None:
        steps.derive(new)
    return steps.summary(known, new or last, 0 if new is None else new.rows)


def reprocess(
    spark: SparkSession, lake: Lake, first: date, last: date, *, progress: Progress | None = None
) -> RunSummary:
    """Compute these dates of silver and gold again from bronze. Raises LakeChanged if another run was first, and InvalidRequest
    if no row ended on these dates and nothing is counted for them."""
    if first > last:
        raise InvalidRequest(f"{first}..{last} ends before it begins: give the earlier date first")
    steps, before = _Steps(spark, lake, progress), lake.record()
    steps.derive(before)
    dates = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    if not any(one.files(dates) for name, one in lake.tables().items() if name in (BRONZE, "gold.minutes")):
        raise InvalidRequest(f"the lake {lake} has no rows of {first}..{last}: nothing was computed")
    facts = {"run": before.run + 1, "source": "", "at": datetime.now(UTC).isoformat(), "rows": 0}
    record = msgspec.structs.replace(before, **facts, again=True, is_unique=False, dates=dates, created=[])
    steps.begin(record)
    steps.derive(record)
    return steps.summary(f"{first}..{last} again", record, 0)


class _Steps:
    def __init__(self, spark: SparkSession, lake: Lake, progress: Progress | None) -> None:
        zone = spark.conf.get("spark.sql.session.timeZone")
        if zone not in ("UTC", "Etc/UTC"):
            raise InvalidRequest(
                f"the lake's dates are those of UTC, and this session's time zone is {zone}: start it with "
                "spark.sql.session.timeZone=UTC, or by taskharbor.spark.session.local_session"
            )
        self.spark, self.lake, self.began = spark, lake, time.monotonic()
        self.quarantined: Counter[str] = Counter()
        self.written: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._lock = threading.Lock()

    def summary(self, source: str, last: RunRecord, rows: int) -> RunSummary:
        if self._progress is not None:
            self._progress("done", len(STEPS) - 1, len(STEPS))
        return RunSummary(
            source=source,
            run=last.run,
            rows_read=rows,
            tables=self.written,
            quarantined=dict(self.quarantined),
            seconds=time.monotonic() - self.began,
            steps=self.seconds,
        )

    def commit(self, name: str, run: int, compute: Callable[[Table], _Change]) -> None:
        """Compute a table and commit it for this run, unless it has that run already."""
        began = time.monotonic()
        for _ in range(_TRIES):
            table = self.lake.table(name)
            if table.run >= run:
                return
            if table.run < run - 1 and name != "gold.ticks":
                raise LakeUnreadable(
                    f"{name} of {self.lake} has run {table.run}, and not run {run - 1}: its newest commits are missing. Restore "
                    "them, or make a new lake"
                )
            if self._progress is not None:
                with self._lock:
                    self._progress(name, STEPS.index(name), len(STEPS))
            change = compute(table)
            try:
                table.commit(run, change.added, change.removed, change.record)
            except LakeChanged:
                # By the same run of another process, or by a compaction.
                continue
            if name == "quarantine.attempts":
                self.quarantined += quality.reasons(table, change.added)
            self.written[name] = sum(one.rows for one in change.added)
            self.seconds[name] = time.monotonic() - began
            return
        raise LakeChanged(f"{name} of {self.lake} is changed by others all the time: run it again")

    # -- from a source into bronze ----------------------------------------------------------------------------

    def news(self, source: str | DataFrame, name: str, after: str | None, queues: DataFrame | None) -> News:
        if isinstance(source, str):
            return news_of_store(self.spark, source, after)
        # A DataFrame stands for a log in the order of `seq`.
        rows = source.select(*ATTEMPT_COLUMNS.names)
        seen = None if queues is None else [row.asDict() for row in queues.select(*QUEUES.names).collect()]
        return News(rows if after is None else rows.where(F.col("seq") > int(after)), seen, None)

    def take_in(
        self, news: News, source: str, last: RunRecord, objectives: list[Objective] | None
    ) -> RunRecord | None:
        """Write the rows to bronze, and commit them as the next run. None if nothing is new."""
        run, at = last.run + 1, datetime.now(UTC)
        wanted = last.objectives if objectives is None else msgspec.json.encode(objectives).decode()
        found: list[File] = []
        seen: list[_Seen] = []
        place, began = self.lake.place, time.monotonic()
        if self._progress is not None:
            self._progress(BRONZE, 0, len(STEPS))
        if news.attempts is not None:
            task = partial(_write_bronze, place=place, source=source, run=run, at=at)
            rows = (
                news.attempts(task)
                if callable(news.attempts)
                else news.attempts.mapInArrow(task, FACT_COLUMNS)
            )
            for row in rows.collect():
                if row.path:
                    found.append(File(**row.asDict()))
                else:
                    seen.append(msgspec.json.decode(row.stats, type=_Seen))
        count, queues = sum(one.rows for one in found), last.queues | {source: _plain(news.queues or [])}
        is_known = [_settings(known.get(source, [])) for known in (queues, last.queues)]
        if last.run and not count and is_known[0] == is_known[1] and wanted == last.objectives:
            return None
        cursor = news.until or (str(max(one.high for one in seen if one.high is not None)) if count else None)
        record = RunRecord(
            run=run,
            source=source,
            at=at.isoformat(),
            rows=count,
            is_unique=callable(news.attempts) or _are_apart(seen),
            has_ticks=any(one.has_ticks for one in seen),
            dates=sorted({day for one in seen for day in one.dates}),
            created=sorted({day for one in seen for day in one.created}),
            cursors=last.cursors | ({} if cursor is None else {source: cursor}),
            totals=last.totals | {source: last.totals.get(source, 0) + count},
            queues=queues,
            objectives=wanted,
            objectives_since=last.objectives_since if wanted == last.objectives else run,
        )
        self.begin(record, found)
        self.written[BRONZE], self.seconds[BRONZE] = count, time.monotonic() - began
        return record

    def begin(self, record: RunRecord, found: Sequence[File] = ()) -> None:
        """Commit bronze as the next run."""
        for _ in range(_TRIES):
            table = self.lake.table(BRONZE)
            if table.run != record.run - 1:
                break
            try:
                return table.commit(record.run, found, (), record)
            except LakeChanged:
                continue
        raise LakeChanged(
            f"another run on {self.lake} took effect meanwhile, and nothing of this one: run it again"
        )

    # -- from bronze into everything else -----------------------------------------------------------------------

    def derive(self, record: RunRecord) -> None:
        """Compute all tables that do not have this run yet."""
        if not record.run:
            return
        tables = _Derived(self.spark, self.lake, record)

        def chain(*names: str) -> None:
            for name in names:
                is_touched = record.rows or record.again or name in _ALWAYS
                compute = tables.computing[name] if is_touched else lambda _: _Change()
                self.commit(name, record.run, compute)

        first: list[tuple[str, ...]] = [
            ("silver.lifecycles", "gold.minutes"),
            ("silver.attempts", "quarantine.attempts", "bronze.queues"),
        ]
        first += [("gold.errors",), ("gold.workers",), ("gold.objectives",), ("gold.ticks",)]
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            for group in (first, [("gold.queue_minutes", "state.backlog_days"), ("gold.hours",)]):
                for done in [pool.submit(chain, *names) for names in group]:
                    done.result()


class _Change(NamedTuple):
    """Files that are added to a table, and those that they replace. `record`: that of the commit, if it is more than the run."""

    added: Sequence[File] = ()
    removed: Sequence[File] = ()
    record: object = None


def _rewritten(compute: Callable[[Table], Rewritten], table: Table) -> _Change:
    rows, replaced = compute(table)
    return _Change(() if rows is None else write(rows, table), replaced)


class _Derived:
    """The tables but bronze, for one run: each a function from the table as it was to its change."""

    def __init__(self, spark: SparkSession, lake: Lake, record: RunRecord) -> None:
        self.spark, self.lake, self.record = spark, lake, record
        self.run, self.dates = record.run, set(record.dates)
        self.computing: dict[str, Callable[[Table], _Change]] = {
            "bronze.queues": self._queues,
            "silver.attempts": self._attempts,
            "quarantine.attempts": self._quarantine,
            "silver.lifecycles": self._lifecycles,
            "gold.minutes": self._minutes,
            "gold.hours": self._hours,
            "gold.queue_minutes": self._queue_minutes,
            "gold.workers": self._workers,
            "gold.errors": self._errors,
            "gold.objectives": self._objectives,
            "gold.ticks": self._ticks,
            "state.backlog_days": self._backlog_days,
        }
        if record.again:
            for name, compute in Again(spark, lake, record).computing.items():
                self.computing[name] = partial(_rewritten, compute)

    @cached_property
    def logged(self) -> DataFrame:
        """The rows of the run in bronze."""
        bronze = self.lake.table(BRONZE)
        rows = read(self.spark, bronze, bronze.files_with("run", [self.run]))
        return rows.where(F.col("run") == self.run)

    @cached_property
    def attempts(self) -> DataFrame:
        """The silver rows of the run, from bronze."""
        return silver.silver_attempts(self.logged, is_unique=self.record.is_unique)

    def _queues(self, table: Table) -> _Change:
        seen = self.record.queues.get(self.record.source, [])
        if not seen:
            return _Change()
        at = datetime.fromisoformat(self.record.at)
        facts = {"source": self.record.source, "run": self.run, "observed_at": at, "date": at.date()}
        rows = pa.Table.from_pylist([row | facts for row in seen], schema=TABLES[table.name])
        return _Change(write_table(rows, table.place, table.name))

    def _attempts(self, table: Table) -> _Change:
        added = write(self.attempts, table)
        left_out = self.record.rows - sum(one.rows for one in added)
        return _Change(added, record={"run": self.run, "left_out": left_out})

    def _quarantine(self, table: Table) -> _Change:
        # Silver is there already: only where it has fewer rows than the run, the others are looked for.
        if not self.lake.table("silver.attempts").record["left_out"]:
            return _Change()
        return _Change(write(silver.quarantined(self.logged, is_unique=self.record.is_unique), table))

    def _lifecycles(self, table: Table) -> _Change:
        """Rows of jobs that may go on are replaced. Others stay, unless the log goes on with them against the rules."""
        parts = silver.single_attempts(self.attempts, run=F.lit(self.run))
        rewritten = table.files([None])
        if ended := [one for one in table.files_with("created_at", self.record.created) if one.date]:
            rows = read(self.spark, table, ended, with_file=True).select(*silver.LIFE, "file")
            again = rows.join(self.attempts.select(*silver.LIFE), list(silver.LIFE), "left_semi")
            names = {row.file for row in again.select("file").distinct().collect()}
            rewritten += [one for one in ended if Path(one.path).name in names]
        if rewritten:
            parts = parts.unionByName(read(self.spark, table, rewritten))
        return _Change(write(silver.merged_lifecycles(parts), table), rewritten)

    def _minutes(self, table: Table) -> _Change:
        before, lifecycles = table.files(self.dates), self.lake.table("silver.lifecycles")
        heard_of = read(self.spark, lifecycles, lifecycles.files_with("first_seen_run", [self.run]))
        new = gold.arrival_cells(heard_of.where(F.col("first_seen_run") == self.run))
        kept = read(self.spark, table, before) if before else None
        return _Change(
            write(gold.gold_minutes([gold.attempt_cells(self.attempts), new], kept), table), before
        )

    def _hours(self, table: Table) -> _Change:
        return _Change(
            write(gold.gold_hours(self._of("gold.minutes", self.dates)), table), table.files(self.dates)
        )

    def _queue_minutes(self, table: Table) -> _Change:
        before, after = self._backlog()
        affected = gold.affected_dates(before, after, self.dates)
        carried = [(*key, value) for key, value in gold.carried_backlog(after).items() if key[2] in affected]
        limits = [
            (source, one["queue"], one["max_inflight"])
            for source, seen in self.record.queues.items()
            for one in seen
        ]
        replaced = table.files(affected)
        found = gold.gold_queue_minutes(
            self._of("gold.minutes", affected),
            self.spark.createDataFrame(carried, "source string, queue string, date date, carried long"),
            self.spark.createDataFrame(limits, "source string, queue string, max_inflight int"),
            read(self.spark, table, replaced),
        )
        return _Change(write(found, table), replaced)

    def _backlog_days(self, table: Table) -> _Change:
        _, after = self._backlog()
        names = TABLES[table.name].names
        rows = [(*queue, change, day) for queue, days in after.items() for day, change in days.items()]
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        return _Change(
            write_table(pa.Table.from_arrays(columns, names), table.place, table.name), table.files()
        )

    def _backlog(self) -> tuple[gold.Days, gold.Days]:
        """By how much each date changed each backlog: as it was kept, and with what the minutes of this run's dates say."""
        days, minutes = self.lake.table("state.backlog_days"), self.lake.table("gold.minutes")
        before: gold.Days = defaultdict(dict)
        for batch in read_files(days.files(), days.place, days.name):
            for row in batch.to_pylist():
                before[row["source"], row["queue"]][row["date"]] = row["change"]
        after: gold.Days = defaultdict(dict)
        for queue, changes in before.items():
            after[queue] = {day: change for day, change in changes.items() if day not in self.dates}
        columns = ("source", "queue", "arrivals", "requeues", "finished")
        for batch in read_files(minutes.files(self.dates), minutes.place, minutes.name, columns):
            rows = pa.Table.from_batches([batch]).group_by(["source", "queue", "date"])
            for row in rows.aggregate([(name, "sum") for name in columns[2:]]).to_pylist():
                of_queue = after[row["source"], row["queue"]]
                change = row["arrivals_sum"] + row["requeues_sum"] - row["finished_sum"]
                of_queue[row["date"]] = of_queue.get(row["date"], 0) + change
        return before, after

    def _workers(self, table: Table) -> _Change:
        before = table.files(self.dates)
        rows = [gold.attempt_workers(self.attempts), *self._kept(table, before)]
        return _Change(write(gold.summed_workers(*rows), table), before)

    def _errors(self, table: Table) -> _Change:
        before = table.files()
        rows = [gold.attempt_errors(self.attempts), *self._kept(table, before)]
        return _Change(write(gold.summed_errors(*rows), table), before)

    def _objectives(self, table: Table) -> _Change:
        """New rows add to what is there. Objectives that changed are computed anew, from all rows up to this run."""
        wanted = msgspec.json.decode(self.record.objectives, type=list[Objective])
        is_new = self.record.objectives_since == self.run
        before = table.files(None if is_new else self.dates)
        if not wanted or not (is_new or self.record.rows):
            return _Change((), before if is_new else ())
        attempts = self.attempts
        if is_new and self.run > 1:
            bronze = read(self.spark, self.lake.table(BRONZE))
            attempts = silver.silver_attempts(bronze.where(F.col("run") <= self.run))
        rows = [attempt_objectives(attempts, wanted), *self._kept(table, [] if is_new else before)]
        return _Change(write(summed_objectives(*rows), table), before)

    def _ticks(self, table: Table) -> _Change:
        """Earlier releases do not make this table: what they left out is computed from all rows."""
        if table.run < self.run - 1:
            return _rewritten(Again(self.spark, self.lake, self.record).ticks, table)
        if not self.record.has_ticks:
            return _Change()
        before = table.files(self.dates)
        rows = gold.summed_ticks(gold.attempt_ticks(self.attempts), *self._kept(table, before))
        return _Change(write(rows, table), before)

    def _of(self, name: str, dates: Iterable[date]) -> DataFrame:
        table = self.lake.table(name)
        return read(self.spark, table, table.files(set(dates)))

    def _kept(self, table: Table, files: list[File]) -> list[DataFrame]:
        return [read(self.spark, table, files)] if files else []


# -- tasks that write bronze -----------------------------------------------------------------------------------------


class _Seen(msgspec.Struct):
    """Facts about the rows of a task, beside its files."""

    dates: list[date] = []
    created: list[date] = []
    low: int | None = None
    high: int | None = None
    # Each row has a higher number than the one before.
    is_rising: bool = True
    has_ticks: bool = False


# The end of what Python and SQL have dates for.
_LATEST = pa.scalar(datetime.max.replace(tzinfo=UTC), INSTANT)


def _write_bronze(
    batches: Iterable[pa.RecordBatch], *, place: LakePlace, source: str, run: int, at: datetime
) -> Iterator[pa.RecordBatch]:
    """Write rows of a log with their origin; yield the facts of the files, and what was seen as a row without a path."""
    created: set[date] = set()
    touched: set[tuple[date | None, date]] = set()
    seen = _Seen()

    def with_origin() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            for name in (field.name for field in ATTEMPTS if field.type == INSTANT):
                if (far := pc.index(pc.greater(batch[name], _LATEST), True).as_py()) >= 0:
                    which = f"row {batch['seq'][far]} of {source}, of queue {batch['queue'][far]}"
                    raise InvalidRequest(f"{which}, has a {name} after the year 9999")
            days = {
                name: pc.cast(batch[name], pa.date32()) for name in ("created_at", "reserved_at", "ended_at")
            }
            created.update(pc.unique(days["created_at"].drop_null()).to_pylist())
            spans = pa.table([days["reserved_at"], days["ended_at"]], ["from", "to"]).group_by(["from", "to"])
            touched.update((row["from"], row["to"]) for row in spans.aggregate([]).to_pylist() if row["to"])
            _note_order(seen, batch["seq"])
            seen.has_ticks = seen.has_ticks or _has_ticks(batch)
            rows = pa.Table.from_batches([batch]).append_column("date", days["ended_at"])
            for name, value in (("source", source), ("run", run), ("ingested_at", at)):
                rows = rows.append_column(name, pa.array([value] * batch.num_rows))
            yield from rows.to_batches()

    yield from write_files(with_origin(), place, BRONZE)
    seen.created = sorted(created)
    seen.dates = sorted({*created, *(day for span in touched for day in _between(*span))})
    yield pa.RecordBatch.from_pylist(
        [{"path": "", "stats": msgspec.json.encode(seen).decode()}], schema=FACTS
    )


def _has_ticks(batch: pa.RecordBatch) -> bool:
    """True if a row may be of a schedule or of a job of one. This costs 30 ms for a million rows."""
    ids = batch["job_id"]
    found = any(pc.any(pc.starts_with(ids, f"{made}:")).as_py() for made in get_args(Made))
    return found or pc.index(batch["queue"], QUEUE).as_py() >= 0


def _note_order(seen: _Seen, numbers: pa.Array) -> None:
    seen.is_rising &= not numbers.null_count
    if not len(numbers := numbers.drop_null()):
        return
    bounds = pc.min_max(numbers).as_py()
    is_rising = pc.all(pc.greater(numbers[1:], numbers[:-1])).as_py() is not False
    seen.is_rising &= is_rising and (seen.high is None or bounds["min"] > seen.high)
    seen.low = bounds["min"] if seen.low is None else min(seen.low, bounds["min"])
    seen.high = bounds["max"] if seen.high is None else max(seen.high, bounds["max"])


def _between(first: date | None, last: date) -> Iterator[date]:
    """A lease is counted on every date on which it was valid. Its end in the log is never earlier than that."""
    start = min(first or last, last)
    yield from (start + timedelta(days=n) for n in range((max(first or last, last) - start).days + 1))


def _are_apart(seen: Sequence[_Seen]) -> bool:
    """True if no two rows can have one number: those of a task rise, and those of two tasks are in other ranges."""
    ranges = sorted((one.low, one.high) for one in seen if one.low is not None and one.high is not None)
    return all(one.is_rising for one in seen) and all(low[1] < high[0] for low, high in pairwise(ranges))


def _plain(queues: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of queues for JSON: instants are whole numbers."""
    rows = pa.Table.from_pylist(list(queues), schema=QUEUES)
    place, instants = QUEUES.get_field_index("head_run_at"), rows["head_run_at"].cast(pa.int64())
    found: list[dict[str, Any]] = rows.set_column(place, "head_run_at", instants).to_pylist()
    return found


def _settings(queues: Sequence[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """The settings of an operator. Counts change all the time."""
    return {
        tuple(row[name] for name in ("queue", "paused", "max_inflight", "failure_queue")) for row in queues
    }


# -- sources of rows -------------------------------------------------------------------------------------------------


class News(NamedTuple):
    """Rows of a source that the lake does not have yet.

    `attempts`: a function runs a task over each share of a store's rows; None if nothing is new. `until`: the cursor after
    these rows; None: it is the highest `seq` among them.
    """

    attempts: DataFrame | Callable[[Callable[..., Iterator[pa.RecordBatch]]], DataFrame] | None
    queues: list[dict[str, Any]] | None
    until: str | None


# Options that identify the store.
_NAMING = ("schema", "prefix", "db", "endpoint", "base_url", "account_name")


def source_name(url: str) -> str:
    """Return a name of a store without its secrets, the same from every folder."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidRequest(
            f"{shown_url(url)!r} is not the URL of a store: use for example sqlite:///jobs.db"
        )
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
    return News(partial(_by_tasks, spark, url, parts) if parts else None, seen, until)


def has_few_news(lake: Lake, url: str) -> bool:
    """Return True if the lake lacks at most `FEW_ROWS` rows of the store. It needs no session."""
    last = lake.record().cursors.get(source_name(url))
    with open_store(url) as store:
        until = store.latest()
        return store.limited(store.start() if last is None else last, until, rows=FEW_ROWS) == until


def _by_tasks(
    spark: SparkSession, url: str, parts: Sequence[Part], task: Callable[..., Iterator[pa.RecordBatch]]
) -> DataFrame:
    """One task per part: what travels is the part, and the rows go straight from the store to the task and into files."""

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open_store(url) as store:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    yield from store.read(parts[index])

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(
        lambda shares: task(rows(shares)), FACT_COLUMNS
    )
