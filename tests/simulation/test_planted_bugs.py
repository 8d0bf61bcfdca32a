"""The simulation has teeth: every planted bug is found, by the guarantee it breaks, within a few seeds."""

from __future__ import annotations

import pytest

from taskharbor_testkit.simulation import GUARANTEES
from taskharbor_testkit.simulation.planted import PLANTED

SEEDS = range(2, 300)
"""Not seed 1: by the bug "same fence" its world goes on for half a minute of ours, and seed 2 shows the bug at once."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = PLANTED[name]
    assert bug.guarantee in GUARANTEES

    assert any(bug.is_found_by(seed) for seed in SEEDS), f"{name!r} was not found in {len(SEEDS)} seeds"


def test_a_planted_bug_does_not_outlive_its_run() -> None:
    for name in PLANTED:
        PLANTED[name].simulate(0)

    report = PLANTED["no heartbeat"].simulate(1)
    assert not report.is_ok

    from taskharbor_testkit.simulation import simulate

    assert simulate(1).is_ok
