"""The lake from end to end: changes that are seen as one, runs that are killed, the command line, and the report's numbers."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from spark.clusters import program
from spark.histories import OBJECTIVES, ROWS, Row, history, live, queues_frame, row
from taskharbor.cli.root import root
from taskharbor.demo.analysis import analyse
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import TERMINAL_STATES, JobState, to_micros
from taskharbor.lake.delta import LakeChanged, LakeUnreadable, NoLake
from taskharbor.lake.files import read_files, write_table
from taskharbor.lake.query import sql
from taskharbor.lake.tables import TABLES
from taskharbor.lake.upkeep import compact, vacuum
from taskharbor.spark.audit import audit_lake
from taskharbor.spark.lake import Lake, gold, read, run_pipeline
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS, COLUMNS
from taskharbor.spark.lake.run import STEPS, RunSummary
from taskharbor.spark.report import collect, queries, render
from taskharbor.spark.report.data import Verdict, cut
from taskharbor.spark.report.formatting import MINUTE
from taskharbor_testkit.servers.s3 import fresh_s3_url

# -- tables -------------------------------------------------------------------------------------------------------

TABLE = "state.backlog_days"
OTHER = "gold.workers"
FIRST, LAST = date(2026, 3, 1), date(2026, 3, 2)


@pytest.fixture(params=["folder", "object store"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake(tmp_path if request.param == "folder" else fresh_s3_url())


def put(lake: Lake, run: int, table: str = TABLE, **numbers: int) -> None:
    """Commit rows of queues, or of workers, on the first date, and of those whose name begins with `later` on the last."""
    rows = [
        {"source": "s", "queue": name, "worker": name, "change": n, "executions": n}
        | {"date": LAST if name.startswith("later") else FIRST}
        for name, n in numbers.items()
    ]
    opened = lake.table(table)
    opened.commit(run, write_table(pa.Table.from_pylist(rows), lake.place, table))


def seen(lake: Lake, table: str = TABLE) -> dict[str, int]:
    opened = lake.table(table)
    names = ("queue", "change") if table == TABLE else ("worker", "executions")
    rows = [row for batch in read_files(opened.files(), lake.place, table) for row in batch.to_pylist()]
    return {row[names[0]]: row[names[1]] for row in rows}


def test_a_table_takes_a_run_once(lake: Lake) -> None:
    """Of two commits of one run the second is refused, from a handle that is older too, and so is one of an earlier run."""
    both = [lake.table(TABLE), lake.table(TABLE)]
    put(lake, 1, a=1)
    files = write_table(pa.Table.from_pylist([{"queue": "b", "change": 5}]), lake.place, TABLE)
    for one in both:
        with pytest.raises(LakeChanged, match="run it again"):
            one.commit(1, files)
    both = [lake.table(TABLE), lake.table(TABLE)]
    both[0].commit(2, files, both[0].files())
    for late in (both[1], lake.table(TABLE)):
        for run in (1, 2, 3)[: 3 if late is both[1] else 2]:
            with pytest.raises(LakeChanged):
                late.commit(run, files)
    assert seen(lake) == {"b": 5}
    assert lake.table(TABLE).run == 2


def test_compaction_keeps_rows_and_retention_drops_dates(lake: Lake) -> None:
    for run, name in enumerate(("a", "b", "later"), 1):
        put(lake, run, TABLE, **{name: 1})
        put(lake, run, OTHER, **{name: 1})
    made = compact(lake)
    assert (made.files_before, made.files_after) == ({OTHER: 2, TABLE: 3}, {OTHER: 1, TABLE: 1})
    assert compact(lake).files_before == {}
    assert seen(lake) == seen(lake, OTHER) == {"a": 1, "b": 1, "later": 1}
    assert lake.table(TABLE).run == 3, "a compaction is not a run"
    # A file that no commit names: of a task that was lost, or of a run that goes on.
    lost = write_table(pa.Table.from_pylist([{"queue": "lost", "change": 5}]), lake.place, TABLE)
    assert vacuum(lake).files == 0, "what is young may be needed"
    dropped = vacuum(lake, keep_for=timedelta(0), before=LAST)
    assert (dropped.dropped, dropped.files) == (1, 3 + 1 + 2 + 1), (
        "all that compaction replaced, and the lost file"
    )
    assert seen(lake, OTHER) == {"later": 1}
    assert seen(lake) == {"a": 1, "b": 1, "later": 1}, "a backlog goes on from days that are gone"
    assert lost[0].path not in {one.path for one in lake.table(TABLE).files()}


def test_what_cannot_be_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    with pytest.raises(InvalidRequest, match=r"no table 'gold\.days': it has bronze\.attempts"):
        read(spark, lake.table("gold.days"))
    with pytest.raises(InvalidRequest, match="use one they all can reach"):
        run_pipeline(spark, lake, "memory://somewhere")
    with pytest.raises(InvalidRequest, match="in memory would be gone"):
        Lake("mem://lake")
    with pytest.raises(NoLake, match="pipeline run"):
        lake.snapshot()
    secret = Lake("s3://bucket/lake?secret_access_key=hidden&timeout=2.5&allow_http=on")
    assert "hidden" not in f"{secret}{secret.place!r}"
    assert secret.place.options == {"secret_access_key": "hidden", "timeout": "2500ms", "allow_http": "true"}


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
    """In an object store."""


def run(spark: SparkSession, lake: Lake, rows: Sequence[Row], crash_at: str = "") -> RunSummary:
    def progress(step: str, number: int, steps: int) -> None:
        if step == crash_at:
            raise Crash

    log = spark.createDataFrame(list(rows), ATTEMPT_COLUMNS).coalesce(1)
    wanted: dict[str, Any] = {"name": "log", "queues": queues_frame(spark), "objectives": OBJECTIVES}
    return run_pipeline(spark, lake, log, progress=progress, **wanted)


@pytest.fixture(scope="module")
def runs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    seed = random.SystemRandom().randrange(2**32)
    rows = history(seed)
    cut, dies = random.Random(seed).randrange(1, len(rows)), random.Random(seed).choice(STEPS[:-1])
    print("seed", seed, "cut", cut, "killed at", dies)
    folder = tmp_path_factory.mktemp("runs")
    url = fresh_s3_url()
    made = Runs(seed, rows, cut, Lake(folder / "whole"), Lake(url))
    child = Path(__file__).with_name("programs.py")
    arguments = (
        "die_midway",
        url,
        str(seed),
        str(cut),
        dies,
        random.Random(seed).choice(("before", "after")),
    )
    with program(sys.executable, str(child), *arguments, folder=folder) as dying:
        run(spark, made.whole, rows)
        _, errors = dying.communicate(timeout=170)
    assert dying.returncode == 9, errors[-2000:]
    return made


def contents(spark: SparkSession, lake: Lake) -> dict[str, Counter[str]]:
    """All rows of silver and gold, but for the number of the run that first saw a job, and for sketches."""
    left_out = ("first_seen_run", *gold.SKETCHES)
    return {
        table: Counter(map(str, read(spark, lake.table(table)).drop(*left_out).collect()))
        for table in TABLES
        if not table.startswith("bronze.")
    }


@pytest.mark.timeout(600)
def test_runs_that_are_killed_add_up_to_one_undisturbed_run(spark: SparkSession, runs: Runs) -> None:
    """On an object store: two increments, killed at random steps, the first in a process that really dies. The run after it
    finishes what it began."""
    pieces, rows = runs.pieces, runs.rows
    began = pieces.record().run
    assert run(spark, pieces, rows[: runs.cut]).rows_read == (0 if began else runs.cut)
    pieces.snapshot()
    crashes = random.Random(runs.seed + 1).choice(STEPS[1:-1])
    with pytest.raises(Crash):
        run(spark, pieces, rows, crashes)
    with pytest.raises(LakeUnreadable, match=rf"without run \d, .*{crashes}"):
        audit_lake(spark, pieces)
    # After all commits: the run stands, and repeating it adds nothing.
    with pytest.raises(Crash):
        run(spark, pieces, rows, "done")
    assert run(spark, pieces, rows).rows_read == 0
    assert audit_lake(spark, pieces) == audit_lake(spark, runs.whole)
    expected, found = contents(spark, runs.whole), contents(spark, pieces)
    for table in expected:
        assert found[table] == expected[table], f"{table} differs (seed {runs.seed})"
    assert expected["silver.attempts"].total() == len(rows) == ROWS
    assert expected["silver.lifecycles"].total() == len({one["job_id"] for one in rows})
    assert expected["gold.objectives"].total() > 0


def test_two_runs_at_once_take_in_everything_once(spark: SparkSession, runs: Runs, tmp_path: Path) -> None:
    """One is first, and the other fails, or finds that it is all there."""
    lake = Lake(tmp_path)

    def one(_: int) -> str:
        try:
            return str(run(spark, lake, runs.rows).rows_read)
        except LakeChanged:
            return "failed"

    with ThreadPoolExecutor(2) as pool:
        answers = sorted(pool.map(one, range(2)))
    assert answers in (["0", str(ROWS)], [str(ROWS), "failed"])
    lake.snapshot()
    assert contents(spark, lake) == contents(spark, runs.whole)


# -- a lake that is not whole, and one that others read -----------------------------------------------------------


def copied(runs: Runs, folder: Path) -> Lake:
    shutil.copytree(runs.whole.place.root, folder / "lake")
    return Lake(folder / "lake")


@pytest.mark.parametrize("table", TABLES)
def test_what_is_missing_is_found(runs: Runs, tmp_path: Path, table: str) -> None:
    lake = copied(runs, tmp_path)
    folder = Path(lake.place.uri(table))
    (newest,) = sorted(folder.glob("_delta_log/*.json"))[-1:]
    # A clean log leaves nothing in quarantine.
    victim = next(folder.glob("**/*.parquet")) if table != "quarantine.attempts" else None
    if victim is not None:
        kept = victim.read_bytes()
        for damage in (victim.unlink, partial(victim.write_bytes, kept[:-1])):
            damage()
            with pytest.raises(LakeUnreadable, match=rf"files of {table} .* missing or damaged \(1\)"):
                lake.snapshot()
        victim.write_bytes(kept)
        lake.snapshot()
    newest.unlink()
    with pytest.raises(LakeUnreadable, match=rf"without run 1, .*{table}"):
        lake.snapshot()


def test_rows_that_no_commit_counts_are_found(runs: Runs, tmp_path: Path) -> None:
    lake = copied(runs, tmp_path)
    silver = lake.table("silver.attempts")
    assert silver.delta is not None
    silver.delta.delete(commit_properties=silver.unchanged())
    with pytest.raises(LakeUnreadable, match=f"given {ROWS} rows .* silver 0"):
        lake.snapshot()


SAME = "SELECT {columns} FROM {table} ORDER BY ALL"


def test_duckdb_polars_and_spark_read_the_same(spark: SparkSession, runs: Runs) -> None:
    """Of every table, on a folder and on an object store."""
    run(spark, runs.pieces, runs.rows)
    for lake in (runs.whole, runs.pieces):
        for name, schema in TABLES.items():
            columns = [field.name for field in schema]
            by_duckdb = sql(lake, SAME.format(columns=", ".join(columns), table=name))
            table = lake.table(name)
            assert table.delta is not None
            by_polars = polars.read_delta(table.delta).select(columns).to_arrow()
            by_spark = read(spark, lake.table(name)).select(columns).toArrow()
            rows = [
                Counter(map(str, one.cast(schema).to_pylist())) for one in (by_duckdb, by_polars, by_spark)
            ]
            assert rows[0] == rows[1] == rows[2], name
            assert rows[0].total() == table.rows


def test_a_reader_that_skips_files_by_their_bounds_finds_every_row(runs: Runs) -> None:
    for name in TABLES:
        delta = runs.whole.table(name).delta
        assert delta is not None
        dataset = delta.to_pyarrow_dataset()
        for column, values in zip(dataset.schema.names, dataset.to_table().columns, strict=True):
            for value in values.unique().drop_null()[:3]:
                if not pa.types.is_nested(value.type) and not pa.types.is_binary(value.type):
                    wanted = pc.sum(pc.equal(values, value)).as_py()
                    assert dataset.count_rows(filter=pc.field(column) == value) == wanted, f"{name}.{column}"
        assert dataset.schema.names


@pytest.mark.parametrize("text", ["", "done", "x" * 64, "é" * 65, "\U0010fffe" * 70, "long " * 2000])
def test_bounds_of_texts_hold_whatever_their_length(text: str, tmp_path: Path) -> None:
    place = Lake(str(tmp_path / "lake")).place
    rows = pa.table({"source": [text, "m"]})
    (file,) = write_table(rows, place, "bronze.attempts")
    found = msgspec.json.decode(file.stats)
    low, high = found["minValues"]["source"], found["maxValues"]["source"]
    assert low <= min(text, "m")
    assert max(text, "m") <= high
    assert len(high) <= 65


def test_a_query_says_which_file_is_damaged_and_which_table_is_gone(runs: Runs, tmp_path: Path) -> None:
    lake = copied(runs, tmp_path)
    table = lake.table("silver.attempts")
    victim = Path(table.place.uri(table.name)) / table.files()[0].path
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-9])
    with pytest.raises(LakeUnreadable, match=r"files of silver\.attempts .* missing or damaged \(1\)"):
        sql(lake, "SELECT max(seq), min(worker) FROM silver.attempts")
    victim.write_bytes(whole)
    shutil.rmtree(lake.table("gold.hours").place.uri("gold.hours"))
    lake = Lake(lake.place.root)
    for query, reason in (
        ("FROM gold.hours", r"gold\.hours: `taskharbor pipeline run`"),
        ("selct 1", r'"selct"'),
    ):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            sql(lake, query)
        assert "\n" not in str(refused.value)


def test_a_newer_release_adds_a_column_to_an_older_lake(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    put(lake, 1, OTHER, old=1)
    wider = pa.schema([*list(TABLES[OTHER])[:-1], pa.field("host", pa.string()), TABLES[OTHER].field("date")])
    monkeypatch.setitem(TABLES, OTHER, wider)
    monkeypatch.setitem(COLUMNS, OTHER, from_arrow_schema(wider))

    def hosts() -> dict[str, str | None]:
        rows = [row.asDict() for row in read(spark, lake.table(OTHER)).collect()]
        return {row["worker"]: row["host"] for row in rows}

    assert hosts() == {"old": None}
    new = pa.Table.from_pylist([{"worker": "new", "host": "h", "date": FIRST}])
    lake.table(OTHER).commit(2, write_table(new, lake.place, OTHER))
    assert hosts() == {"old": None, "new": "h"}
    assert sql(lake, "SELECT host FROM gold.workers ORDER BY host").to_pylist() == [
        {"host": "h"},
        {"host": None},
    ]
    # The older release goes on with what the newer one left.
    monkeypatch.undo()
    put(lake, 3, OTHER, older=1)
    assert set(seen(lake, OTHER)) == {"old", "new", "older"}


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
    attempts, lifecycles = (
        read(spark, runs.whole.table(f"silver.{name}")) for name in ("attempts", "lifecycles")
    )
    cells = gold.attempt_cells(attempts).unionByName(gold.arrival_cells(lifecycles))

    def counted(tallies: DataFrame) -> set[Any]:
        found = queries.movements(tallies, buckets, F.col("queue"))
        return set(found.select("label", "index", *queries.COUNTED).collect())

    assert counted(cells) == counted(read(spark, runs.whole.table("gold.minutes")))
    kept, anew = read(spark, runs.whole.table("gold.minutes")), gold.gold_minutes([cells])
    assert set(queries.waits(kept, buckets).collect()) == set(queries.waits(anew, buckets).collect())


# -- a store ------------------------------------------------------------------------------------------------------

OBJECTIVES_FILE = '[[objectives]]\nname = "soon"\nkind = "wait"\nthreshold_ms = 60000'


def pipeline(*words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(root, ["--json", "pipeline", *words])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def check_lake_against(spark: SparkSession, lake: Lake, attempts: Sequence[Any]) -> None:
    last = {one.job_id: str(one.state) for one in attempts}
    lives = read(spark, lake.table("silver.lifecycles")).select("job_id", "state").collect()
    assert dict(map(tuple, lives)) == last
    sums = ("sum(arrivals)", "sum(starts)", "sum(failures)")
    hours = read(spark, lake.table("gold.hours")).selectExpr(*sums).collect()
    deaths = sum(one.state is JobState.DEAD for one in attempts)
    starts = sum(one.reserved_at_us is not None for one in attempts)
    assert tuple(hours[0]) == (len(last), starts, deaths)
    ends = (
        read(spark, lake.table("gold.queue_minutes"))
        .groupBy("queue")
        .agg(F.max_by("waiting", "minute"))
        .collect()
    )
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
    burnt = read(spark, lake.table("gold.objectives")).collect()
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

    pipeline("compact")
    assert pipeline("vacuum", "--keep-for", "0s")["files"] > 0
    assert pipeline("audit")["clean"]
    check_lake_against(spark, lake, attempts)

    def asked(*words: str) -> str:
        result = CliRunner().invoke(root, ["lake", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    query = "SELECT count(*) AS n, max(ended_at) AS last FROM silver.attempts"
    assert json.loads(asked("sql", query, "--format", "json"))[0]["n"] == len(attempts)
    assert f"{len(attempts)}" in asked("sql", query)
    assert asked("sql", query, "-f", "csv").startswith('"n","last"\n')
    asked("sql", query, "-f", "parquet", "-o", "answer.parquet")
    assert parquet.read_table("answer.parquet")["n"].to_pylist() == [len(attempts)]
    listed = {one["name"]: one for one in json.loads(asked("tables", "--json"))}
    assert listed["silver.attempts"]["rows"] == len(attempts)
    assert listed["silver.attempts"]["columns"]["ended_at"] == "timestamp"
    assert "silver.lifecycles" in asked("tables")
    refused = CliRunner().invoke(root, ["lake", "sql", "SELECT nothing FROM silver.attempts"])
    assert refused.exit_code != 0
    assert "nothing" in refused.stderr


def test_the_commands_name_what_an_audit_finds(spark: SparkSession, tmp_path: Path) -> None:
    """Their exit code says so too."""
    lake = Lake(tmp_path / "lake")
    held, beside = row(1, job_id="job-a"), row(2, job_id="job-a", fence=2, worker="w2")
    run(spark, lake, [held, beside])
    found = pipeline("audit", "--lake", str(lake), exit_code=1)
    assert not found["clean"]
    assert found["kinds"]["overlapping_leases"] == 1
    assert "job-a" in found["examples"][0]["text"]
    written = pipeline("report", "--lake", str(lake), "--output", str(tmp_path / "page.html"))
    assert not written["clean"]
    assert "overlapping lease" in Path(written["report"]).read_text("utf-8")
