"""The dead letters: round again, or gone."""

from __future__ import annotations

import json

import pytest

from cli.cli_harness import Run, kill, lines
from taskharbor.client import Client
from taskharbor.jobs import SECOND, JobRequest, JobState, to_datetime


@pytest.fixture
def dead(client: Client) -> list[str]:
    ids = [client.enqueue(JobRequest(type=type)).id for type in ("even", "odd") * 2]
    for job_id in ids:
        kill(client, job_id)
    return ids


def states(client: Client, ids: list[str]) -> list[JobState | None]:
    return [None if record is None else record.state for record in client.get_many(ids)]


def test_list(run: Run, dead: list[str]) -> None:
    assert [job["id"] for job in lines(run("dlq", "--json"))] == dead[::-1]
    assert [job["id"] for job in lines(run("dlq", "list", "--type", "odd", "--json"))] == [dead[3], dead[1]]
    assert "ValueError: no good" in run("dlq", "list").stdout


def test_requeue_by_id(run: Run, client: Client, dead: list[str]) -> None:
    assert "ready again" in run("dlq", "requeue", dead[0]).stdout
    assert states(client, dead) == [JobState.READY, *[JobState.DEAD] * 3]
    assert "only a dead job" in run("dlq", "requeue", dead[0], code=1).stderr


@pytest.mark.parametrize("choice", ["--all", "--type odd", "--queue default"])
def test_requeue_by_selection(run: Run, client: Client, dead: list[str], choice: str) -> None:
    count = 2 if choice == "--type odd" else 4
    told = json.loads(run("dlq", "requeue", *choice.split(), "--json").stdout)
    assert told == {"requeued": count, "kept": []}
    assert states(client, dead).count(JobState.READY) == count


def test_requeue_at_a_time_with_the_counts_or_only_as_a_try(
    run: Run, client: Client, dead: list[str]
) -> None:
    assert "4 would be requeued" in run("dlq", "requeue", "--all", "--dry-run").stdout
    tried = run("dlq", "requeue", dead[0], "nobody", "--dry-run", "--json").stdout
    assert (json.loads(tried), states(client, dead)) == ({"dead": [dead[0]]}, [JobState.DEAD] * 4)
    assert (
        "scheduled" in run("dlq", "requeue", dead[0], "--run-at", "2100-01-01T00:00Z", "--keep-counts").stdout
    )
    run("dlq", "requeue", "--all", "--delay", "2h")
    records = [client.get(job_id) for job_id in dead]
    assert [job.state for job in records] == [JobState.SCHEDULED] * 4
    assert [job.attempts for job in records] == [1, 0, 0, 0]
    assert to_datetime(records[0].run_at_us).year == 2100
    assert 7190 < (records[1].run_at_us - client.now()) / SECOND <= 7200
    assert (
        "either --delay or --run-at"
        in run("dlq", "requeue", "x", "--run-at", "2100-01-01", "--delay", "1", code=2).stderr
    )


def test_purge_asks_first(run: Run, client: Client, dead: list[str]) -> None:
    assert "Remove 4 dead jobs" in run("dlq", "purge", "--all", input="n\n", code=1).stderr
    assert states(client, dead) == [JobState.DEAD] * 4
    assert "4 removed" in run("dlq", "purge", "--all", input="y\n").stdout
    assert states(client, dead) == [None] * 4
    assert "nothing was removed" in run("dlq", "purge", "--all").stdout


def test_purge_selects(run: Run, client: Client, dead: list[str]) -> None:
    assert "say which: a selection by --all" in run("dlq", "purge", code=2).stderr
    assert "--yes" in run("dlq", "purge", "--all", "--json", code=2).stderr
    assert json.loads(run("dlq", "purge", "--older-than", "1h", "--yes", "--json").stdout) == {"removed": 0}
    assert json.loads(run("dlq", "purge", "--type", "odd", "--yes", "--json").stdout) == {"removed": 2}
    assert states(client, dead) == [JobState.DEAD, None, JobState.DEAD, None]
