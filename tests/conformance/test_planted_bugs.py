"""The test of the tests: every planted bug is caught, PLANTED.md tells by which case, and the model without a bug passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from taskharbor_testkit.conformance import CASES, check
from taskharbor_testkit.conformance.runner import MACHINE
from taskharbor_testkit.model import ModelDriver
from taskharbor_testkit.planted import PLANTED, RULES
from taskharbor_testkit.planted.table import EFFORT, as_markdown, make_table

PAGE = (Path(__file__).parents[2] / "testkit" / "PLANTED.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (\d+) \| (yes|no) \| (.*) \|$", re.MULTILINE)
ROWS = {
    bug: (rule, int(count), machine, re.findall(r"`(.+?)`", cases))
    for bug, rule, count, machine, cases in ROW.findall(PAGE)
}


def test_the_page_lists_every_bug_and_knows_every_case() -> None:
    assert {bug: row[0] for bug, row in ROWS.items()} == RULES
    assert f"{len(PLANTED)} bugs, {len(CASES)} cases;" in PAGE, "make PLANTED.md anew: cases came or went"
    assert {case for row in ROWS.values() for case in row[3]} <= set(CASES)
    assert all(count or machine == "yes" for _, count, machine, _ in ROWS.values())


@pytest.mark.parametrize("name", PLANTED)
def test_the_kit_catches(name: str) -> None:
    """By the most specific case that the page names, or by the state machine where it names none."""
    case, *_ = ROWS[name][3] or [MACHINE]
    report = check(PLANTED[name], only=case, effort=EFFORT)
    assert not report.ok, f"{name} broke the driver and {case} did not notice"


def test_the_model_without_a_bug_passes() -> None:
    report = check(ModelDriver, effort=EFFORT)
    assert report.ok, report.failures[0].message


def test_the_table_names_cases_and_the_state_machine() -> None:
    (caught,) = make_table(["prune_ignores_limit"])
    assert caught.cases == ["retention.prune_takes_at_most_limit_of_each"]
    assert f"`prune_ignores_limit`: `{caught.cases[0]}`" in as_markdown([caught])


MACHINE_ALONE = (
    *("stale_token_accepted", "fence_not_increased", "double_lease", "scheduled_runs_early"),
    *("two_inflight_per_key", "reserve_does_not_reclaim", "priority_inverted", "counters_drift"),
    *("stamps_with_the_callers_clock", "ends_before_it_began", "late_heartbeat_shortens"),
)


@pytest.mark.parametrize("name", MACHINE_ALONE)
def test_the_state_machine_alone_catches(name: str) -> None:
    """The machine must bite by itself, not only where a case already knows the rule."""
    assert not check(PLANTED[name], only=MACHINE, effort=EFFORT).ok
