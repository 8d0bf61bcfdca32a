"""list, inspect, stats, queues: what they show, and that it fits."""

from __future__ import annotations

import json

import pytest

from cli.cli_harness import Run, kill, lease, lines
from taskharbor.client import Client, portal
from taskharbor.drivers.contract import QueueSettings
from taskharbor.errors import JobNotFound
from taskharbor.jobs import JobRequest, JobState


@pytest.fixture
def some_jobs(client: Client) -> list[str]:
    dead = client.enqueue(JobRequest(type="a_type_with_quite_a_long_name", payload={"n": 1}, priority=9)).id
    kill(client, dead, "a reason that is much too long for one line of a terminal, so it must be cut")
    ready = client.enqueue(JobRequest(type="ready", payload=[1, 2], queue="a-queue-with-a-long-name-too")).id
    later = client.enqueue(JobRequest(type="later", delay=3600.0, key="k", headers={"trace": "x"})).id
    return [dead, ready, later]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_and_show_whole_ids(run: Run, some_jobs: list[str], width: int) -> None:
    def shown(*command: str) -> str:
        return run(*command, env={"COLUMNS": str(width)}).stdout

    listing, dead = shown("list"), shown("dlq", "list")
    shown_parts = [*some_jobs, "sched", "  ValueError: a reason", "  k"]
    shown_parts += ["a-queu", "in 59 m", "now"] if width > 60 else []
    assert [part for part in shown_parts if part not in listing] == []
    assert [part for part in (some_jobs[0], "ValueError: a reason") if part not in dead] == []
    assert "cancelled" not in listing
    # Errors and payloads above it are left to the terminal to wrap: they are there to be copied.
    timeline = shown("inspect", some_jobs[0]).partition("timeline")[2]
    assert "ValueError: a" in timeline
    assert ("w-1" in timeline) == (width > 60)
    texts = [listing, dead, shown("stats"), shown("queues"), timeline]
    assert [line for text in texts for line in text.splitlines() if len(line.rstrip()) > width] == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], [2, 1, 0]),
        (["--state", "dead"], [0]),
        (["--state", "dead", "--state", "scheduled"], [2, 0]),
        (["--queue", "a-queue-with-a-long-name-too"], [1]),
        (["--type", "later", "--type", "ready"], [2, 1]),
        *((["--key", "k"], [2]), (["--key", "nobody"], [])),
    ],
)
def test_list_filters(run: Run, some_jobs: list[str], args: list[str], expected: list[int]) -> None:
    listed = [job["id"] for job in lines(run("list", "--json", *args))]
    assert listed == [some_jobs[number] for number in expected]
    shown = run("list", *args)
    # Piped, so not cut.
    assert ("a_type_with_quite_a_long_name" in shown.stdout) == (0 in expected)
    assert ("no jobs match" in shown.stderr) == (not expected)


def test_list_goes_on_with_a_cursor(run: Run, client: Client) -> None:
    ids = [one.id for one in client.enqueue_many(JobRequest(type="a") for _ in range(7))]
    found, more = list[str](), list[str]()
    for _ in range(4):
        result = run("list", "--json", "--limit", "2", *more)
        listed = lines(result)
        found += [job["id"] for job in listed if "id" in job]
        assert result.stderr == ""
        if "cursor" not in listed[-1]:
            break
        more = ["--cursor", listed[-1]["cursor"]]
    assert found == ids[::-1]
    assert len(lines(run("list", "--all", "--limit", "2", "--json"))) == 7
    cut = run("list", "--json", "--payload", "--limit", "2").stdout
    assert "line 3: the listing stopped here" in run("enqueue", "--from", "-", input=cut, code=2).stderr
    assert "--payload needs --json" in run("list", "--payload", code=2).stderr


def test_payloads_and_tokens_stay_out_of_listings(run: Run, client: Client) -> None:
    job_id = client.enqueue(JobRequest(type="a", payload={"secret": 1})).id
    token = lease(client).token or ""
    shown = run("list", "--json").stdout + run("inspect", job_id, "--no-payload", "--json").stdout
    assert "secret" not in shown
    assert "secret" in run("list", "--json", "--payload").stdout
    assert token not in shown + run("inspect", job_id).stdout + run("inspect", job_id, "--json").stdout


def test_inspect_shows_a_dead_job_with_its_timeline(run: Run, some_jobs: list[str]) -> None:
    shown = run("inspect", some_jobs[0]).stdout
    parts = ("dead", '{"n":1}', "ValueError: a reason", "Traceback", "1 of 5 spent", "timeline", "priority")
    assert [part for part in parts if part not in shown] == []
    document, other = lines(run("inspect", *some_jobs[:2], "--json"))
    assert (document["payload"], other["payload"]) == ({"n": 1}, [1, 2])
    assert run("inspect", *some_jobs[:2]).stdout.count("timeline") == 2
    assert [row["outcome"] for row in document["timeline"]] == ["dead"]


def test_inspect_shows_the_jobs_there_are_and_names_each_unknown_id(run: Run, some_jobs: list[str]) -> None:
    told = run("inspect", "no", some_jobs[0], "nope", "--json", code=1)
    assert [job["id"] for job in lines(told)] == some_jobs[:1]
    refused = [json.loads(line) for line in told.stderr.splitlines()]
    assert [(one["id"], one["error"]["code"]) for one in refused] == [
        ("no", "job_not_found"),
        ("nope", "job_not_found"),
    ]
    told = run("inspect", "no", some_jobs[0], "nope", code=1)
    assert (told.stdout.count("timeline"), told.stderr.count("no job with this id")) == (1, 2)


def test_inspect_shows_a_waiting_and_a_running_job(run: Run, client: Client) -> None:
    request = JobRequest(type="a", payload="x" * 5000, key="k", headers={"trace": "abc"}, timeout=3.0)
    first = client.enqueue(request).id
    shown = run("inspect", first).stdout
    assert [part for part in ("not tried yet", "more characters", "trace=abc") if part not in shown] == []
    assert "x" * 5000 in run("inspect", first, "--full").stdout
    assert "xxx" not in run("inspect", first, "--no-payload").stdout

    lease(client)
    client.cancel(first)
    shown = run("inspect", first).stdout
    assert [part for part in ("held by w-1", "asked to stop", "running") if part not in shown] == []
    document = json.loads(run("inspect", first, "--json").stdout)
    assert (document["worker"], document["cancel_requested"]) == ("w-1", True)


def test_inspect_says_what_a_job_was_merged_into(run: Run, client: Client) -> None:
    first = client.enqueue(JobRequest(type="a", key="k")).id
    token = lease(client).token or ""
    second = client.enqueue(JobRequest(type="a", key="k")).id
    portal().call(client.driver.release(first, token, now=client.now()))
    assert [part for part in ("merged into", first) if part not in run("inspect", second).stdout] == []


def test_stored_text_cannot_steer_the_terminal(run: Run, client: Client) -> None:
    headers = {"h": "[bold]\x1b]0;title\x07"}
    job_id = client.enqueue(JobRequest(type="a", payload="\x1b[31mred\x07", headers=headers)).id
    kill(client, job_id, "\x1b[2J[red]gone")
    for command in (["inspect", job_id], ["dlq", "list"], ["list"]):
        assert {"\x1b", "\x07"}.isdisjoint(run(*command).stdout)
    assert "[red]gone" in run("inspect", job_id).stdout


def test_stats_once_or_again_and_again(run: Run, client: Client, some_jobs: list[str]) -> None:
    """States and lag."""
    client.pause("default")
    assert "paused" in run("stats").stdout
    queues = {queue["queue"]: queue for queue in json.loads(run("stats", "--json").stdout)["queues"]}
    default = queues["default"]
    assert (default["counts"]["dead"], default["counts"]["scheduled"], default["dead_total"]) == (1, 1, 1)
    assert default["settings"]["paused"] is True
    assert queues["a-queue-with-a-long-name-too"]["lag_seconds"] >= 0
    watch = ["stats", "--watch", "--interval", "0.1", "--queue", "default"]
    looks = lines(run(*watch, "--times", "3", "--json"))
    assert [[queue["queue"] for queue in look["queues"]] for look in looks] == [["default"]] * 3
    assert "default" in run(*watch, "--times", "2").stdout


def test_a_job_that_runs_longer_than_its_timeout_is_shown(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    overdue = client.enqueue(JobRequest(type="a", timeout=0.001)).id
    client.enqueue(JobRequest(type="a", timeout=3600))
    lease(client), lease(client)
    client.enqueue(JobRequest(type="a", queue="other"))
    assert json.loads(run("stats", "--json").stdout)["overdue"] == {"default": 1}
    assert "overdue" in run("stats").stdout
    assert "overdue" in run("inspect", overdue).stdout
    monkeypatch.setattr("taskharbor.cli.queues.LARGEST_PAGE", 1)
    assert json.loads(run("stats", "--json").stdout)["overdue"] is None
    assert "overdue" not in run("stats").stdout


def test_queues_pause_resume_set(run: Run, client: Client) -> None:
    """Only what is named changes, and a queue that was never seen is made only with --create."""
    refused = run("queues", "pause", "a", code=2).stderr
    assert ("--create" in refused, "create=True" in refused) == (True, False)
    assert client.stats() == []
    run("queues", "pause", "a", "b", "--create")
    assert "'c'" in run("queues", "resume", "a", "c", code=2).stderr
    assert client.settings("a").paused
    assert [client.settings(queue).paused for queue in ("a", "b")] == [True, True]
    run("queues", "resume", "a")
    assert not client.settings("a").paused
    run("queues", "set", "a", "--max-inflight", "4", "--failure-queue", "broken")
    assert (client.settings("a").max_inflight, client.settings("a").failure_queue) == (4, "broken")
    run("queues", "set", "a", "--max-inflight", "none", "--failure-queue", "none")
    assert client.settings("a") == QueueSettings()
    client.pause("a")
    said = run("queues", "set", "a", "--keep-done", "7d", "--keep-dead", "forever", "--keep-attempts", "12h")
    assert "paused" in said.stdout
    assert "dead forever" in said.stdout
    settings = client.settings("a")
    assert (settings.keep_done_us, settings.keep_dead_us) == (7 * 86_400_000_000, None)
    assert settings.keep_attempts_us == 12 * 3_600_000_000
    assert [queue["queue"] for queue in lines(run("queues", "list", "--json"))] == ["a", "b"]


def test_cancel_by_key_or_only_what_waits(run: Run, client: Client) -> None:
    running = client.enqueue(JobRequest(type="a", key="k")).id
    lease(client)
    blocked = client.enqueue(JobRequest(type="a", key="k")).id
    by_key = ("cancel", "--queue", "default", "--key")
    assert "left alone" in run("cancel", running, "--only-waiting").stdout
    assert "1 cancelled" in run(*by_key, "k", "--only-waiting").stdout
    assert (client.get(blocked).state, client.get(running).cancel_requested) == (JobState.CANCELLED, False)
    told = run(*by_key, "k", "--key", "l", "--json", code=1)
    assert lines(told) == [{"cancelled": {"k": 1, "l": 0}}]
    detail = "no job with the key 'l' waits or runs in queue 'default'"
    assert json.loads(told.stderr) == {"error": {"code": "job_not_found", "detail": detail}}
    assert client.get(running).cancel_requested
    run(*by_key, "k")
    for wrong in (["cancel"], ["cancel", "x", "--key", "k"], ["cancel", "--key", "k"]):
        said = run(*wrong, code=2).stderr
        assert "either ids, or --key with --queue" in said
        assert "`taskharbor list` shows ids" in said


def test_cancel(run: Run, client: Client) -> None:
    waiting, running = (client.enqueue(JobRequest(type="a", priority=-n)).id for n in (1, 0))
    lease(client)
    said = run("cancel", waiting, running).stdout
    assert [part for part in (f"{waiting} cancelled", f"{running} is running") if part not in said] == []
    assert client.get(waiting).state is JobState.CANCELLED
    told = run("cancel", "nobody", waiting, "--json", code=1)
    error = {"code": "job_not_found", "detail": str(JobNotFound("nobody"))}
    assert json.loads(told.stderr) == {"id": "nobody", "error": error}
    assert lines(told) == [{"id": waiting, "state": "cancelled"}]
