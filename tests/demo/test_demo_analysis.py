"""The demo's second half where Spark cannot run. Where it can: tests/spark/test_report.py, which has a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskharbor.demo.analysis import Analysis, missing


def test_without_java_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    said = missing()
    assert said is not None
    assert said.count("\n") == 0
    assert "install a JDK or JRE 17 or newer" in said


def test_without_pyspark_one_line_says_what_to_install() -> None:
    """In an interpreter of its own, in which PySpark cannot be found."""
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from taskharbor.demo.analysis import missing; print(missing())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    (line,) = ran.stdout.splitlines()
    assert "pip install 'taskharbor[spark]'" in line
    assert ran.stderr == ""


def test_the_first_half_of_the_demo_does_not_load_spark() -> None:
    program = (
        "import sys, taskharbor.demo.run, taskharbor.demo.analysis\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'pandas', 'pyarrow')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_the_verdict_is_a_sentence() -> None:
    clean = Analysis(report="r.html", leases=3504, jobs=2858, violations={}, seconds=1.0)
    assert clean.is_clean
    assert clean.verdict == "No violation in 3,504 leases of 2,858 jobs."
    broken = Analysis(report="r.html", leases=2, jobs=1, violations={"overlapping leases": 1}, seconds=1.0)
    assert not broken.is_clean
    assert broken.verdict == "Violations in 2 leases of 1 jobs: 1 overlapping leases."
