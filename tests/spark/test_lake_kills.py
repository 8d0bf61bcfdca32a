"""`taskharbor pipeline run` as a real process that SIGKILL ends at random points: nothing is lost or doubled.

The lake is compared with tables that DuckDB computes from the store's log (`recomputed.sql`). No code of the pipeline takes part.
`TASKHARBOR_LAKE_SEED` replays the log and the choice of the points, and `TASKHARBOR_LAKE_KILLS` sets their number.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from needing import need
from spark import clusters
from spark.histories import Life, life_on
from spark.programs import SPECULATION
from taskharbor.bulk.tables import attempts_batch
from taskharbor.jobs import SECOND
from taskharbor.lake.delta import Lake
from taskharbor.lake.tables import BRONZE, TABLES
from taskharbor.spark.lake.run import source_name
from taskharbor.spark.session import SparkUnavailable, check
from taskharbor_testkit.servers.s3 import fresh_s3_url

STATEMENTS = (Path(__file__).parent / "recomputed.sql").read_text("utf-8")
OBJECTIVES = '[[objectives]]\nname = "soon"\nkind = "wait"\nthreshold_ms = 1000\n'
PIPELINE = [sys.executable, "-m", "taskharbor", "--json", "pipeline"]
HOUR = 3600 * SECOND
KILLS = int(os.environ.get("TASKHARBOR_LAKE_KILLS", "10"))
EAGER = SPECULATION | {
    "spark.speculation.interval": "20ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "10ms",
}
"""Tasks of a few rows are over soon."""
LONGEST_DELAY = 1.0
"""Seconds from a commit to a kill: longer than most steps take."""

pytestmark = pytest.mark.timeout(120 * KILLS)


@pytest.fixture(scope="module", autouse=True)
def spark_is_here() -> None:
    try:
        check()
    except SparkUnavailable as error:
        need(str(error))


class Point(NamedTuple):
    """A point at which a run is killed."""

    commits: int
    """The number of its commits before."""
    delay: float
    whole: bool
    """True if Java is killed at the same moment. Otherwise it hears of the end of Python, and goes on for a moment."""


class Runs:
    """Runs over a log that grows, one after the other."""

    def __init__(self, life: Life, url: str, place: str, folder: Path) -> None:
        self.life, self.url, self.lake, self.folder = life, url, Lake(place), folder
        self.command = [*PIPELINE, "run", "--url", url, "--lake", place]
        self.command += ["--objectives", str(folder / "objectives.toml")]
        self.environment: dict[str, str] = {}
        self.killed = self.torn = 0

    def on_cluster(self, master: str) -> None:
        """Run on two hosts, where Spark starts a second copy of a task that takes long."""
        events = self.folder / "events"
        events.mkdir()
        logged = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{events}"}
        confs = clusters.conf_arguments(clusters.EXECUTOR_SETTINGS | EAGER | logged)
        self.environment["PYSPARK_SUBMIT_ARGS"] = shlex.join([*confs, "pyspark-shell"])
        self.command += ["--master", master]

    def second_copies(self) -> int:
        """The number of tasks of which Spark started a second copy."""
        logs = [file for file in (self.folder / "events").rglob("*") if file.is_file()]
        return sum(file.read_text(errors="replace").count('"Speculative":true') // 2 for file in logs)

    async def add_rows(self) -> None:
        """Let some hours pass, and then clients work for a while."""
        self.life.now += self.life.chance.randint(1, 16) * HOUR
        await self.life.live(40)

    def commits(self) -> int:
        """The number of commits of all tables."""
        count, logs = 0, pafs.FileSelector("_delta_log", allow_not_found=True)
        for table in TABLES:
            found = self.lake.place.filesystem(table).get_file_info(logs)
            count += sum(one.path.endswith(".json") for one in found)
        return count

    def kill(self, point: Point) -> None:
        """Run, and kill the run at this point, unless it is over by then."""
        wanted = self.commits() + point.commits
        with clusters.program(*self.command, folder=self.folder, **self.environment) as process:
            for _ in clusters.looks(pause=0.05):
                if self.commits() >= wanted or process.poll() is not None:
                    break
            threading.Event().wait(point.delay)
            if process.poll() is not None:
                clusters.finish(process)
                return
            (os.killpg if point.whole else os.kill)(process.pid, signal.SIGKILL)
            process.wait(clusters.PATIENCE)
        self.killed += 1
        self.torn += (is_torn := len({self.lake.table(name).run for name in TABLES}) > 1)
        print(
            f"kill {self.killed}: {point}, {'between two tables' if is_torn else 'all tables of one run'}",
            flush=True,
        )

    def finish(self) -> int:
        """Run to the end. Returns the number of rows that were new."""
        with clusters.program(*self.command, folder=self.folder, **self.environment) as process:
            return int(json.loads(clusters.finish(process))["rows_read"])

    # -- the lake beside the log ------------------------------------------------------------------------------------

    async def log(self) -> pa.Table:
        attempts, _ = await self.life.told()
        rows = pa.Table.from_batches([attempts_batch(attempts)])
        return rows.append_column("source", pa.array([source_name(self.url)] * len(rows)))

    def connection(self, log: pa.Table) -> duckdb.DuckDBPyConnection:
        """The tables of the lake as `lake.NAME`, beside those that the log leads to."""
        connection = duckdb.connect()
        connection.execute("SET TimeZone = 'UTC'; CREATE SCHEMA lake")
        connection.register("log", log)
        for statement in filter(str.strip, STATEMENTS.split(";\n")):
            connection.execute(statement)
        for name in TABLES:
            delta, flat = self.lake.table(name).delta, name.replace(".", "_")
            if delta is not None:
                connection.register(f"{flat}_files", delta.to_pyarrow_dataset())
                connection.execute(f"CREATE VIEW lake.{flat} AS FROM {flat}_files")
        return connection

    def check_bronze(self, log: pa.Table) -> None:
        """Every row once, and none that the log does not have."""
        if self.lake.table(BRONZE).delta is not None:
            with self.connection(log) as connection:
                _check_rows(connection, "bronze_attempts", extra_only=True)

    def check(self, log: pa.Table) -> None:
        """Every table has the rows that the log leads to."""
        assert self.lake.table(BRONZE).rows == len(log)
        with self.connection(log) as connection:
            views = connection.sql(
                "SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'"
            )
            computed = [name for (name,) in views.fetchall() if not name.endswith("_files") and name != "log"]
            assert {*computed} == {name.replace(".", "_") for name in TABLES} - {"bronze_queues"}
            for view in computed:
                _check_rows(connection, view)


def _check_rows(connection: duckdb.DuckDBPyConnection, view: str, *, extra_only: bool = False) -> None:
    columns = ", ".join(name for name, *_ in connection.sql(f"DESCRIBE {view}").fetchall())
    sides = f"SELECT {columns} FROM lake.{view}", f"SELECT {columns} FROM {view}"  # noqa: S608
    for side, other in (sides,) if extra_only else (sides, sides[::-1]):
        found = connection.sql(f"{side} EXCEPT ALL {other} LIMIT 5").fetchall()
        assert not found, f"{view}, in {side}: {found}"


def points(chance: random.Random) -> Iterator[Point]:
    """All phases of a run are as likely: before its first commit, between two tables, and after the last."""
    while True:
        whole = chance.random() < 0.7
        yield Point(chance.randint(0, len(TABLES) + 1), chance.uniform(0, LONGEST_DELAY), whole)


async def killed_at_random(place: str, folder: Path, kills: int, master: str | None = None) -> Runs:
    """Kill so many runs, and compare the lake with the log in the end."""
    seed = int(os.environ.get("TASKHARBOR_LAKE_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TASKHARBOR_LAKE_SEED={seed}")
    (folder / "objectives.toml").write_text(OBJECTIVES)
    url, chance = f"sqlite:///{folder}/jobs.db?durability=normal", random.Random(seed)
    async with life_on(url, seed, 2) as life:
        life.now -= 60 * 24 * HOUR
        runs = Runs(life, url, place, folder)
        if master is not None:
            runs.on_cluster(master)
        for point in points(chance):
            await runs.add_rows()
            runs.kill(point)
            log = await runs.log()
            runs.check_bronze(log)
            if runs.killed == kills:
                break
        runs.finish()
        assert runs.finish() == 0
        runs.check(log)
    print(f"{runs.killed} runs killed, {runs.torn} between two tables, {len(log)} rows")
    return runs


async def test_a_run_that_is_killed_at_random_points_loses_and_doubles_nothing(tmp_path: Path) -> None:
    await killed_at_random(str(tmp_path / "lake"), tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "object store"])
async def test_runs_with_speculation_that_are_killed_lose_and_double_nothing(
    tmp_path: Path, kind: str
) -> None:
    place = fresh_s3_url() if kind == "object store" else str(tmp_path / "lake")
    with clusters.standalone(tmp_path) as master:
        runs = await killed_at_random(place, tmp_path, KILLS, master)
    print(f"{runs.second_copies()} tasks had a second copy")
    assert runs.torn


@pytest.mark.slow
async def test_a_run_and_an_audit_on_a_cluster_outlive_an_executor(tmp_path: Path) -> None:
    seed, lake = random.SystemRandom().randrange(2**31), str(tmp_path / "lake")
    (tmp_path / "objectives.toml").write_text(OBJECTIVES)
    url = f"sqlite:///{tmp_path}/jobs.db?durability=normal"
    with clusters.standalone(tmp_path) as master:
        async with life_on(url, seed, 2) as life:
            runs = Runs(life, url, lake, tmp_path)
            runs.on_cluster(master)
            for _ in range(5):
                await runs.add_rows()
            log = await runs.log()
        with clusters.program(*runs.command, folder=tmp_path, **runs.environment) as process:
            for _ in clusters.looks(pause=0.05):
                if runs.commits() > 1:
                    break
                assert process.poll() is None
            os.kill(clusters.executors()[0], signal.SIGKILL)
            found = json.loads(clusters.finish(process))
        assert found["rows_read"] == len(log)
        runs.check(log)
        audit = [*PIPELINE, "audit", "--lake", lake, "--master", master]
        with clusters.program(*audit, folder=tmp_path, **runs.environment) as process:
            audited = json.loads(clusters.finish(process))
    assert (audited["clean"], audited["rows"]) == (True, len(log))
