"""Stored jobs that no call could have stored: damaged, or written by another program.

One such row would stop every call that meets it. So a call that fails on a row that cannot be loaded sets these jobs aside and
runs again: values that no store may hold are replaced, and the job is dead with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from taskharbor.drivers import operations as op
from taskharbor.drivers.engine.loaded_jobs import Unit
from taskharbor.drivers.engine.tables import DEAD, INFLIGHT, Spec, Transaction, load
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import Failure, Instant, Micros, Name, Outcome, Priority, Tries

log = logging.getLogger("taskharbor.drivers")

A = TypeVar("A")
_SQL = load("repair")

_Text = str | None
_Number = Annotated[int, Meta(ge=-(2**62), le=2**62)]
_FIELDS: list[tuple[str, Any, Any]] = [
    ("id", Name, None),
    ("type", Name, "damaged"),
    ("key", Name | None, None),
    ("spec", _Text, None),
    ("worker", Name | None, None),
    ("token", _Text, None),
    ("last_error", _Text, None),
    ("merged_into", _Text, None),
    ("priority", Priority, 0),
    ("run_at", Instant, 0),
    ("created_at", Instant, 0),
    ("max_attempts", Tries, 1),
    ("max_stalls", Tries, 0),
    ("attempts", Tries, 0),
    ("stalls", Tries, 0),
    ("fence", Annotated[int, Meta(ge=0, le=2**62)], 0),
    *((name, _Number | None, None) for name in ("expires_at", "reserved_at", "finished_at", "failed_at")),
]
"""The columns behind number, queue and state, with what they may hold and what replaces anything else."""


REPAIRED = (op.Reserve, op.ExtendLease, op.Settle, op.Reclaim)
"""The calls of workers, for which one damaged job must not stand in the way of others."""


async def with_repair(
    write: Callable[[Callable[[Transaction], Any]], Awaitable[Any]],
    step: Callable[[Transaction], A],
    now: Micros,
) -> A:
    """Run a step in a write transaction. If it fails on jobs that cannot be loaded, set them aside and run it again."""
    try:
        return await write(step)
    except (BackendUnavailable, SchemaMismatch):
        raise
    except Exception:
        if not await write(lambda transaction: set_aside(transaction, now)):
            raise
    return await write(step)


def set_aside(transaction: Transaction, now: Micros, *, ended_too: bool = False) -> list[str]:
    """Mend jobs that have values beyond all bounds. Those that have not ended are dead then. Returns what was found."""
    found: list[str] = []
    reasons: dict[str, str] = {}
    for row in transaction.execute(_SQL["rows"], (ended_too,)).fetchall():
        seq, queue_name, state, *columns, size, length = row
        values, wrong = _mended(seq, columns)
        if size != length:
            wrong.append("payload")
        if _text(Name, queue_name) is None:
            wrong.append("queue")
        if not wrong:
            continue
        transaction.execute(_SQL["mend"], (*values, length or 0, length is not None, seq))
        fields = ", ".join(wrong)
        found.append(
            f"{values[0]!r} of queue {queue_name.decode(errors='replace')!r} has damaged values: {fields}"
        )
        log.error("job %s; %s", found[-1], "it is dead" if state <= INFLIGHT else "they are replaced")
        if state <= INFLIGHT:
            reasons[values[0]] = f"these values of the stored job could not be loaded: {fields}"
    unit = Unit(transaction, now, reasons)
    for job_id, reason in reasons.items():
        job = unit.job(job_id)
        assert job is not None
        error = Failure("DamagedJob", reason)
        job.last_error, job.failed_at = error.text, now
        unit.end(job, DEAD, Outcome.DEAD, error)
    unit.flush()
    return found


def _mended(seq: int, columns: list[Any]) -> tuple[list[Any], list[str]]:
    """The values of a row's columns, and the names of those that were replaced."""
    values, wrong = [], []
    for (name, kind, instead), stored in zip(_FIELDS, columns, strict=True):
        value: Any = _text(kind, stored) if isinstance(stored, bytes) else _number(kind, stored)
        if name == "spec" and value is not None:
            value = value if _is_spec(value) else None
        if value is None and (stored is not None or instead is not None):
            wrong.append(name)
            value = f"damaged-{seq}" if name == "id" else instead
        values.append(value)
    return values, wrong


def _text(kind: Any, stored: bytes) -> str | None:
    try:
        value: str = msgspec.convert(stored.decode(), kind)
    except ValueError:
        return None
    return None if "\0" in value or (value.isspace() and kind is not _Text) else value


def _number(kind: Any, stored: Any) -> int | None:
    try:
        value: int | None = msgspec.convert(stored, kind)
    except ValueError:
        return None
    return value


def _is_spec(text: str) -> bool:
    try:
        Spec.read(text)
    except ValueError:
        return False
    return True
