"""`taskharbor pipeline audit`: beside the store of --url, and over a lake that is not whole."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark.histories import START, live, queues_frame, row
from spark.stores import add, work_off
from taskharbor.cli.root import root
from taskharbor.jobs import JobState
from taskharbor.lake.delta import LakeUnreadable
from taskharbor.lake.upkeep import compact
from taskharbor.spark.audit import audit_store
from taskharbor.spark.audit.checks import STORE_KINDS
from taskharbor.spark.lake import Lake, reprocess, run_pipeline
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS

pytestmark = pytest.mark.timeout(600)


def pipeline(*words: object, exit_code: int = 0) -> Any:
    answer = CliRunner().invoke(root, ["pipeline", *map(str, words), "--json"])
    assert answer.exit_code == exit_code, answer.output
    return json.loads(answer.stdout if exit_code < 2 and answer.stdout else answer.stderr)


def test_a_lake_of_two_sources_is_compared_with_the_store_that_is_given(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    place = tmp_path / "lake"
    told, jobs = asyncio.run(live(url, random.randrange(2**31), clients=2, steps=120))
    pipeline("run", "--lake", place, "--url", url)
    # Its job waits, and no store is known.
    other = spark.createDataFrame([row(1, outcome="retried")], ATTEMPT_COLUMNS)
    run_pipeline(spark, Lake(place), other, name="other")

    alone = pipeline("audit", "--lake", place)
    assert (alone["clean"], alone["rows"]) == (True, len(told) + 1)
    assert alone["unchecked"] == [str(kind) for kind in STORE_KINDS]
    text = CliRunner().invoke(root, ["pipeline", "audit", "--lake", str(place)]).output
    assert "not checked without --url of the store: lost_job, store_contradicts_log" in " ".join(text.split())
    beside = pipeline("audit", "--lake", place, "--url", url)
    assert (beside["clean"], beside["unchecked"]) == (True, ["left_waiting"])
    assert (alone["without_store"], beside["without_store"]) == ([], ["other"])
    text = CliRunner().invoke(root, ["pipeline", "audit", "--lake", str(place), "--url", url]).output
    assert "not checked of other without its --url: lost_job, store_contradicts_log" in " ".join(text.split())

    ended = {one.job_id: one.state for one in told}
    waiting = [job.id for job in jobs if job.state is JobState.READY and job.id in ended and job.key is None]
    lost = waiting[0]
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        database.execute("DELETE FROM jobs WHERE id = ?", (lost,))
    found = pipeline("audit", "--lake", place, "--url", url, exit_code=1)
    assert found["kinds"] == {"lost_job": 1}
    assert found["examples"][0]["job_id"] == lost

    stranger = f"sqlite:///{tmp_path}/stranger.db"
    shutil.copy(url.removeprefix("sqlite:///"), tmp_path / "stranger.db")
    refused = CliRunner().invoke(root, ["pipeline", "audit", "--lake", str(place), "--url", stranger])
    assert (refused.exit_code, "has no rows of" in refused.output) == (2, True)
    # One that only the environment names need not be in this lake.
    found = CliRunner().invoke(
        root, ["pipeline", "audit", "--lake", str(place), "--json"], env={"TASKHARBOR_URL": stranger}
    )
    assert json.loads(found.stdout)["unchecked"] == alone["unchecked"]
    limited = CliRunner().invoke(root, ["pipeline", "audit", "--lake", str(place), "--waiting-limit", "1h"])
    assert (limited.exit_code, "give its --url" in limited.output) == (2, True)


def test_a_log_without_rows_is_not_judged(spark: SparkSession, url: str, tmp_path: Path) -> None:
    add(url, 3)
    place = tmp_path / "lake"
    pipeline("run", "--lake", place, "--url", url)
    for words in ((), ("--url", url)):
        found = pipeline("audit", "--lake", place, *words, exit_code=1)
        assert (found["clean"], found["rows"], found["kinds"]) == (False, 0, {})
    text = CliRunner().invoke(root, ["pipeline", "audit", "--lake", str(place)]).output
    assert "nothing to judge in 0 rows of 0 jobs" in text
    assert not audit_store(spark, url).is_clean
    assert not pipeline("report", "--lake", place)["clean"]
    assert "No violation" not in (place / "report.html").read_text("utf-8")
    # What the store alone shows counts.
    waits = pipeline("audit", "--lake", place, "--url", url, "--waiting-limit", "0s", exit_code=1)
    assert waits["kinds"] == {"left_waiting": 3}


def test_a_store_that_was_put_back_is_refused(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """By the run and by the audit, until its log has grown past what the lake has."""
    place, file = tmp_path / "lake", Path(url.removeprefix("sqlite:///"))
    add(url, 30)
    work_off(url)
    with closing(sqlite3.connect(file)) as database, closing(sqlite3.connect(tmp_path / "backup")) as backup:
        database.backup(backup)
    add(url, 30)
    work_off(url)
    pipeline("run", "--lake", place, "--url", url)
    for left in file.parent.glob(f"{file.name}*"):
        left.unlink()
    shutil.move(tmp_path / "backup", file)
    add(url, 20)
    work_off(url)
    for command in ("run", "audit"):
        answer = CliRunner().invoke(root, ["pipeline", command, "--lake", str(place), "--url", url])
        said = " ".join(answer.output.split())
        assert answer.exit_code == 1, said
        assert "the attempt log ends at 50, and this reader has read up to 60" in said
        assert "the pipeline with a new lake" in said
    # Without the store, the lake is what it was.
    assert pipeline("audit", "--lake", place)["clean"]


# -- a lake that is not whole ------------------------------------------------------------------------------------


def lose_a_file(lake: Path) -> None:
    next((lake / "silver" / "attempts").glob("**/*.parquet")).unlink()


def lose_the_newest_commit(lake: Path) -> None:
    max((lake / "silver" / "lifecycles" / "_delta_log").glob("*.json")).unlink()


def lose_a_table(lake: Path) -> None:
    shutil.rmtree(lake / "gold" / "hours")


@pytest.fixture(scope="module")
def whole(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of two runs."""
    folder = tmp_path_factory.mktemp("whole") / "lake"
    for rows in ([row(1)], [row(1), row(2)]):
        log = spark.createDataFrame(rows, ATTEMPT_COLUMNS)
        run_pipeline(spark, Lake(folder), log, name="made", queues=queues_frame(spark))
    return folder


@pytest.mark.parametrize("lose", [lose_a_file, lose_the_newest_commit, lose_a_table])
def test_audit_and_report_refuse_a_lake_that_lacks_something(
    whole: Path, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    place = tmp_path / "lake"
    shutil.copytree(whole, place)
    lose(place)
    for command in ("audit", "report"):
        answer = CliRunner().invoke(root, ["pipeline", command, "--lake", str(place)])
        assert answer.exit_code == 1, answer.output
        said = " ".join(answer.output.split())
        assert "are missing" in said or "without run 2" in said
        assert "Traceback" not in said
        assert "violation" not in said


@pytest.mark.parametrize("change", ["restore 0", "delete"])
@pytest.mark.parametrize("table", ["silver.lifecycles", "gold.hours", "bronze.queues"])
def test_a_table_that_another_program_changed_is_refused(
    whole: Path, tmp_path: Path, change: str, table: str
) -> None:
    """By the audit, the report and the next run, which would hide it. One that keeps the rows is let through."""
    place = tmp_path / "lake"
    shutil.copytree(whole, place)
    lake = Lake(place)

    def by_hand() -> DeltaTable:
        return DeltaTable(lake.place.uri(table))

    by_hand().optimize.compact()
    by_hand().vacuum(dry_run=False)
    lake.snapshot()
    if change == "delete":
        by_hand().delete()
    else:
        by_hand().restore(0)
    for command in ("audit", "report"):
        answer = CliRunner().invoke(root, ["pipeline", command, "--lake", str(place)])
        said = " ".join(answer.output.split())
        assert (answer.exit_code, f"{table} of {place} was changed by another program" in said) == (1, True)
    # An upkeep of another program hides nothing, and neither does a commit of ours.
    by_hand().optimize.compact()
    for act in (compact, lambda lake: lake.table(table).commit(3, ())):
        with pytest.raises(LakeUnreadable, match="restore its folder"):
            act(lake)
    with pytest.raises(LakeUnreadable, match="another program"):
        lake.snapshot()


@pytest.mark.parametrize("loses", ["a commit", "the table"])
def test_a_run_refuses_a_bronze_that_went_back(
    spark: SparkSession, whole: Path, tmp_path: Path, loses: str
) -> None:
    place = tmp_path / "lake"
    shutil.copytree(whole, place)
    bronze = place / "bronze" / "attempts"
    if loses == "a commit":
        max((bronze / "_delta_log").glob("*.json")).unlink()
    else:
        shutil.rmtree(bronze)
    log = spark.createDataFrame([row(1), row(2), row(3)], ATTEMPT_COLUMNS)
    later = r"bronze\.attempts of .* has run [01], .*gold\.hours \(2\).*Restore its commits"
    with pytest.raises(LakeUnreadable, match=later):
        run_pipeline(spark, Lake(place), log, name="made")
    with pytest.raises(LakeUnreadable, match=later):
        reprocess(spark, Lake(place), START.date(), START.date())
