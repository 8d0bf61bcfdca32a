"""The plans that keep a claim flat: every hot look is an index search, and none of them sorts."""

from __future__ import annotations

import re

import pytest

from drivers.sqlite.conftest import Query
from taskharbor.drivers.engine.reserve import OF_ONE_TYPE
from taskharbor.drivers.engine.tables import load
from taskharbor.drivers.sqlite import SQLiteDriver

_PLANS = {
    "jobs_ready": "reserve.first_of_any_type reserve.ready_types reserve.put_back inspect.head_ready",
    "jobs_ready_type": "reserve.first_of_one_type reserve.first_by_type",
    "INTEGER PRIMARY KEY": "reserve.chosen settle.check_acks settle.finish_acks inspect.attempts",
    "jobs_scheduled_type": "reserve.scheduled_types one_type.due_priorities one_type.promote",
    "jobs_scheduled": "reserve.due_priorities reserve.promote inspect.due_scheduled inspect.watch queues.earliest_scheduled",
    "jobs_leases": "reserve.probe reserve.valid_leases settle.expired",
    "jobs_id": "unit.load settle.leases",
    "jobs_waiting_key": "unit.load_waiting",
    "jobs_inflight_key": "unit.load_inflight",
    "jobs_ended": "operate.ended",
    "attempts_age": "operate.attempts",
    "attempts_job": "inspect.job_attempts",
}
"""The statements that search each index, by the file of their text."""

_SOURCES = {"first_of_any_type", "first_of_one_type", "chosen"}
"""Where the rows of a claim come from: parts of one statement."""


@pytest.mark.parametrize(
    ("statement", "index"), [(name, index) for index, names in _PLANS.items() for name in names.split()]
)
async def test_the_plan_searches_its_index(
    driver: SQLiteDriver, query: Query, statement: str, index: str
) -> None:
    await driver.migrate()
    family, _, name = statement.partition(".")
    statements = OF_ONE_TYPE if family == "one_type" else load(family)
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
