"""The kit's own edges: what it needs, what it refuses, what it prints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner

from records import make_record
from taskharbor.drivers.contract import RetryAt
from taskharbor.drivers.operations import Enqueue
from taskharbor.jobs import Failure, JobRecord, JobState, Outcome, UpdateFlags
from taskharbor_testkit.conformance import check
from taskharbor_testkit.conformance.__main__ import main
from taskharbor_testkit.conformance.machine import DriverMachine, Effort
from taskharbor_testkit.model import Model, ModelDriver
from taskharbor_testkit.planted import PLANTED
from taskharbor_testkit.planted.__main__ import main as planted

QUICK = Effort(examples=3, steps=10)


def test_the_report_names_what_failed() -> None:
    report = check(PLANTED["priority_inverted"], only="reserve.*")
    assert not report.ok
    assert "reserve.higher_priority_first" in [verdict.name for verdict in report.failures]
    assert "should be" in report.failures[0].message


def test_a_failing_history_prints_how_to_reproduce_it() -> None:
    effort = Effort(examples=30, seed=5, shrink=False)
    report = check(PLANTED["fence_not_increased"], only="machine.*", effort=effort)
    (failure,) = report.failures
    assert "TASKHARBOR_CONFORMANCE_SEED=5" in failure.message
    assert "state.open_the_store(" in failure.message


SHRINKING: list[dict[str, str]] = [{}, {"CI": "false"}, {"CI": "true", "SHRINK": "1"}]


@pytest.mark.parametrize(
    "environment", [*SHRINKING, {"CI": "true"}, {"SHRINK": "0", "EXAMPLES": "7", "SEED": "9"}]
)
def test_effort_of_the_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """CI does not shrink unless asked."""
    shrink = environment in SHRINKING
    for name in ("CI", "SHRINK", "EXAMPLES", "SEED"):
        variable = name if name == "CI" else f"TASKHARBOR_CONFORMANCE_{name}"
        monkeypatch.delenv(variable, raising=False)
        if name in environment:
            monkeypatch.setenv(variable, environment[name])
    effort = Effort.from_environment()
    assert effort.shrink is shrink
    assert ("TASKHARBOR_CONFORMANCE_SHRINK=1" in str(effort)) is not shrink
    if "EXAMPLES" in environment:
        assert (effort.examples, effort.seed) == (7, 9)


def test_the_command_line_says_what_passed_as_json_or_as_a_table() -> None:
    command = ["memory://", "--only", "limits.*"]
    done = CliRunner().invoke(main, [*command, "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"]) == (0, True)
    assert {verdict["outcome"] for verdict in told["verdicts"]} == {"passed"}
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0
    assert [part for part in ("limits", "0 failed") if part not in done.output] == []


def test_a_lasting_store_is_refused_without_touching_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [f"sqlite:///{tmp_path}/production.db"])
    assert done.exit_code == 1
    assert "{fresh}" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "arguments", "code", "complaint"),
    [
        (main, ["memory://", "--only", "limts.*"], 2, "--only limts.*: no case has such a name"),
        *((main, [f"nosuch://{end}"], 1, "Error: ") for end in ("", "{fresh}")),
        (main, ["sqlite:////nowhere/at/all/{fresh}.db"], 1, "Error: "),
        (planted, ["--json", "--markdown"], 2, "one of them"),
        (main, ["memory://"], 1, "TASKHARBOR_CONFORMANCE_EXAMPLES='many'"),
        (main, ["memory://"], 1, "TASKHARBOR_CONFORMANCE_SHRINK='perhaps'"),
    ],
)
def test_a_bad_command_is_refused(command: Command, arguments: list[str], code: int, complaint: str) -> None:
    """Or a bad variable."""
    variable, _, value = complaint.replace("'", "").partition("=")
    done = CliRunner().invoke(command, arguments, env={variable: value} if value else {})
    assert done.exit_code == code
    assert complaint in done.output
    # Told once; click itself shows how a command is used as well.
    assert code == 2 or len(done.output.splitlines()) == 1


def test_a_store_in_use_is_refused() -> None:
    used = ModelDriver()
    asyncio.run(used.enqueue([JobRecord(id="j", type="t", run_at_us=1, created_at_us=1)], now=1))
    report = check(used.clone, only="limits.*", fail_fast=True)
    assert "not empty (queues: default)" in report.failures[0].message
    (stats,) = asyncio.run(used.stats(now=1))
    assert sum(stats.counts.values()) == 1


def test_the_same_histories_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derandomized: two runs judge the same driver by the same calls."""
    histories: list[list[str]] = []
    enqueueing = DriverMachine.enqueueing

    def recorded(self: DriverMachine, wishes: list[dict[str, Any]]) -> Enqueue:
        call = enqueueing(self, wishes)
        histories[-1].append(str(call))
        return call

    monkeypatch.setattr(DriverMachine, "enqueueing", recorded)
    for _ in range(2):
        histories.append([])
        assert check(ModelDriver, only="machine.*", effort=QUICK).ok
    assert histories[0]
    assert histories[0] == histories[1]


# -- the model, on update flags: the one thing about which the cases of the kit ask it ------------------------------------


def job(job_id: str, *, run_at: int = 0, **fields: Any) -> JobRecord:
    return make_record(job_id, now=0, run_at_us=run_at, key="k", **fields)


def test_a_blocked_job_gathers_flags_and_hands_them_on_at_the_merge() -> None:
    model = Model()
    model.enqueue([job("a", max_attempts=9)], now=0)
    (held,) = model.reserve("q", limit=1, lease_for=10, now=0, worker="w")
    model.enqueue([job("b", run_at=50, update=UpdateFlags(payload=False, run_at="later"))], now=0)
    model.enqueue([job("c", payload=b"new", update=UpdateFlags(reset_counts=True))], now=0)
    assert model.jobs["b"].update == UpdateFlags(payload=True, run_at="later", retry=False, reset_counts=True)
    assert model.jobs["b"].run_at_us == 50
    model.settle([RetryAt("a", held.token or "", 20, 1, Failure("ValueError", "boom"))], now=5)
    survivor, merged = model.jobs["a"], model.jobs["b"]
    assert (survivor.payload, survivor.run_at_us, survivor.attempts) == (b"new", 50, 0)
    assert survivor.state is JobState.SCHEDULED
    assert (merged.state, merged.merged_into) == (JobState.CANCELLED, "a")
    assert [row.outcome for row in model.log] == [Outcome.RETRIED, Outcome.MERGED]
    assert model.stats(now=5)[0].cancelled_total == 1
