"""The demo's second half where Spark cannot run. Where it can: tests/spark/test_lake.py, which has a session."""

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


def test_the_first_half_of_the_demo_loads_no_spark_and_the_second_says_what_to_install() -> None:
    """In an interpreter of its own, in which PySpark cannot be found."""
    program = (
        "import sys, taskharbor.demo.run, taskharbor.demo.analysis\n"
        "print(sys.modules.keys().isdisjoint(['pyspark', 'pandas', 'pyarrow']))\n"
        "sys.modules['pyspark'] = None\n"
        "print(taskharbor.demo.analysis.missing())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    is_clean, line = ran.stdout.splitlines()
    assert is_clean == "True"
    assert "pip install 'taskharbor[spark]'" in line
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("violations", "verdict"),
    [
        ({}, "No violation in 3,504 leases of 2,858 jobs."),
        ({"overlapping leases": 1}, "Violations in 3,504 leases of 2,858 jobs: 1 overlapping leases."),
    ],
)
def test_the_verdict_is_a_sentence(violations: dict[str, int], verdict: str) -> None:
    found = Analysis(report="r.html", leases=3504, jobs=2858, violations=violations, seconds=1.0)
    assert (found.is_clean, found.verdict) == (not violations, verdict)
