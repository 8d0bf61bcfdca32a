"""`taskharbor pipeline` over a real SQLite queue, as a user would go through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from test_lake_run import busy_queue, check_lake_against

from spark.compiling import compiling
from spark.lake_history import START, row
from taskharbor.cli.root import root
from taskharbor.client import Client
from taskharbor.spark.lake import Lake
from taskharbor.spark.lake.silver import bronze_attempts, silver_attempts
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS

OBJECTIVES = """
[[objectives]]
name = "soon"
kind = "wait"
threshold_ms = 60000
target = 0.99
"""


def test_run_audit_report_compact_and_vacuum_on_an_sqlite_queue(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    Path("objectives.toml").write_text(OBJECTIVES)

    def pipeline(*words: str, as_json: bool = True) -> Any:
        line = [*(["--json"] if as_json else []), "--url", url, "pipeline", *words]
        result = CliRunner().invoke(root, line)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if as_json else result.stdout

    with busy_queue(url) as client:
        ran = pipeline("run", "--objectives", "objectives.toml")
        assert (ran["rows_read"], ran["tables"]["silver.lifecycles"]) == (35, 35)
        lake = Lake("lake")
        check_lake_against(client, spark, lake)
        burnt = lake.read(spark, "gold.objectives").collect()
        assert sum(row.total for row in burnt) == 35
        assert "0 new rows" in pipeline("run", as_json=False)
    audited = pipeline("audit")
    assert (audited["clean"], audited["rows"], audited["jobs"]) == (True, 35, 35)
    pipeline("report", "--output", "page.html")
    assert "<svg" in Path("page.html").read_text()
    with compiling(spark):
        compacted = pipeline("compact")
    assert compacted["files_after"] < compacted["files_before"]
    assert pipeline("vacuum", "--keep", "1", "--unlisted-for", "0s")["manifests"] == 2
    with Client(url) as client:
        check_lake_against(client, spark, lake)


def test_an_audit_that_finds_something_names_it_and_says_so_by_its_exit_code(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "lake")
    held = row(1, job_id="job-a")
    beside = row(2, job_id="job-a", fence=2, worker="w2")
    # What the audit reads, without the gold that it does not.
    change = lake.begin("run")
    log = spark.createDataFrame([held, beside], ATTEMPT_COLUMNS).coalesce(1)
    bronze = bronze_attempts(log, source="log", run=1, ingested_at=START)
    change.append("bronze.attempts", bronze)
    change.append("silver.attempts", silver_attempts(bronze))
    change.commit()
    result = CliRunner().invoke(root, ["--json", "pipeline", "audit", "--lake", str(lake.path)])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["clean"]
    assert found["kinds"]["overlapping_leases"] == 1
    assert "job-a" in found["examples"][0]["text"]
