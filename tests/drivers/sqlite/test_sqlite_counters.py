"""Random histories beside the reference model: every answer agrees, and the counters equal the rows they count."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from taskharbor.drivers.engine.tables import INLINE_PAYLOAD
from taskharbor.drivers.operations import Enqueue
from taskharbor.drivers.records import STATES
from taskharbor_testkit.conformance import check
from taskharbor_testkit.conformance.machine import DriverMachine, Effort

COUNTERS = "SELECT id, scheduled, ready, blocked, inflight, done, dead, cancelled FROM queues"
ORPHANS = [
    "SELECT count(*) FROM payloads WHERE seq NOT IN (SELECT seq FROM jobs)",
    "SELECT count(*) FROM results WHERE seq NOT IN (SELECT seq FROM jobs)",
    "SELECT count(*) FROM idempotency WHERE job_id NOT IN (SELECT id FROM jobs)",
]


def _check_counters(connection: sqlite3.Connection) -> None:
    kept = connection.execute(COUNTERS).fetchall()
    truth = {number: [0] * len(STATES) for number, *_ in kept}
    for number, state, jobs in connection.execute(
        "SELECT queue_id, state, count(*) FROM jobs GROUP BY 1, 2"
    ).fetchall():
        truth[number][state] = jobs
    assert {number: counts for number, *counts in kept} == truth
    for orphans in ORPHANS:
        assert connection.execute(orphans).fetchall() == [(0,)], orphans


def test_random_histories_agree_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueueing = DriverMachine.enqueueing

    def with_long_payloads(machine: DriverMachine, wishes: list[dict[str, Any]]) -> Enqueue:
        """Some payloads have a table of their own."""
        return enqueueing(machine, [wish | {"payload": wish["payload"] * INLINE_PAYLOAD} for wish in wishes])

    monkeypatch.setattr(DriverMachine, "enqueueing", with_long_payloads)
    seed = Effort.from_environment().seed or random.randrange(2**32)
    effort = Effort(examples=4, steps=50, seed=seed, shrink=False)
    print(f"replay with {effort}")
    report = check(f"sqlite:///{tmp_path}/{{fresh}}.db?durability=normal", only="machine.*", effort=effort)
    assert report.ok, report.failures[0].message
    stores = list(tmp_path.glob("*.db"))
    assert len(stores) >= effort.examples, effort
    for path in stores:
        with closing(sqlite3.connect(path)) as connection:
            _check_counters(connection)
