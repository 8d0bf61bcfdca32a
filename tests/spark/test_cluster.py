"""Workers on executors that are processes of their own: local-cluster, a real standalone cluster, spark-submit.

One JVM per process, so every driver here is a program of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from needing import need
from spark.clusters import (
    EXECUTOR_SETTINGS,
    HOME,
    PATIENCE,
    SMALL_JVM,
    Standalone,
    conf_arguments,
    looks,
    program,
)
from taskharbor import Attempt, Client, JobRequest, JobState, Outcome
from taskharbor.drivers.contract import JobFilter
from taskharbor.spark.audit.run import audit_store
from taskharbor.spark.session import SparkUnavailable, check

HERE = Path(__file__).parent
APP = "worker_app:harbor"
CLI = [sys.executable, "-m", "taskharbor", "spark-worker", APP]
SHIP = ["--py-files", str(HERE / "worker_app.py")]

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


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def enqueue(client: Client, type: str, count: int, **payload: object) -> set[str]:
    requests = [JobRequest(type=type, payload=payload or {"number": n}) for n in range(count)]
    return {one.id for one in client.enqueue_many(requests)}


def history(client: Client) -> list[Attempt]:
    rows: list[Attempt] = []
    cursor: str | None = None
    while (page := client.read_attempts(after=cursor, limit=5000)).attempts:
        rows += page.attempts
        cursor = page.cursor
    return rows


def at_work(client: Client) -> set[str | None]:
    leased = JobFilter(queue="default", states=frozenset({JobState.INFLIGHT}))
    return {job.worker for job in client.list_jobs(leased, limit=500).jobs}


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors[-3000:]
    return output, errors


def check_that_every_job_ended_once(client: Client, ids: set[str]) -> dict[str, list[Attempt]]:
    """By the attempt log: one done row each, leases that never overlap, fences that grow."""
    by_job: dict[str, list[Attempt]] = defaultdict(list)
    for row in history(client):
        by_job[row.job_id].append(row)
    assert set(by_job) == ids
    for rows in by_job.values():
        assert [row.outcome for row in rows].count(Outcome.DONE) == 1
        assert rows[-1].outcome is Outcome.DONE
        for earlier, later in itertools.pairwise(rows):
            assert later.fence > earlier.fence
            assert later.reserved_at_us is not None
            # An expired lease was valid until its expiry, whenever that was noticed.
            assert later.reserved_at_us >= min(earlier.ended_at_us, earlier.lease_expires_at_us or 0)
    (stats,) = client.stats("default")
    assert {state: count for state, count in stats.counts.items() if count} == {JobState.DONE: len(ids)}
    return by_job


def test_an_executor_killed_in_the_middle_of_5000_jobs_costs_none_of_them(
    folder: Path, client: Client, url: str, request: pytest.FixtureRequest
) -> None:
    ids = enqueue(client, "dwell", 5000, seconds=0.02)
    with Standalone(folder) as cluster:
        arguments = [*CLI, "--url", url, "--master", cluster.url, "--workers", "2", "--json", *SHIP]
        bounds = ["--until-empty", "--lease", "2s", "--poll-interval", "200ms"]
        with program([*arguments, *bounds, *conf_arguments()], folder) as driver:
            for _ in looks():
                # Both at work: then one executor's death leaves jobs behind, and another to take them.
                if client.stats("default")[0].done_total >= 1000 and len(at_work(client)) == 2:
                    break
                assert driver.poll() is None
            executors = cluster.executors()
            assert len(executors) == 2
            os.kill(executors[0], signal.SIGKILL)
            assert client.stats("default")[0].done_total < 4500, "killed too late to show anything"
            summary = json.loads(finish(driver)[0])
    by_job = check_that_every_job_ended_once(client, ids)
    expired = [row for rows in by_job.values() for row in rows if row.outcome is Outcome.EXPIRED]
    assert expired, "the killed executor held no job"
    assert len({row.worker for row in expired}) == 1
    assert summary["ended"] == 5000
    assert len(summary["workers"]) == 2
    # Not before: a session takes memory that the cluster needs.
    audited = audit_store(request.getfixturevalue("spark"), url)
    assert audited.is_clean, audited.examples
    assert (audited.jobs, audited.rows) == (5000, sum(map(len, by_job.values())))
    print(f"{len(expired)} leases of the killed executor expired; {summary['seconds']} s")


LOCAL_CLUSTER = """
import json, os, signal, sys
from taskharbor.drivers.contract import JobFilter
from taskharbor.spark.audit.run import audit_store
from taskharbor.spark.session import local_session
from taskharbor.spark.workers import run_on_executors

app, url, file, settings = sys.argv[1:]
spark = local_session(master="local-cluster[2,1,512]", settings=json.loads(settings))
spark.sparkContext.addPyFile(file)
drained = run_on_executors(spark, app, url, workers=2, types=["count", "tally"], until_empty=True, poll_interval=0.2)
interrupted = []

def progress(now):
    if now.ended >= 10 and not interrupted:
        interrupted.append(now.ended)
        os.kill(os.getpid(), signal.SIGINT)

stopped = run_on_executors(spark, app, url, workers=2, concurrency=1, prefetch=0, types=["dwell"], progress=progress)
spark.stop()
names = {worker.name for worker in drained.workers}
print(json.dumps([drained.done, len(names), stopped.stopped, stopped.cancelled, stopped.done]))
"""


def test_a_local_cluster_drains_and_ctrl_c_on_the_driver_stops_its_workers_gracefully(
    folder: Path, client: Client, url: str
) -> None:
    enqueue(client, "count", 300)
    enqueue(client, "tally", 700)
    waiting = enqueue(client, "dwell", 2000, seconds=0.05)
    (folder / "driver.py").write_text(LOCAL_CLUSTER)
    settings = {key: value for key, value in EXECUTOR_SETTINGS.items() if "cores" not in key}
    arguments = [sys.executable, "driver.py", APP, url, str(HERE / "worker_app.py"), json.dumps(settings)]
    with program(arguments, folder) as driver:
        drained, workers, stopped, cancelled, done = json.loads(finish(driver)[0])
    assert (drained, workers) == (1000, 2)
    assert (stopped, cancelled) == (True, False)
    assert 10 <= done < len(waiting)
    (stats,) = client.stats("default")
    # Nothing is left under way: what ran was finished, and what waited was given back.
    assert {state: count for state, count in stats.counts.items() if count} == {
        JobState.DONE: 1000 + done,
        JobState.READY: len(waiting) - done,
    }


def test_spark_submit_runs_the_same_command(folder: Path, client: Client, url: str) -> None:
    ids = enqueue(client, "count", 500)
    (folder / "drain.py").write_text("from taskharbor.cli import main\n\nmain()\n")
    submit = [str(HOME / "bin" / "spark-submit"), "--master", "local[2]", *SHIP]
    quiet = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": SMALL_JVM,
    }
    command = [
        "drain.py",
        "spark-worker",
        APP,
        "--url",
        url,
        "--until-empty",
        "--poll-interval",
        "200ms",
        "--json",
    ]
    with program([*submit, *conf_arguments(quiet), *command], folder) as driver:
        output, _ = finish(driver)
    summary = json.loads(output)
    assert (summary["done"], summary["lost"], len(summary["workers"])) == (500, 0, 2)
    check_that_every_job_ended_once(client, ids)
