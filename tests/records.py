"""Records of jobs for tests, and the value of a field that must be there."""

from __future__ import annotations

from typing import Any, TypeVar

from taskharbor.jobs import SECOND, JobRecord, Micros
from taskharbor.requests import new_id

T = TypeVar("T")

NOW: Micros = 1_700_000_000 * SECOND


def make_record(id: str | None = None, *, now: Micros = NOW, **fields: Any) -> JobRecord:
    """A job of type `mail` in queue `q`, created and due at `now`. Other fields may be wrong on purpose."""
    values: dict[str, Any] = {"type": "mail", "queue": "q", "run_at_us": now, "created_at_us": now}
    return JobRecord(id=new_id() if id is None else id, **(values | fields))


def present(value: T | None) -> T:
    assert value is not None
    return value
