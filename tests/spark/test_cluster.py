"""Executors that are processes of their own: local-cluster, spark-submit, a real standalone cluster.

One JVM per process, so every driver here is a program of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from needing import need
from spark import clusters
from spark.stores import enqueue, job_counts, payloads, staged_rows
from taskharbor import Client, JobState, Outcome
from taskharbor.demo.run import overlapping_leases
from taskharbor.drivers.contract import JobFilter
from taskharbor.spark.audit import audit_store
from taskharbor.spark.session import SparkUnavailable, check

HERE = Path(__file__).parent
APP = "worker_app:harbor"
SHIP = ["--py-files", str(HERE / "worker_app.py")]
PROGRAMS = [sys.executable, str(HERE / "programs.py")]
SETTINGS = json.dumps(clusters.EXECUTOR_SETTINGS)

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(400),  # Half a dozen JVMs, on a machine that may do something else as well.
]


@pytest.fixture(scope="module", autouse=True)
def spark_is_here() -> None:
    try:
        check()
    except SparkUnavailable as error:
        need(str(error))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a driver runs: it finds the app here, and executors elsewhere find what was shipped."""
    shutil.copy(HERE / "worker_app.py", tmp_path)
    return tmp_path


def numbers(count: int) -> list[dict[str, int]]:
    return [{"number": n} for n in range(count)]


def kill_an_executor(client: Client, driver: subprocess.Popen[str], *, after: int, before: int) -> None:
    """When both are at work: then one's death leaves jobs behind, and another to take them."""
    leased = JobFilter(queue="default", states=frozenset({JobState.INFLIGHT}))
    for _ in clusters.looks():
        at_work = {job.worker for job in client.list_jobs(leased, limit=500).jobs}
        if client.stats("default")[0].done_total >= after and len(at_work) == 2:
            break
        assert driver.poll() is None
    both = clusters.executors()
    assert len(both) == 2
    os.kill(both[0], signal.SIGKILL)
    assert client.stats("default")[0].done_total < before, "killed too late to show anything"


def check_that_every_job_ended_once(client: Client, ids: list[str], *, one_was_killed: bool) -> None:
    """By the attempt log: one done row each, leases that never overlap, fences that grow."""
    log = client.read_attempts(limit=100_000).attempts
    known = set(ids)
    ours = [row for row in log if row.job_id in known]
    assert Counter(row.job_id for row in ours if row.outcome is Outcome.DONE) == Counter(ids)
    assert overlapping_leases(ours) == 0
    fences: Counter[str] = Counter()
    for row in ours:
        assert row.fence > fences[row.job_id]
        fences[row.job_id] = row.fence
    assert job_counts(client) == {JobState.DONE: len(ids)}
    expired = {row.worker for row in log if row.outcome is Outcome.EXPIRED}
    assert len(expired) == one_was_killed, "the killed executor held no job"


def test_a_local_cluster_outlives_an_executor_and_stops(folder: Path, client: Client, url: str) -> None:
    """Ctrl-C stops its workers gracefully."""
    ids = enqueue(client, "count", numbers(300)) + enqueue(client, "tally", numbers(700))
    ids += enqueue(client, "dwell", [{"seconds": 0.02}] * 1500)
    waiting = enqueue(client, "dwell", [{"seconds": 0.05}] * 2000, queue="later")
    arguments = ["drain", "local-cluster[2,1,512]", url, str(HERE / "worker_app.py"), SETTINGS]
    with clusters.program(*PROGRAMS, *arguments, folder=folder) as driver:
        kill_an_executor(client, driver, after=1100, before=2400)
        drained, stopped, cancelled, done = json.loads(clusters.finish(driver))
    check_that_every_job_ended_once(client, ids, one_was_killed=True)
    assert (drained, stopped, cancelled) == (2500, True, False)
    assert 10 <= done < len(waiting)
    # Nothing is left under way: what ran was finished, and what waited was given back.
    assert job_counts(client, "later") == {JobState.DONE: done, JobState.READY: len(waiting) - done}


@pytest.mark.slow
def test_an_executor_of_a_standalone_cluster_killed_in_the_middle_of_5000_jobs_costs_none_of_them(
    folder: Path, client: Client, url: str, request: pytest.FixtureRequest
) -> None:
    ids = enqueue(client, "dwell", [{"seconds": 0.02}] * 5000)
    with clusters.standalone(folder, cores=1) as master:
        arguments = ["--url", url, "--master", master, "--workers", "2", "--json", *SHIP]
        bounds = ["--until-empty", "--lease", "2s", "--poll-interval", "200ms"]
        confs = clusters.conf_arguments(clusters.EXECUTOR_SETTINGS)
        cli = [sys.executable, "-m", "taskharbor", "spark-worker", APP]
        with clusters.program(*cli, *arguments, *bounds, *confs, folder=folder) as driver:
            kill_an_executor(client, driver, after=1000, before=4500)
            summary = json.loads(clusters.finish(driver))
    check_that_every_job_ended_once(client, ids, one_was_killed=True)
    assert (summary["ended"], len(summary["workers"])) == (5000, 2)
    # Not before: a session takes memory that the cluster needs.
    audited = audit_store(request.getfixturevalue("spark"), url)
    assert audited.is_clean, audited.examples
    assert audited.jobs == 5000


def test_spark_submit_runs_the_same_command(folder: Path, client: Client, url: str) -> None:
    ids = enqueue(client, "count", numbers(500))
    (folder / "drain.py").write_text("from taskharbor.cli import main\n\nmain()\n")
    quiet = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": clusters.SMALL_JVM}
    submit = [str(clusters.HOME / "bin" / "spark-submit"), "--master", "local[2]", *SHIP]
    bounds = ["--until-empty", "--poll-interval", "200ms", "--json"]
    command = [*clusters.conf_arguments(quiet), "drain.py", "spark-worker", APP, "--url", url, *bounds]
    with clusters.program(*submit, *command, folder=folder) as driver:
        summary = json.loads(clusters.finish(driver))
    assert (summary["done"], summary["lost"], len(summary["workers"])) == (500, 0, 2)
    check_that_every_job_ended_once(client, ids, one_was_killed=False)


@pytest.mark.slow
def test_of_a_task_that_runs_twice_one_copy_counts(postgres_url: str, url: str, folder: Path) -> None:
    """With speculation on: Spark starts a second copy of the straggler, and a task dies as well."""
    rows, urls = 12_000, [postgres_url, url]
    with clusters.standalone(folder) as master:
        arguments = ["speculate", master, str(folder), str(rows), SETTINGS, *urls]
        with clusters.program(*PROGRAMS, *arguments, folder=folder) as driver:
            clusters.finish(driver)
    for number, written in enumerate(urls):
        for partition in (1, 3):
            assert len(list((folder / str(number)).glob(f"{partition}.*"))) >= 2
        assert payloads(written) == list(range(rows))
        assert staged_rows(written) == 0
