"""Ids of the jobs that schedules make: `tick:<name>:<generation>:<nominal time>`.

The id alone joins a job with its schedule and its tick. The generation is random and differs after a delete, so no producer can
store a job under the id of a tick to come.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

# The reason for a job of a schedule: its time came, somebody asked for it now, or for times in the past.
Made: TypeAlias = Literal["tick", "trigger", "backfill"]
# For Spark too: Java reads it as Python does.
PATTERN = r"^(tick|trigger|backfill):(.+):([0-9a-f]{12}):(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z)$"
_ID = re.compile(PATTERN)


class TickId(NamedTuple):
    """The parts of such an id."""

    made: str
    name: str
    generation: str
    at: datetime


def instant_text(at: datetime) -> str:
    """Return an instant in UTC as ids and headers have it: `2026-03-29T01:00:00Z`. A fraction only where there is one."""
    text = at.isoformat().partition("+")[0]
    return f"{text}Z"


def generation_of(schedule_id: str) -> str:
    """Return the generation of the schedule whose own job has this id: its last 48 bits, all of them random."""
    return schedule_id[-12:]


def tick_id(made: Made, name: str, generation: str, at: datetime) -> str:
    """Return the id of the job for a tick. `at` is in UTC."""
    return f"{made}:{name}:{generation}:{instant_text(at)}"


def parse_tick_id(job_id: str) -> TickId | None:
    """Return the parts of the id of a schedule's job, or None for any other id."""
    found = _ID.fullmatch(job_id)
    if found is None:
        return None
    made, name, generation, at = found.groups()
    return TickId(made, name, generation, datetime.fromisoformat(at))
