"""The test of the tests: every planted bug must be caught, and the model without one must pass."""

from __future__ import annotations

import pytest

from taskharbor_testkit.conformance import check
from taskharbor_testkit.conformance.effort import Effort
from taskharbor_testkit.model import ModelDriver
from taskharbor_testkit.planted import PLANTED

QUICK = Effort(examples=40, shrink=False)


@pytest.mark.parametrize("name", list(PLANTED))
def test_the_kit_catches(name: str) -> None:
    report = check(PLANTED[name], effort=QUICK, fail_fast=True)
    assert not report.ok, f"{name} broke the driver and nothing noticed"


def test_the_model_without_a_bug_passes() -> None:
    report = check(ModelDriver, effort=QUICK)
    assert report.ok, report.failures[0].message


MACHINE_ALONE = (
    "stale_token_accepted",
    "fence_not_increased",
    "double_lease",
    "scheduled_runs_early",
    "two_inflight_per_key",
    "reserve_does_not_reclaim",
    "priority_inverted",
    "counters_drift",
    "stamps_with_the_callers_clock",
    "ends_before_it_began",
    "late_heartbeat_shortens",
)


@pytest.mark.parametrize("name", MACHINE_ALONE)
def test_the_state_machine_alone_catches(name: str) -> None:
    """The machine must bite by itself, not only where a case already knows the rule."""
    report = check(PLANTED[name], only="machine.*", effort=QUICK)
    assert not report.ok
