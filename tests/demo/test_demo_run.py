"""The demo itself, small: real workers, a real kill."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from taskharbor.client import Client
from taskharbor.demo.analysis import Analysis
from taskharbor.demo.run import WorkerGone, WorkerProcesses


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taskharbor", "demo", "--jobs", "400", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_ends_with_one_json_object_and_nothing_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = demo("--json", "--queue-only")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["accepted"] == found["done"] + found["dead"] + found["cancelled"]
    assert (found["lost"], found["doubled"], found["overlapping_leases"]) == (0, 0, 0)
    assert found["w_max_overlap"] <= found["w_limit"]
    assert found["killed"]["held"] == found["killed"]["recovered"] > 0
    assert found["expired"] >= found["killed"]["held"]
    assert found["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_tells_a_newcomer_keeps_the_database_on_request_and_says_in_one_line_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    done = demo("--keep", "--seed", "2", "--report", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each exactly once" in done.stdout
    assert "was killed with SIGKILL" in done.stdout
    assert [line for line in done.stdout.splitlines() if "install" in line] == [
        "For the pipeline, the audit and the report: no Java found: install a JDK or JRE 17 or newer "
        "(set JAVA_HOME, or put java on the PATH)"
    ]
    (folder,) = tmp_path.iterdir()  # And no report.
    assert str(folder) in done.stdout
    with Client(f"sqlite:///{folder}/demo.db") as client:
        assert [queue.queue for queue in client.stats()] == ["api", "default"]


def test_a_worker_that_ends_by_itself_is_noticed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = WorkerProcesses(Path(folder), "nonsense://", ("w",))
        with workers.running():
            workers._processes["w"].wait(timeout=60)
            with pytest.raises(WorkerGone, match="no installed driver"):
                workers.check()


# -- the second half: where Spark can run, tests/spark/test_lake.py runs it in a session that is already there ----------


def test_the_first_half_of_the_demo_loads_no_spark_and_the_second_says_what_to_install() -> None:
    """In an interpreter of its own, in which PySpark cannot be found."""
    program = (
        "import sys, taskharbor.demo.run, taskharbor.demo.analysis\n"
        "print(sys.modules.keys().isdisjoint(['pyspark', 'pandas', 'pyarrow']))\n"
        "sys.modules['pyspark'] = None\n"
        "print(taskharbor.demo.analysis.missing())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    is_clean, line = ran.stdout.splitlines()
    assert is_clean == "True"
    assert "pip install 'taskharbor[spark]'" in line
    assert ran.stderr == ""


def test_the_verdict_is_a_sentence() -> None:
    """Of a clean run it is in the report: tests/spark/test_lake.py."""
    kinds = {"overlapping leases": 1}
    found = Analysis(report="r.html", leases=3504, jobs=2858, violations=kinds, seconds=1.0)
    assert not found.is_clean
    assert found.verdict == "Violations in 3,504 leases of 2,858 jobs: 1 overlapping leases."
