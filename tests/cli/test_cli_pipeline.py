"""`taskharbor pipeline` where it must say no: none of this starts Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.cli_harness import Run

COMMANDS = ("audit", "report", "compact", "vacuum")


def test_the_group_lists_its_commands(run: Run) -> None:
    shown = run("pipeline", "--help").stdout
    assert [word for word in ("run", *COMMANDS) if f"\n  {word} " not in shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_lake_is_said_so_and_left_as_it_is(run: Run, command: str, tmp_path: Path) -> None:
    said = run("--json", "pipeline", command, "--lake", "nowhere", code=2).stderr
    assert "no lake in nowhere" in json.loads(said)["error"]
    assert "pipeline run" in json.loads(said)["hint"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_a_store_that_is_not_there_makes_neither_store_nor_lake(run: Run, tmp_path: Path) -> None:
    said = run("pipeline", "run", "--url", "sqlite:///missing.db", code=1).stderr
    assert "missing.db" in said
    assert list(tmp_path.iterdir()) == []


def test_a_vacuum_of_everything_is_refused(run: Run) -> None:
    (Path("lake") / "_lake").mkdir(parents=True)
    assert "--keep" in run("pipeline", "vacuum", "--keep", "0", code=2).stderr
