"""Every example runs to its end in an empty folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from needing import need
from taskharbor.spark.session import SparkUnavailable, check

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "pipeline.ipynb"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    assert run(tmp_path, str(example))


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_notebook(tmp_path: Path) -> None:
    try:
        check()
    except SparkUnavailable as error:
        need(str(error))
    said = run(tmp_path, str(Path(__file__).with_name("notebook_program.py")), str(NOTEBOOK))
    assert "850 rows of the log" in said
    assert "0 violations in 850 rows of 800 jobs" in said
    assert sum("█" in line for line in said.splitlines()) > 1


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    kept = [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert kept == []


def test_every_example_is_listed() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert [example.name for example in [*EXAMPLES, NOTEBOOK] if example.name not in listed] == []
