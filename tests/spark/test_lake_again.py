"""Rows that do not pass a check, dates that are computed again, and runs at intervals."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from spark.clusters import program
from spark.histories import OBJECTIVES, ROWS, Row, at, history, queues_frame, row
from spark.stores import add, jobs_in, work_off
from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.cli.root import root
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, TERMINAL_STATES, JobState
from taskharbor.lake.delta import NoLake
from taskharbor.lake.tables import TABLES
from taskharbor.lake.upkeep import compact, vacuum
from taskharbor.spark.audit import audit_lake
from taskharbor.spark.lake import Lake, gold, quality, read, reprocess, run_at_intervals, run_pipeline
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS
from taskharbor.spark.lake.run import RunSummary
from taskharbor.spark.report import collect, queries
from taskharbor_testkit.servers.proxy import FaultProxy

LOOSE = StructType([StructField(one.name, one.dataType) for one in ATTEMPT_COLUMNS])


def run(spark: SparkSession, lake: Lake, rows: Sequence[Row]) -> RunSummary:
    log = spark.createDataFrame(list(rows), LOOSE).coalesce(1)
    wanted: dict[str, Any] = {"name": "log", "queues": queues_frame(spark), "objectives": OBJECTIVES}
    return run_pipeline(spark, lake, log, **wanted)


def contents(spark: SparkSession, lake: Lake) -> dict[str, Counter[str]]:
    """All rows but those of bronze. Sketches of the same values may differ."""
    return {
        name: Counter(map(str, read(spark, lake.table(name)).drop(*gold.SKETCHES).collect()))
        for name in TABLES
        if not name.startswith("bronze.")
    }


def column(spark: SparkSession, lake: Lake, table: str, *names: str) -> Counter[Any]:
    found = read(spark, lake.table(table)).select(*names).collect()
    return Counter(tuple(one) if len(names) > 1 else one[0] for one in found)


# -- quarantine ---------------------------------------------------------------------------------------------------

BROKEN: dict[str, Row] = {
    **{f"{one.name} is missing": {one.name: None} for one in ATTEMPTS if not one.nullable},
    "ended before it began": {"ended_at": at(5)},
    "unknown outcome": {"outcome": "vanished"},
    "unknown state": {"state": "nowhere"},
}


def broken_log() -> list[Row]:
    """Two good rows, one of each broken kind, and a copy."""
    rows = [row(1), row(2, created_at=100)]
    for seq, values in enumerate(BROKEN.values(), 3):
        rows.append(row(seq, created_at=10, reserved_at=20, ended_at=30) | values)
    return [*rows, row(2, created_at=100)]


def test_rows_that_do_not_pass_are_set_apart_with_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    lake, rows = Lake(tmp_path), broken_log()
    expected = dict.fromkeys([*BROKEN, quality.COPY], 1)
    assert run(spark, lake, rows).quarantined == expected
    assert column(spark, lake, "silver.attempts", "seq") == {1: 1, 2: 1}
    assert column(spark, lake, "quarantine.attempts", "reason") == expected
    assert column(spark, lake, "silver.lifecycles", "job_id") == {"job-1": 1, "job-2": 1}
    assert sum(one.completions for one in read(spark, lake.table("gold.hours")).collect()) == 2
    # The lake is whole, and the audit sees each row, also those that are set apart.
    found = audit_lake(spark, lake)
    assert found.rows == len(rows) - 1
    assert {"unknown_outcome", "times_out_of_order", "duplicate_row"} <= set(found.kinds)
    # An increment, a compaction and the end of a date leave the sums as they are.
    again = run(spark, lake, [*rows, row(50, created_at=3 * 3600), row(51, created_at=3 * 3600, outcome="")])
    assert (again.rows_read, again.quarantined) == (2, {"unknown outcome": 1})
    compact(lake)
    vacuum(lake, before=date(2026, 3, 2))
    lake.snapshot()
    assert run(spark, lake, rows).quarantined == {}


def test_a_clean_log_is_judged_within_the_scan_of_silver(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert run(spark, lake, [row(1), row(2)]).quarantined == {}
    assert lake.table("quarantine.attempts").files() == []
    plan = quality.passing(spark.createDataFrame([row(1)], ATTEMPT_COLUMNS), is_unique=True)
    assert "Exchange" not in plan._jdf.queryExecution().executedPlan().toString()


# -- dates again --------------------------------------------------------------------------------------------------


def test_dates_are_computed_again_as_they_were(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From bronze, after damage; a second time changes nothing."""
    lake, rows = Lake(tmp_path), history(5)
    rows[3] |= {"outcome": "vanished"}
    days = sorted({one["ended_at"].date() for one in rows})
    # A lease over midnight, of a job of the day before.
    late = row(ROWS + 1, job_id="late") | {
        name: datetime(days[0].year, days[0].month, days[0].day, 20, tzinfo=UTC) + timedelta(hours=hours)
        for name, hours in (("created_at", 0), ("run_at", 0), ("reserved_at", 3), ("ended_at", 5))
    }
    late["lease_expires_at"] = late["ended_at"]
    for until in (ROWS // 3, ROWS):
        run(spark, lake, rows[:until])
    run(spark, lake, [*rows, late])
    whole = contents(spark, lake)
    record = lake.record()

    for name in (
        "silver.attempts",
        "silver.lifecycles",
        "gold.minutes",
        "gold.queue_minutes",
        "gold.workers",
    ):
        table = lake.table(name)
        assert table.delta is not None
        table.delta.delete(f"date = '{days[0]}'", commit_properties=table.unchanged())
    for name, change in (("gold.hours", "completions"), ("gold.errors", "count")):
        table = lake.table(name)
        assert table.delta is not None
        table.delta.update(
            {change: "7"}, predicate=f"date = '{days[0]}'", commit_properties=table.unchanged()
        )
    assert contents(spark, lake) != whole
    for _ in range(2):
        done = reprocess(spark, lake, days[0], days[-1])
        found = contents(spark, lake)
        for name in whole:
            assert found[name] == whole[name], name
    assert (done.run, done.rows_read, done.quarantined) == (record.run + 2, 0, {"unknown outcome": 1})
    lake.snapshot()
    assert run(spark, lake, [*rows, late]).rows_read == 0

    # One date alone, on which a job goes on that began before. Rows come back once the checks let them through.
    reprocess(spark, lake, late["ended_at"].date(), late["ended_at"].date())
    assert contents(spark, lake) == whole
    monkeypatch.delitem(quality.CHECKS, "unknown outcome")
    reprocess(spark, lake, days[0], days[-1])
    assert lake.table("quarantine.attempts").rows == 0
    assert lake.table("silver.attempts").rows == ROWS + 1
    lake.snapshot()


def test_dates_again_that_died_are_finished_by_the_next_run(spark: SparkSession, tmp_path: Path) -> None:
    lake, rows = Lake(tmp_path), history(6)
    run(spark, lake, rows)
    whole = contents(spark, lake)

    def dies(step: str, number: int, steps: int) -> None:
        if step == "gold.workers":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reprocess(spark, lake, date(2026, 1, 1), date(2026, 1, 31), progress=dies)
    assert run(spark, lake, rows).rows_read == 0
    lake.snapshot()
    assert contents(spark, lake) == whole


def test_dates_that_cannot_be_computed_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ends before it begins"):
        reprocess(spark, Lake(tmp_path), date(2026, 3, 2), date(2026, 3, 1))
    with pytest.raises(NoLake, match="pipeline run"):
        reprocess(spark, Lake(tmp_path), date(2026, 3, 1), date(2026, 3, 2))
    # A job that was created on the day before its end is counted on both.
    run(spark, Lake(tmp_path), [row(1, reserved_at=3 * 3600, ended_at=3 * 3600 + 1)])
    for day in (2, 3):
        with pytest.raises(
            InvalidRequest, match=rf"no rows of 2027-03-0{day}\.\.2027-03-03: nothing was computed"
        ):
            reprocess(spark, Lake(tmp_path), date(2027, 3, day), date(2027, 3, 3))
    for day in (1, 2):
        assert reprocess(spark, Lake(tmp_path), date(2026, 3, day), date(2026, 3, day)).run == day + 1


def test_dates_that_are_not_past_are_not_dropped(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    for day in (today, today + timedelta(days=1)):
        with pytest.raises(InvalidRequest, match="is not past"):
            vacuum(Lake(tmp_path), before=day)


# -- at intervals -------------------------------------------------------------------------------------------------


def test_a_lake_that_is_fed_all_the_time_keeps_few_files(spark: SparkSession, tmp_path: Path) -> None:
    lake, rows, told, stopping = Lake(tmp_path), history(7), list[RunSummary](), threading.Event()
    cuts = iter(range(40, 200, 20))

    def done(summary: RunSummary) -> None:
        told.append(summary)
        if len(told) == 8:
            stopping.set()

    run_at_intervals(
        lake,
        lambda: run(spark, lake, rows[: next(cuts)]),
        timedelta(0),
        stopping,
        done=done,
        log=pytest.fail,
        keep_for=timedelta(0),
        upkeep_every=4,
    )
    assert [one.rows_read for one in told] == [40] + [20] * 7
    lake.snapshot()
    for name in TABLES:
        table = lake.table(name)
        per_date = Counter(one.date for one in table.files())
        assert max(per_date.values(), default=0) <= 2, name
        # What is replaced is gone.
        assert len(list(Path(lake.place.uri(name)).glob("**/*.parquet"))) == len(table.files()), name


def test_the_commits_of_a_table_become_a_checkpoint(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for number in range(1, 103):
        lake.table("gold.workers").commit(number, ())
    log = Path(lake.place.uri("gold.workers")) / "_delta_log"
    assert (log / "_last_checkpoint").exists()
    assert lake.table("gold.workers").run == 102


@pytest.mark.timeout(300)
def test_runs_at_intervals_ride_out_an_outage_and_end_at_a_signal(redis_url: str, tmp_path: Path) -> None:
    with closing(FaultProxy.to(redis_url)) as proxy:
        url = f"{proxy.url_for(redis_url)}&timeout=1&connect_timeout=1"
        add(redis_url, 5)
        work_off(redis_url)
        words = ("pipeline", "run", "--url", url, "--lake", "lake", "--every", "200ms", "--json")
        with program(sys.executable, "-m", "taskharbor", *words, folder=tmp_path) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert json.loads(process.stdout.readline())["rows_read"] == 5
            proxy.refuse()
            proxy.cut()
            notes = (json.loads(line)["note"] for line in process.stderr if line.startswith("{"))
            assert "tried again every 0.2 s" in next(notes)
            add(redis_url, 7)
            work_off(redis_url)
            proxy.accept()
            assert json.loads(process.stdout.readline())["rows_read"] == 7
            process.send_signal(signal.SIGTERM)
            assert "SIGTERM: it ends after this run" in next(notes), "one line for the whole outage"
            assert process.wait(timeout=120) == 0
    lake = Lake(tmp_path / "lake")
    lake.snapshot()
    assert lake.table("silver.attempts").rows == 12


def test_a_run_that_gets_sigterm_says_that_it_was_interrupted(url: str, tmp_path: Path) -> None:
    add(url, 1)
    words = ["terminate", "pipeline", "run", "--url", url, "--lake", str(tmp_path / "lake")]
    command = [sys.executable, str(Path(__file__).with_name("programs.py")), *words]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=120)
    assert (ended.returncode, "error: interrupted\n" in ended.stderr) == (143, True), ended.stderr
    assert [line for line in ended.stderr.splitlines() if "ERROR" in line or line.startswith("\tat ")] == []


# -- failures of the surroundings ---------------------------------------------------------------------------------


def refused(*words: str) -> str:
    """The message of a command that fails: one line, and no trace of Java."""
    result = CliRunner().invoke(root, ["--json", "pipeline", *words])
    assert result.exit_code == 1, result.output
    errors = [json.loads(line) for line in result.stderr.splitlines() if line.startswith('{"error"')]
    (detail,) = (one["error"]["detail"] for one in errors)
    assert "\n" not in detail
    assert "Traceback" not in result.stderr
    assert len(detail) < 400, detail
    return str(detail)


@pytest.fixture
def store(url: str) -> str:
    add(url, 50)
    work_off(url)
    return url


def test_a_place_that_cannot_be_written_is_named(spark: SparkSession, store: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("run", "--url", store, "--lake", str(tmp_path / "file" / "lake"))
    assert "the place cannot be written" in refused(*words)
    told = CliRunner().invoke(root, ["--debug", "pipeline", *words]).stderr
    assert "Traceback" in told, "all of it, for those who ask"
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="mode bits do not bind root")
def test_a_folder_without_write_permission_is_named(spark: SparkSession, store: str, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir(mode=0o500)
    assert "the place cannot be written" in refused("run", "--url", store, "--lake", str(tmp_path / "lake"))


def test_a_full_disk_is_told_and_leaves_no_commit(spark: SparkSession, store: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        assert "the disk is full" in refused("run", "--url", store, "--lake", str(disk / "lake"))
        assert Lake(disk / "lake").record().run == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_damaged_file_is_named_and_the_run_is_finished_once_it_is_back(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    words = ("run", "--url", store, "--lake", str(tmp_path / "lake"))
    assert CliRunner().invoke(root, ["pipeline", *words]).exit_code == 0
    lake = Lake(tmp_path / "lake")
    file = next(Path(lake.place.uri("gold.minutes")).glob("**/*.parquet"))
    kept = file.read_bytes()
    file.write_bytes(b"x" * len(kept))
    add(store, 5)
    work_off(store)
    told = refused(*words)
    assert "a file is damaged" in told
    assert str(file) in told
    assert lake.table("gold.minutes").run == 1
    file.write_bytes(kept)
    assert CliRunner().invoke(root, ["pipeline", *words]).exit_code == 0
    lake.snapshot()
    assert lake.table("silver.attempts").rows == 55


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("outcome = 99", r"row 7 of the attempt log, of queue \w+, has outcome 99"),
        (
            "created_at = 253402300800000000",
            r"row 7 of sqlite:.*, of queue \w+, has a created_at after the year 9999",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    spark: SparkSession, store: str, tmp_path: Path, change: str, says: str
) -> None:
    with closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as database, database:
        database.execute(f"UPDATE attempts SET {change} WHERE seq = 7")  # noqa: S608
    assert re.search(says, refused("run", "--url", store, "--lake", str(tmp_path / "lake")))


# -- the commands -------------------------------------------------------------------------------------------------


def test_jobs_that_never_ran_are_in_the_report(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """From the last run by queue, and from the store by type."""
    add(url, 3, queue="mail")
    place = ("--lake", str(tmp_path / "lake"))
    assert CliRunner().invoke(root, ["pipeline", "run", "--url", url, *place]).exit_code == 0
    add(url, 4, queue="mail")
    add(url, 2, queue="later", later=3600 * SECOND)
    lake = Lake(tmp_path / "lake")
    (seen,) = collect(spark, lake).waiting
    assert (seen.queue, seen.type, seen.ready, seen.later) == ("mail", None, 3, 0)
    told = CliRunner().invoke(root, ["pipeline", "report", "--url", url, *place])
    assert told.exit_code == 0, told.output
    assert "7 jobs ready to run; the first has been due for" in told.output
    page = (tmp_path / "lake" / "report.html").read_text("utf-8")
    assert "<h2>Waiting</h2>" in page
    found = {(one.queue, one.type): (one.ready, one.later) for one in collect(spark, lake, url=url).waiting}
    assert {queue: counts for (queue, _), counts in found.items()} == {"mail": (7, 0), "later": (0, 2)}
    assert all(type is not None for _, type in found)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_made_up_store_goes_the_whole_way(
    spark: SparkSession, kind: str, url: str, postgres_url: str, tmp_path: Path
) -> None:
    """Its log keeps the guarantees, and its lifecycles are what the store says."""
    store = url if kind == "sqlite" else postgres_url
    words = ["--json", "history", "--url", store, "--rows", "900", "--days", "2", "--seed", "4"]
    made = CliRunner().invoke(root, words)
    assert made.exit_code == 0, made.output
    rows = json.loads(made.stdout)["rows"]
    lake = Lake(tmp_path / "lake")
    assert run_pipeline(spark, lake, store).rows_read == rows >= 900
    assert audit_lake(spark, lake).is_clean
    states = Counter(str(one.state) for one in jobs_in(store))
    lives = column(spark, lake, "silver.lifecycles", "state")
    for state in TERMINAL_STATES:
        assert states[state] == lives[str(state)] > 0 or state is JobState.CANCELLED
    waiting = read(spark, lake.table("bronze.queues")).selectExpr("sum(ready + scheduled)").head()
    assert waiting is not None
    assert waiting[0] == states["ready"] + states["scheduled"] > 0
    assert len(column(spark, lake, "silver.attempts", "date")) >= 2


def test_sparse_percentiles_are_interpolated(spark: SparkSession) -> None:
    """As numpy and PERCENTILE_CONT do it."""
    dice = random.Random(3)
    values = {n: [round(dice.lognormvariate(10, 2)) for _ in range(n)] for n in (1, 2, 3, 20, 99, 100)}
    rows = [(n, value) for n, some in values.items() for value in some]
    sketches = spark.createDataFrame(rows, "n int, v long").groupBy("n")
    cells = sketches.agg(F.kll_sketch_agg_bigint("v").alias("wait_sketch"))
    for one in cells.select("n", *queries.interpolated("wait")).collect():
        usual = [numpy.percentile(values[one.n], percent) for percent in gold.PERCENTS]
        assert list(one)[1:] == pytest.approx(usual, abs=1), one.n


def test_the_exit_code_says_that_rows_went_into_quarantine(
    spark: SparkSession, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quality.CHECKS, "unknown outcome", "outcome = 'done' AND seq < 3")
    words = ["--json", "pipeline", "run", "--lake", str(tmp_path / "lake")]
    result = CliRunner().invoke(root, [*words, "--url", store])
    assert result.exit_code == 5, result.output
    assert json.loads(result.stdout)["quarantined"] == {"unknown outcome": 2}
    assert CliRunner().invoke(root, [*words, "--url", store]).exit_code == 0
    today = f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}..{datetime.now(UTC):%Y-%m-%d}"
    monkeypatch.undo()
    again = CliRunner().invoke(root, [*words, "--reprocess", today])
    assert (again.exit_code, json.loads(again.stdout)["quarantined"]) == (0, {})
    assert Lake(tmp_path / "lake").table("silver.attempts").rows == 50
    assert CliRunner().invoke(root, [*words, "--reprocess", "yesterday"]).exit_code == 2
