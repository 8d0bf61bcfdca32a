"""The plans that keep a claim flat: every hot look is an index search, and none of them sorts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.drivers.sqlite.statements import load

Query = Callable[..., list[tuple[Any, ...]]]

_TYPED = ["index_ready_by_type", "index_scheduled_by_type"]

_PLANS = [
    ("reserve", "claimable", 2, "jobs_ready"),
    ("reserve", "head_by_type", 3, "jobs_ready"),
    ("reserve", "ready_by_type", 3, "jobs_ready_type"),
    ("reserve", "due_priorities", 2, "jobs_scheduled"),
    ("reserve", "promote", 4, "jobs_scheduled"),
    ("reserve", "due_priorities_by_type", 3, "jobs_scheduled_type"),
    ("reserve", "promote_by_type", 5, "jobs_scheduled_type"),
    ("reserve", "probe", 2, "jobs_leases"),
    ("reserve", "valid_leases", 2, "jobs_leases"),
    ("unit", "load_expired", 3, "jobs_leases"),
    ("unit", "load", 1, "jobs_id"),
    ("unit", "load_waiting", 1, "jobs_waiting_key"),
    ("unit", "load_inflight", 1, "jobs_inflight_key"),
    ("settle", "check_acks", 1, "INTEGER PRIMARY KEY"),
    ("settle", "finish_acks", 2, "INTEGER PRIMARY KEY"),
    ("settle", "leases", 1, "jobs_id"),
    ("remove", "ended", 6, "jobs_ended"),
    ("remove", "attempts", 3, "attempts_age"),
    ("inspect", "due_scheduled", 2, "jobs_scheduled"),
    ("inspect", "head_ready", 1, "jobs_ready"),
    ("inspect", "attempts", 2, "INTEGER PRIMARY KEY"),
    ("inspect", "job_attempts", 1, "attempts_job"),
    ("inspect", "watch", 2, "jobs_scheduled"),
]


@pytest.mark.parametrize(("family", "name", "values", "index"), _PLANS, ids=lambda value: str(value))
def test_the_plan_searches_its_index(
    driver: SQLiteDriver, query: Query, family: str, name: str, values: int, index: str
) -> None:
    asyncio.run(driver.migrate())
    for statement in _TYPED:
        query(load("reserve")[statement])
    plan = [row[3] for row in query(f"EXPLAIN QUERY PLAN {load(family)[name]}", *["[]"] * values)]
    assert any("SEARCH" in step and index in step for step in plan), plan
    assert not [step for step in plan if "TEMP B-TREE" in step], plan
    scans = [step for step in plan if step.startswith("SCAN jobs") or step.startswith("SCAN attempts")]
    assert not scans, plan
