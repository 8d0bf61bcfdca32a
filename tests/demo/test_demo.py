"""The demo: its judgement must see what it claims to see. And the demo itself, small: real workers, a real kill."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from records import make_record
from taskharbor.client import Client
from taskharbor.demo import run as demo
from taskharbor.demo.analysis import Analysis
from taskharbor.jobs import Attempt, JobRecord, JobState, Outcome

STATES = {Outcome.EXPIRED: JobState.READY, Outcome.RETRIED: JobState.SCHEDULED}
"""States after outcomes of another name."""


def row(job_id: str, start: int | None, end: int, outcome: Outcome = Outcome.DONE, **changes: Any) -> Attempt:
    about = {"seq": 0, "job_id": job_id, "queue": "default", "type": "send_mail", "key": None, "priority": 0}
    expires = None if start is None else start + 100
    lease = {"fence": 1, "worker": "w", "reserved_at_us": start, "lease_expires_at_us": expires}
    times = {"created_at_us": 0, "run_at_us": 0, "ended_at_us": end}
    state = STATES.get(outcome) or JobState(outcome)
    return Attempt(**{**about, **lease, **times, "outcome": outcome, "state": state, **changes})


def job(job_id: str, state: JobState = JobState.DONE, **changes: Any) -> JobRecord:
    return make_record(job_id, **{"type": "send_mail", "state": state, **changes})


def verdict(jobs: list[JobRecord], rows: list[Attempt], accepted: Sequence[str] = ()) -> demo.DemoVerdict:
    return demo.judge(accepted or [one.id for one in jobs], {one.id: one for one in jobs}, rows, {"c"})


def test_all_is_well() -> None:
    jobs = [job("a"), job("b"), job("c", JobState.CANCELLED), job("d", JobState.DEAD, type="charge_card")]
    rows = [row("a", 1, 5), row("b", 1, 300, Outcome.EXPIRED), row("b", 101, 110)]
    rows += [row("c", None, 7, Outcome.CANCELLED), row("d", 1, 2, Outcome.DEAD)]
    found = verdict(jobs, rows)
    assert found.well
    assert (found.accepted, found.done, found.dead, found.cancelled, found.expired) == (4, 2, 1, 1, 1)
    assert found.executions == 4


@pytest.mark.parametrize(
    ("fault", "jobs", "rows", "accepted"),
    [
        ("lost", [job("a", JobState.INFLIGHT)], [], []),
        ("lost", [], [], ["gone"]),
        ("doubled", [job("a")], [row("a", 1, 5), row("a", 6, 7)], []),
        ("unlogged", [job("a")], [], []),
        ("unexpected", [job("a", JobState.DEAD)], [row("a", 1, 5, Outcome.DEAD)], []),
        ("unexpected", [job("c")], [row("c", 1, 5)], []),
        ("overlapping_leases", [job("a")], [row("a", 1, 50, Outcome.RETRIED), row("a", 49, 60)], []),
    ],
)
def test_a_fault_is_seen(fault: str, jobs: list[JobRecord], rows: list[Attempt], accepted: list[str]) -> None:
    found = verdict(jobs, rows, accepted)
    assert getattr(found, fault) == 1
    assert not found.well


def test_too_many_at_once_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.demo.run.API_LIMIT", 2)

    def found(*leases: Attempt) -> tuple[int, bool]:
        jobs = [job(name, queue="api", type="call_api") for name in {one.job_id for one in leases}]
        told = verdict(jobs, list(leases))
        return told.w_max_overlap, told.well

    def api(job_id: str, start: int, end: int, outcome: Outcome = Outcome.DONE) -> Attempt:
        return row(job_id, start, end, outcome, queue="api")

    assert found(api("a", 1, 5), api("b", 2, 6), api("x", 5, 9)) == (2, True)
    assert found(api("a", 1, 5), api("b", 2, 6), api("x", 4, 9)) == (3, False)
    # A killed worker's lease counts until it ran out, not until somebody noticed.
    killed = api("a", 1, 900, Outcome.EXPIRED)
    assert found(killed, api("a", 110, 120), api("b", 100, 120), api("x", 50, 60)) == (2, True)
    assert found(killed, api("a", 110, 120), api("b", 100, 120), api("x", 105, 111)) == (3, False)
    # Only the limited queue is counted.
    assert found(api("a", 1, 5), api("b", 1, 5), row("x", 1, 5)) == (2, True)


def test_leases_touch_but_do_not_overlap() -> None:
    assert demo.overlapping_leases([row("a", 0, 10), row("a", 10, 20)]) == 0
    assert demo.overlapping_leases([row("a", 0, 500, Outcome.EXPIRED), row("a", 100, 120)]) == 0
    assert demo.overlapping_leases([row("a", 0, 10), row("b", 0, 10)]) == 0
    assert demo.overlapping_leases([row("a", 0, 30), row("a", 10, 40), row("a", 20, 50)]) == 3
    assert demo.most_at_once([(0, 10), (10, 20), (5, 15), (3, 3)]) == 2
    assert demo.most_at_once([]) == 0


def test_recovery_counts_what_was_taken_up_after_the_kill() -> None:
    rows = [row("a", 10, 120, Outcome.EXPIRED), row("a", 120, 130), row("b", 10, 20), row("c", 150, 160)]
    assert demo.recovery(["a", "c"], rows, killed_at=50) == (2, 100)
    assert demo.recovery(["b"], rows, killed_at=50) == (0, 0)
    # A job whose last execution was killed needs nobody to take it up.
    dead = row("a", 10, 120, Outcome.EXPIRED, state=JobState.DEAD)
    assert demo.recovery(["a"], [dead], killed_at=50) == (1, 70)


def test_the_same_seed_makes_the_same_workload() -> None:
    one, same, other = demo.make_workload(500, 7), demo.make_workload(500, 7), demo.make_workload(500, 8)
    assert one == same
    assert one != other
    assert len(one.first) + len(one.unwanted) + sum(map(len, one.waves)) == 500


# -- the demo itself ------------------------------------------------------------------------------------------


def run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taskharbor", "demo", "--jobs", "400", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_ends_with_one_json_object_and_nothing_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run_demo("--json", "--queue-only")
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


def test_tells_a_newcomer_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line. It keeps the database on request."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    done = run_demo("--keep", "--seed", "2", "--report", str(tmp_path / "report.html"))
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
        workers = demo.WorkerProcesses(Path(folder), "nonsense://", ("w",))
        with workers.running():
            workers._processes["w"].wait(timeout=60)
            with pytest.raises(demo.WorkerGone, match="no installed driver"):
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
