"""Thousands of seeds, and every guarantee holds in each. More with TASKHARBOR_SEEDS=100000."""

from __future__ import annotations

import os

import pytest

from taskharbor_testkit.simulation import simulate

SEEDS = int(os.environ.get("TASKHARBOR_SEEDS", "2000"))
FIRST = int(os.environ.get("TASKHARBOR_FIRST_SEED", "0"))
SHARDS = 16


@pytest.mark.timeout(max(180, SEEDS // 4))
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_guarantee_holds_for_every_seed(shard: int) -> None:
    failed = [
        str(report)
        for seed in range(FIRST + shard, FIRST + SEEDS, SHARDS)
        if not (report := simulate(seed)).is_ok
    ]

    assert not failed, "\n".join(failed)


def test_the_seeds_cover_what_they_are_for() -> None:
    reports = [simulate(seed) for seed in range(60)]

    assert sum(report.counts["expired leases"] for report in reports) > 10
    assert sum(report.counts["executions"] for report in reports) > 300
    text = "\n".join("\n".join(report.trace) for report in reports)
    for event in ("kill for", "freeze for", "stall for", "stop for", "outage", "answer lost", "request lost"):
        assert event in text, event
