"""Stored text in the output of commands: no name begins a line or steers the terminal, and a suggested command is quoted."""

from __future__ import annotations

import json

import pytest

from cli.cli_harness import Run, kill, lease
from records import make_record
from taskharbor.client import Client, portal
from taskharbor.jobs import Failure, JobRequest

ODD = "a\n$(touch x)\x1b[2J\x7f\x85\x9b\u2028\u202e"


@pytest.fixture
def job_id(client: Client) -> str:
    now = client.now()
    portal().call(
        client.driver.enqueue([make_record(ODD, now=now, type=ODD, queue="default", max_attempts=1)], now=now)
    )
    kill(client, ODD, ODD)
    return ODD


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("code", "command"),
    [
        *((0, ["dlq", "requeue", "--all", "--dry-run"]), (0, ["dlq", "requeue", ODD]), (0, ["dlq", "list"])),
        *(
            (0, ["list"]),
            (0, ["inspect", ODD]),
            (0, ["doctor"]),
            (0, ["stats"]),
            (0, ["stats", "--queue", ODD]),
        ),
        *((0, ["queues", "pause", ODD]), (2, ["queues", "pause", "no" + ODD])),
        *((1, ["inspect", "no" + ODD]), (1, ["cancel", ODD]), (2, ["enqueue", "a", "--delay", ODD])),
    ],
)
def test_no_name_begins_a_line_or_steers_the_terminal(
    run: Run, client: Client, job_id: str, code: int, command: list[str], form: list[str]
) -> None:
    client.configure(ODD, paused=True, create=True)
    result = run(*command, *form, code=code)
    lines = (result.stdout + result.stderr).removesuffix("\n").split("\n")
    assert all(line.isprintable() and not line.startswith("$(") for line in lines)
    assert not form or all(map(json.loads, lines))


def test_a_suggested_command_is_quoted(run: Run, client: Client) -> None:
    client.configure("$(touch x)", paused=True, create=True)
    assert "resume '$(touch x)'" in run("doctor").stdout


def test_the_lines_of_an_error_imitate_no_section(run: Run, client: Client) -> None:
    first = client.enqueue(JobRequest(type="a")).id
    error = Failure("E", "x", "Traceback\ntimeline: not tried yet")
    portal().call(
        client.driver.fail(first, lease(client).token or "", now=client.now(), attempts=1, error=error)
    )
    assert "\n  timeline: not tried yet" in run("inspect", first).stdout
