"""The lake from end to end: changes that are seen as one, runs that are killed, the command line, and the report's numbers."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.clusters import program
from spark.histories import OBJECTIVES, ROWS, START, Row, history, live, row
from spark.stores import compiling
from taskharbor.cli.root import root
from taskharbor.demo.analysis import analyse
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import TERMINAL_STATES, to_micros
from taskharbor.spark.audit import audit_lake
from taskharbor.spark.lake import Lake, compact, gold, run_pipeline, vacuum
from taskharbor.spark.lake.manifests import LakeChanged, LakeUnreadable, Manifest, commit, numbers, path_of
from taskharbor.spark.lake.run import STEPS, RunSummary
from taskharbor.spark.lake.silver import bronze_attempts, silver_attempts
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS, QUEUE_COLUMNS, TABLES
from taskharbor.spark.report import collect, queries, render
from taskharbor.spark.report.data import Verdict, cut
from taskharbor.spark.report.formatting import MINUTE

# -- changes ------------------------------------------------------------------------------------------------------

TABLE = "state.backlog_days"
OTHER = "gold.backlog"
FIRST, LAST = date(2026, 3, 1), date(2026, 3, 2)
NOW = timedelta(0)


def days(spark: SparkSession, **changes: int) -> DataFrame:
    """Rows of queues on the first date, and of those whose name begins with `later` on the last."""
    rows = [("s", name, n, LAST if name.startswith("later") else FIRST) for name, n in changes.items()]
    return spark.createDataFrame(rows, "source string, queue string, change long, date date").coalesce(1)


def seen(spark: SparkSession, lake: Lake, dates: list[date] | None = None) -> dict[str, int]:
    return {one.queue: one.change for one in lake.read(spark, TABLE, dates).collect()}


def test_a_change_is_seen_as_a_whole_once_it_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    first = lake.begin("run")
    first.append(TABLE, days(spark, a=1, later=2))
    assert seen(spark, lake) == {}
    first.commit()
    assert seen(spark, lake) == {"a": 1, "later": 2}
    assert seen(spark, lake, [LAST]) == {"later": 2}
    assert lake.dates(TABLE) == [FIRST, LAST]

    # A crash: what was written is in no manifest.
    lake.begin("run").append(TABLE, days(spark, crashed=3))
    # Two at once: both start from the same state, one takes effect.
    winner, loser = lake.begin("run"), lake.begin("run")
    winner.replace(TABLE, days(spark, b=5), [FIRST])
    winner.commit()
    loser.append(TABLE, days(spark, c=6))
    with pytest.raises(LakeChanged, match="run it again"):
        loser.commit()

    # What is young may be a run that is not finished; what is not needed goes when it is old enough.
    assert vacuum(lake, keep_manifests=1).directories == 1, "the replaced date of a finished run"
    assert vacuum(lake, keep_manifests=1, unlisted_for=NOW).directories == 2, "the crashed and the losing run"
    assert numbers(lake.path) == [2]
    assert seen(spark, lake) == {"b": 5, "later": 2}
    left = sorted(str(path.relative_to(lake.path)) for path in lake.path.glob("*/*/*/date=*"))
    assert left == sorted(lake.manifest().directories())


def test_compaction_keeps_rows_and_retention_drops_dates(spark: SparkSession, tmp_path: Path) -> None:
    """A date goes once no state needs it."""
    lake = Lake(tmp_path)
    for name in ("a", "b", "later"):
        change = lake.begin("run")
        change.append(TABLE, days(spark, **{name: 1}))
        columns = ("source", "queue", "NULL::timestamp AS minute", "change AS waiting", "date")
        change.append(OTHER, days(spark, **{name: 1}).selectExpr(*columns))
        change.commit()
    with compiling(spark):
        summary = compact(spark, lake)
    assert (summary.files_before, summary.files_after, summary.tables) == (4, 2, {TABLE: 1, OTHER: 1})
    assert seen(spark, lake) == {"a": 1, "b": 1, "later": 1}
    assert lake.manifest().run == 3, "a compaction is not a run"
    assert compact(spark, lake).tables == {}

    dropped = vacuum(lake, keep_manifests=2, unlisted_for=NOW, before=LAST)
    assert (dropped.dates, dropped.directories) == (1, 4), "the state before still has the date"
    assert lake.dates(OTHER) == [LAST]
    assert lake.dates(TABLE) == [FIRST, LAST], "a backlog goes on from days that are gone"
    assert vacuum(lake, keep_manifests=1, unlisted_for=NOW).directories == 1
    assert seen(spark, lake) == {"a": 1, "b": 1, "later": 1}


def test_what_cannot_be_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with pytest.raises(InvalidRequest, match="at least 1"):
        vacuum(lake, keep_manifests=0)
    with pytest.raises(InvalidRequest, match=r"no table 'gold\.days': it has bronze\.attempts"):
        lake.read(spark, "gold.days")
    with pytest.raises(InvalidRequest, match="use one they all can reach"):
        run_pipeline(spark, lake, "memory://somewhere")
    commit(tmp_path, Manifest(number=1))
    path_of(tmp_path, 1).write_text("{")
    with pytest.raises(LakeUnreadable, match="restore it"):
        lake.manifest()


# -- runs that are killed -----------------------------------------------------------------------------------------


class Crash(BaseException):
    """Ends a run as an interrupt would: past whatever catches exceptions."""


class Runs(NamedTuple):
    """A history of which one lake has taken in all, undisturbed; of another the first run has really died."""

    seed: int
    rows: list[Row]
    cut: int
    whole: Lake
    pieces: Lake


def run(spark: SparkSession, lake: Lake, rows: Sequence[Row], crash_at: str = "") -> RunSummary:
    def progress(step: str, number: int, steps: int) -> None:
        if step == crash_at:
            raise Crash

    log = spark.createDataFrame(list(rows), ATTEMPT_COLUMNS).coalesce(1)
    empty = {field.name: None if field.nullable else 0 for field in QUEUE_COLUMNS} | {"paused": False}
    queues = spark.createDataFrame([empty | {"queue": "mail", "max_inflight": 40}], QUEUE_COLUMNS)
    wanted: dict[str, Any] = {"name": "log", "queues": queues, "objectives": OBJECTIVES}
    return run_pipeline(spark, lake, log, progress=progress, **wanted)


@pytest.fixture(scope="module")
def runs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    seed = random.SystemRandom().randrange(2**32)
    rows = history(seed)
    cut, dies = random.Random(seed).randrange(1, len(rows)), random.Random(seed).choice(STEPS[2:-2])
    print("seed", seed, "cut", cut, "killed at", dies)
    folder = tmp_path_factory.mktemp("runs")
    made = Runs(seed, rows, cut, Lake(folder / "whole"), Lake(folder / "pieces"))
    child = Path(__file__).with_name("programs.py")
    arguments = ("die_midway", str(made.pieces.path), str(seed), str(cut), dies)
    with program(sys.executable, str(child), *arguments, folder=folder) as dying:
        run(spark, made.whole, rows)
        _, errors = dying.communicate(timeout=170)
    assert dying.returncode == 9, errors[-2000:]
    return made


def contents(spark: SparkSession, lake: Lake) -> dict[str, Counter[str]]:
    """All rows of silver and gold, but for the number of the run that first saw a job."""
    return {
        table: Counter(map(str, lake.read(spark, table).drop("first_seen_run").collect()))
        for table in TABLES
        if table.startswith(("silver.", "gold."))
    }


@pytest.mark.timeout(600)
def test_runs_that_are_killed_add_up_to_one_undisturbed_run(spark: SparkSession, runs: Runs) -> None:
    """Two increments, killed at random steps: the first in a process that really dies, the second before and after its commit."""
    pieces, rows = runs.pieces, runs.rows
    assert pieces.manifest().number == 0
    assert run(spark, pieces, rows[: runs.cut]).rows_read == runs.cut
    first = pieces.manifest()
    crashes = random.Random(runs.seed + 1).choice(STEPS[2:-1])
    with pytest.raises(Crash):
        run(spark, pieces, rows, crashes)
    assert pieces.manifest() == first
    # After the commit: the run stands, and repeating it adds nothing.
    with pytest.raises(Crash):
        run(spark, pieces, rows, "done")
    assert pieces.manifest() != first
    assert run(spark, pieces, rows).rows_read == 0
    expected, found = contents(spark, runs.whole), contents(spark, pieces)
    for table in expected:
        assert found[table] == expected[table], f"{table} differs (seed {runs.seed})"
    assert expected["silver.attempts"].total() == len(rows) == ROWS
    assert expected["silver.lifecycles"].total() == len({one["job_id"] for one in rows})
    assert expected["gold.objectives"].total() > 0


# -- the report's numbers -----------------------------------------------------------------------------------------


def test_the_numbers_of_the_report_are_those_of_the_log(spark: SparkSession, runs: Runs) -> None:
    """Counted once more, in plain Python."""
    data = collect(spark, runs.whole, audit=audit_lake(spark, runs.whole))
    rows = runs.rows
    last = {one["job_id"]: one for one in rows}
    leases = [one for one in rows if one["reserved_at"] is not None]
    outcomes = Counter(one["outcome"] for one in leases)
    states = Counter(one["state"] for one in last.values())
    assert data.verdict == Verdict(leases=len(leases), jobs=len(last))
    totals = data.totals
    assert data.job_ends == {name: states[name] for name in ("done", "dead", "cancelled", "open")}
    assert data.lease_ends == {name: outcomes[name] for name in data.lease_ends}
    assert (totals.jobs, totals.executions) == (len(last), len(leases))
    for name, number in (data.lease_ends | data.job_ends).items():
        assert getattr(totals, name) == number
    by_queue = Counter(one["queue"] for one in leases)
    assert totals.busiest_executions == by_queue[totals.busiest_queue or ""] == max(by_queue.values())
    # Percentiles are within a bucket of their histograms, loads exact.
    held_for = [(one["ended_at"] - one["reserved_at"]) / timedelta(microseconds=1) for one in leases]
    assert data.totals.run_p50_us == pytest.approx(statistics.median(held_for), rel=0.05)
    busy: Counter[str] = Counter()
    for one in leases:
        end = min(one["ended_at"], one["lease_expires_at"])
        busy[one["worker"]] += (end - one["reserved_at"]) // timedelta(microseconds=1)
    assert [one.worker for one in data.workers] == sorted(busy)
    held = [sum(load or 0 for load in worker.load) * data.worker_bucket_us for worker in data.workers]
    assert held == pytest.approx([busy[worker.worker] for worker in data.workers], rel=1e-6)
    assert data.sources == ["log"]
    flow, came = data.flow, Counter(one["outcome"] for one in rows)
    assert (sum(flow.arrivals), sum(flow.completions)) == (len(last), came["done"])
    ends = (sum(flow.failures), sum(flow.retries), sum(flow.expiries))
    assert ends == (came["dead"], came["retried"], came["expired"])
    assert {one.queue for one in data.backlog} == set(by_queue)
    assert {one.waiting[-1] for one in data.backlog} == {0}
    assert (data.concurrency[0].queue, data.concurrency[0].limit) == ("mail", 40)
    broken = [one for one in rows if one["error_type"]]
    failed = Counter((one["error_message"][:3], one["queue"], one["type"]) for one in broken)
    shown = {(one.fingerprint[:3], one.queue, one.type): one.count for one in data.errors}
    assert shown.items() <= failed.items()
    assert [one.count for one in data.errors] == sorted(failed.values(), reverse=True)[: queries.ERRORS_SHOWN]
    tried = Counter(one["job_id"] for one in leases)
    assert (data.most_tried[0].executions, tried[data.most_tried[0].job_id]) == (max(tried.values()),) * 2
    due = {one["job_id"]: one["run_at"] for one in reversed(rows)}
    took = [one["ended_at"] - due[name] for name, one in last.items() if one["state"] != "cancelled"]
    assert data.slowest[0].total_us == max(took) / timedelta(microseconds=1)
    missed = {one.name: (one.total, one.bad) for one in data.objectives}
    waits = [one["reserved_at"] - one["run_at"] for one in leases if one["queue"] == "mail"]
    assert missed["soon"] == (len(waits), sum(wait > timedelta(seconds=30) for wait in waits))
    assert missed["well"] == (came["done"] + came["dead"], came["dead"])
    render(data)


def test_rows_and_gold_tell_the_same(spark: SparkSession, runs: Runs) -> None:
    """Short spans are counted from silver, long ones from gold: over the same buckets both must agree."""
    start = to_micros(runs.rows[0]["ended_at"].replace(minute=0, second=0, microsecond=0))
    buckets = cut(start, start + 8 * 60 * MINUTE, MINUTE)
    attempts, lifecycles = (runs.whole.read(spark, f"silver.{name}") for name in ("attempts", "lifecycles"))
    tallies = gold.all_tallies(gold.attempt_tallies(attempts), gold.arrival_tallies(lifecycles))

    def counted(tallies: DataFrame) -> set[Any]:
        found = queries.movements(tallies, buckets, F.col("queue"))
        return set(found.select("label", "index", *queries.COUNTED).collect())

    assert counted(tallies) == counted(runs.whole.read(spark, "gold.minutes"))
    kept, anew = runs.whole.read(spark, "state.durations"), gold.attempt_durations(attempts)
    assert set(queries.waits(kept, buckets).collect()) == set(queries.waits(anew, buckets).collect())


# -- a store ------------------------------------------------------------------------------------------------------

OBJECTIVES_FILE = '[[objectives]]\nname = "soon"\nkind = "wait"\nthreshold_ms = 60000'


def pipeline(*words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(root, ["--json", "pipeline", *words])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def check_lake_against(spark: SparkSession, lake: Lake, attempts: Sequence[Any]) -> None:
    last = {one.job_id: str(one.state) for one in attempts}
    lives = lake.read(spark, "silver.lifecycles").select("job_id", "state").collect()
    assert dict(map(tuple, lives)) == last
    sums = ("sum(arrivals)", "sum(starts)", "sum(failures)")
    hours = lake.read(spark, "gold.hours").selectExpr(*sums).collect()
    outcomes = Counter(str(one.outcome) for one in attempts)
    starts = sum(one.reserved_at_us is not None for one in attempts)
    assert tuple(hours[0]) == (len(last), starts, outcomes["dead"])
    ends = lake.read(spark, "gold.backlog").groupBy("queue").agg(F.max_by("waiting", "minute")).collect()
    waiting = sum(state not in TERMINAL_STATES for state in last.values())
    assert sum(one[1] for one in ends) == waiting


def test_a_store_goes_through_the_commands_and_the_demo_into_a_report(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    monkeypatch.setenv("TASKHARBOR_URL", url)
    Path("objectives.toml").write_text(OBJECTIVES_FILE)
    attempts, _ = asyncio.run(live(url, random.randrange(2**31), clients=2, steps=120))
    leases = [one for one in attempts if one.reserved_at_us is not None]

    assert pipeline("run", "--objectives", "objectives.toml")["rows_read"] == len(attempts)
    lake = Lake("lake")
    check_lake_against(spark, lake, attempts)
    burnt = lake.read(spark, "gold.objectives").collect()
    assert sum(one.total for one in burnt) == len(leases)
    assert "0 new rows" in CliRunner().invoke(root, ["pipeline", "run"]).output

    # The second half of the demo: a run that finds nothing new, an audit, a report.
    steps: list[str] = []
    found = analyse(url, tmp_path, tmp_path / "demo.html", say=steps.append, spark=spark)
    assert found.is_clean, found.verdict
    assert (found.jobs, found.leases) == (len({one.job_id for one in attempts}), len(leases))
    page = Path(found.report).read_text("utf-8")
    assert found.verdict in page
    assert "<svg" in page
    assert (steps[0], steps[-1]) == ("starting Spark", "writing the report")

    with compiling(spark):
        compacted = pipeline("compact")
    assert compacted["files_after"] < compacted["files_before"]
    assert pipeline("vacuum", "--keep", "1", "--unlisted-for", "0s")["manifests"] == 3
    check_lake_against(spark, lake, attempts)


def test_the_commands_name_what_an_audit_finds(spark: SparkSession, tmp_path: Path) -> None:
    """Their exit code says so too."""
    lake = Lake(tmp_path / "lake")
    held, beside = row(1, job_id="job-a"), row(2, job_id="job-a", fence=2, worker="w2")
    # What the audit reads, without the gold that it does not.
    change = lake.begin("run")
    log = spark.createDataFrame([held, beside], ATTEMPT_COLUMNS).coalesce(1)
    bronze = bronze_attempts(log, source="log", run=1, ingested_at=START)
    change.append("bronze.attempts", bronze)
    change.append("silver.attempts", silver_attempts(bronze))
    change.commit()
    found = pipeline("audit", "--lake", str(lake.path), exit_code=1)
    assert not found["clean"]
    assert found["kinds"]["overlapping_leases"] == 1
    assert "job-a" in found["examples"][0]["text"]
    written = pipeline("report", "--lake", str(lake.path), "--output", str(tmp_path / "page.html"))
    assert not written["clean"]
    assert "Nothing yet" in Path(written["report"]).read_text("utf-8")
