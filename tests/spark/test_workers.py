"""Workers inside Spark tasks, on a local session: drains, stops, losses, and what is said when it cannot work."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark.stores import enqueue, job_counts
from taskharbor import Client, InvalidRequest, JobState, Outcome
from taskharbor.cli.options import Invocation
from taskharbor.cli.root import root
from taskharbor.cli.worker import show_summary
from taskharbor.drivers.contract import JobFilter
from taskharbor.requests import new_id
from taskharbor.spark.workers import ExecutorWorker, Progress, ask_to_stop, run_on_executors
from taskharbor.spark.workers.launcher import DrainSummary, WorkersFailed, absolute_url
from taskharbor.spark.workers.stop_mark import QUEUE, clear_mark, is_marked

APP = "worker_app:harbor"


@pytest.fixture(scope="module")
def shipped(spark: SparkSession) -> SparkSession:
    """The session, with the app's code where its executors find it."""
    spark.sparkContext.addPyFile(str(Path(__file__).with_name("worker_app.py")))
    return spark


def test_executors_drain_a_queue(shipped: SparkSession, client: Client, url: str) -> None:
    """Every job ends once."""
    enqueue(client, "count", [{"number": n} for n in range(500)])
    enqueue(client, "tally", [{"number": n} for n in range(1500)])
    failing = enqueue(client, "odd_fails", [{"number": n} for n in range(20)], max_attempts=2)
    looks: list[Progress] = []
    options: Any = {"workers": 2, "until_empty": True, "poll_interval": 0.2}
    summary = run_on_executors(shipped, APP, url, progress=looks.append, **options)
    assert job_counts(client) == {JobState.DONE: 2010, JobState.DEAD: 10}
    assert (summary.done, summary.failed, summary.ended, summary.lost) == (2010, 20, 2020, 0)
    assert [worker.number for worker in summary.workers] == [0, 1]
    assert all(worker.host and worker.seconds > 0 for worker in summary.workers)
    assert not summary.stopped
    assert (looks[-1].ended, looks[-1].waiting, looks[-1].workers) == (2020, 0, 0)
    assert [one.outcome for one in client.job_attempts(failing[1])] == [Outcome.RETRIED, Outcome.DEAD]
    page = client.read_attempts(limit=5000)
    assert len({one.job_id for one in page.attempts if one.outcome is Outcome.DONE}) == 2010
    assert len(page.attempts) == 2030


def test_bounds_hold_for_each_worker(shipped: SparkSession, client: Client, url: str) -> None:
    enqueue(client, "count", [{"number": n} for n in range(100)])
    summary = run_on_executors(shipped, APP, url, workers=2, max_jobs=7)
    assert [worker.done for worker in summary.workers] == [7, 7]
    # Unbounded otherwise: that it ends is what is shown.
    summary = run_on_executors(shipped, APP, url, workers=1, max_seconds=0.5)
    assert summary.seconds >= 0.5
    left = job_counts(client)
    assert (left.pop(JobState.DONE), left.pop(JobState.READY, 0)) == (14 + summary.ended, 86 - summary.ended)
    assert left == {}


def test_a_stop_is_graceful_and_leaves_no_mark(shipped: SparkSession, client: Client, url: str) -> None:
    """By somebody who knows the run's name. By the caller: test_cluster.py."""
    ids = enqueue(client, "dwell", [{"seconds": 0.02}] * 1000)
    runs: list[str] = []
    options: Any = {"workers": 2, "concurrency": 2, "prefetch": 0}

    def progress(now: Progress) -> None:
        if now.ended >= 20 and not now.stopping:
            ask_to_stop(url, runs[0])

    options["started"] = lambda run, _: runs.append(run)
    summary = run_on_executors(shipped, APP, url, progress=progress, **options)
    assert summary.stopped
    assert not summary.cancelled
    assert 20 <= summary.done < 1000
    # What ran was finished, and what waited was given back: nobody waits for a lease to expire.
    assert job_counts(client) == {JobState.DONE: summary.done, JobState.READY: 1000 - summary.done}
    assert all(job is not None and job.stalls == 0 for job in client.get_many(ids))
    assert client.list_jobs(JobFilter(queue=QUEUE)).jobs == []


def test_tasks_that_do_not_stop_in_time_are_cancelled_and_their_jobs_run_again(
    shipped: SparkSession, client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskharbor.spark.workers.launcher._AFTER_GRACE", 0.0)
    (job_id,) = enqueue(client, "dwell", [{"seconds": 120.0}])
    stop = threading.Event()

    def progress(now: Progress) -> None:
        if now.inflight:
            stop.set()

    options: Any = {"workers": 1, "lease": 1.0, "poll_interval": 0.2}
    # A grace period that the driver does not wait for: the worker itself would wait for its handler.
    monkeypatch.setattr("taskharbor.spark.workers.launcher._WorkerRun._mark", lambda run, client: False)
    summary = run_on_executors(shipped, APP, url, stop=stop, progress=progress, **options)
    assert summary.cancelled
    assert (summary.workers[0].lost, summary.workers[0].host) == (1, "")
    monkeypatch.undo()
    assert client.get(job_id).state is JobState.INFLIGHT
    client.cancel(job_id)
    # Cancelled when the lease is over, by whoever comes next.
    run_on_executors(shipped, APP, url, until_empty=True, **options)
    assert client.get(job_id).state is JobState.CANCELLED


def test_a_dead_task_is_begun_anew(shipped: SparkSession, client: Client, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "deaths"
    folder.mkdir()
    # The session tries a task three times: with the third death the whole Spark job has failed.
    (deadly,) = enqueue(client, "deadly", [{"folder": str(folder), "deaths": 3}], max_attempts=20)
    ids = enqueue(client, "count", [{"number": n} for n in range(200)])
    options: Any = {"workers": 1, "concurrency": 1, "lease": 1.0, "poll_interval": 0.2}
    summary = run_on_executors(shipped, APP, url, until_empty=True, **options)
    assert (summary.workers[0].submitted, summary.workers[0].lost) == (2, 1)
    assert summary.ended == 201
    assert client.get(deadly).stalls == 3
    for job_id in ids:
        outcomes = [one.outcome for one in client.job_attempts(job_id)]
        assert outcomes[-1] is Outcome.DONE
        # Jobs that were leased ahead go back before a job runs alone.
        assert set(outcomes[:-1]) <= {Outcome.EXPIRED, Outcome.RELEASED}


def test_an_app_that_executors_cannot_import_is_an_error_and_not_tried_for_ever(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from taskharbor import Harbor\n\nharbor = Harbor('memory://')\n\n\n@harbor.job\ndef work() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkersFailed, match=r"no module named 'only_here'.*ship it with --py-files"):
        run_on_executors(spark, "only_here:harbor", url, workers=1, until_empty=True)


def test_the_command_line_stops_a_run_and_says_what_is_wrong(url: str, client: Client) -> None:
    run = new_id()
    asked = CliRunner().invoke(root, ["spark-worker", "--stop", run, "--url", url, "--json"])
    assert (asked.exit_code, json.loads(asked.stdout)) == (0, {"run": run, "asked_to_stop": True})
    assert is_marked(client, run)
    assert client.stats(QUEUE)[0].counts[JobState.READY] == 0
    clear_mark(client, run)
    assert not is_marked(client, run)
    without = CliRunner().invoke(root, ["spark-worker"])
    assert (without.exit_code, "name it like jobs:harbor" in without.output) == (2, True)
    odd = CliRunner().invoke(root, ["spark-worker", APP, "--conf", "nonsense"])
    assert (odd.exit_code, "spark.executor.memory=1g" in odd.output) == (2, True)


def test_the_summary_is_a_table_or_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"done": 7, "retried": 1, "dead": 2}
    workers = [ExecutorWorker(number=0, host="node1", outcomes=ended, seconds=1.5)]
    workers += [ExecutorWorker(number=1, submitted=2, lost=2)]
    summary = DrainSummary(run="r", workers=workers, ended=12, seconds=2.0, stopped=True, cancelled=True)
    show_summary(Invocation(), summary)
    shown = capsys.readouterr().out
    parts = ("node1     7       3     0      1.5", "12 jobs ended meanwhile", "cancelled")
    assert [part for part in parts if part not in shown] == []
    show_summary(Invocation(json=True), summary)
    document = json.loads(capsys.readouterr().out)
    assert (document["done"], document["failed"], document["lost"], document["ended"]) == (7, 3, 2, 12)
    assert document["workers"][1]["host"] == ""


def test_options_are_checked_before_anything_is_submitted(shipped: SparkSession, url: str) -> None:
    with pytest.raises(InvalidRequest, match="memory of one process"):
        run_on_executors(shipped, APP, "memory://")
    with pytest.raises(InvalidRequest, match="at least 1"):
        run_on_executors(shipped, APP, url, workers=0)
    with pytest.raises(InvalidRequest, match=r"lease of 0\.1 s"):
        run_on_executors(shipped, APP, url, lease=0.1)


def test_files_are_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors run in another folder."""
    monkeypatch.chdir(tmp_path)
    assert absolute_url("sqlite:///jobs.db?lock=1") == f"sqlite:///{tmp_path}/jobs.db?lock=1"
    for url in ("sqlite:////var/jobs.db", "postgresql://host/name"):
        assert absolute_url(url) == url
