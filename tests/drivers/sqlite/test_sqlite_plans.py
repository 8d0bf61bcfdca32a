"""The plans that keep a claim flat: every hot look is an index search, and none of them sorts."""

from __future__ import annotations

import re

import pytest

from drivers.sqlite.conftest import Query
from taskharbor.drivers.engine.reserve import OF_ONE_TYPE
from taskharbor.drivers.engine.tables import load
from taskharbor.drivers.sqlite import SQLiteDriver

_PLANS = [
    ("reserve", "first_of_any_type", "jobs_ready"),
    ("reserve", "first_of_one_type", "jobs_ready_type"),
    ("reserve", "chosen", "INTEGER PRIMARY KEY"),
    ("reserve", "ready_types", "jobs_ready"),
    ("reserve", "first_by_type", "jobs_ready_type"),
    ("reserve", "scheduled_types", "jobs_scheduled_type"),
    ("reserve", "due_priorities", "jobs_scheduled"),
    ("reserve", "promote", "jobs_scheduled"),
    ("reserve", "put_back", "jobs_ready"),
    ("reserve of one type", "due_priorities", "jobs_scheduled_type"),
    ("reserve of one type", "promote", "jobs_scheduled_type"),
    ("reserve", "probe", "jobs_leases"),
    ("reserve", "valid_leases", "jobs_leases"),
    ("settle", "expired", "jobs_leases"),
    ("unit", "load", "jobs_id"),
    ("unit", "load_waiting", "jobs_waiting_key"),
    ("unit", "load_inflight", "jobs_inflight_key"),
    ("settle", "check_acks", "INTEGER PRIMARY KEY"),
    ("settle", "finish_acks", "INTEGER PRIMARY KEY"),
    ("settle", "leases", "jobs_id"),
    ("operate", "ended", "jobs_ended"),
    ("operate", "attempts", "attempts_age"),
    ("inspect", "due_scheduled", "jobs_scheduled"),
    ("inspect", "head_ready", "jobs_ready"),
    ("inspect", "attempts", "INTEGER PRIMARY KEY"),
    ("inspect", "job_attempts", "attempts_job"),
    ("inspect", "watch", "jobs_scheduled"),
    ("queues", "earliest_scheduled", "jobs_scheduled"),
]

_SOURCES = {"first_of_any_type", "first_of_one_type", "chosen"}
"""Where the rows of a claim come from: parts of one statement."""


@pytest.mark.parametrize(("family", "name", "index"), _PLANS, ids=lambda value: str(value))
async def test_the_plan_searches_its_index(
    driver: SQLiteDriver, query: Query, family: str, name: str, index: str
) -> None:
    await driver.migrate()
    statements = OF_ONE_TYPE if family.endswith("type") else load(family)
    sql = statements[name]
    if name in _SOURCES:
        sql = statements["leased_rows"].replace("/*jobs*/", sql)
    named = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    values = [] if named else ["[]"] * sql.count("?")
    plan = [row[3] for row in query(f"EXPLAIN QUERY PLAN {sql}", *values, **named)]
    assert any("SEARCH" in step and index in step for step in plan), plan
    assert not [step for step in plan if "TEMP B-TREE" in step], plan
    scans = [step for step in plan if step.startswith("SCAN jobs") or step.startswith("SCAN attempts")]
    assert not scans, plan
