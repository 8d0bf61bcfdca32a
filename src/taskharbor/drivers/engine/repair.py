"""Stored jobs that no call could have stored: damaged, or written by another program.

One such row would stop every call that meets it. So a call that fails on a row that cannot be loaded sets these jobs aside and
runs again: values beyond all bounds are replaced, and the job is dead with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.engine.loaded_jobs import Unit
from taskharbor.drivers.engine.tables import State, Transaction, load, record_from_row
from taskharbor.drivers.validation import check_records
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import Failure, Micros, Name, Outcome

log = logging.getLogger("taskharbor.drivers")

_SQL = load("repair")
_BY_SEQ = load("inspect")["by_seq"]
_ERROR = Failure("DamagedJob", "some values of the stored job could not be loaded")

REPAIRED = (op.Reserve, op.ExtendLease, op.Settle, op.Reclaim)
"""The calls of workers, for which one damaged job must not stand in the way of others."""


async def with_repair(
    write: Callable[[Callable[[Transaction], Any]], Awaitable[Any]],
    step: Callable[[Transaction], Any],
    now: Micros,
) -> Any:
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
    unended: list[str] = []
    for seq, is_sound in transaction.execute(_SQL["numbers"], (ended_too,)).fetchall():
        if is_sound and _is_whole(transaction, seq, now):
            continue
        *texts, queue, state = transaction.execute(_SQL["texts"], (seq,)).fetchone()
        job_id, type_, key = map(_name, texts)
        job_id = job_id or f"damaged-{seq}"
        transaction.execute(_SQL["mend"], (job_id, type_ or "damaged", key, seq))
        effect = "it is dead" if state <= State.INFLIGHT else "they were replaced"
        found.append(f"job {job_id!r} of queue {queue!r} has damaged values: {effect}")
        log.error("%s", found[-1])
        unended += [job_id] * (state <= State.INFLIGHT)
    unit = Unit(transaction, now, unended)
    for job_id in unended:
        job = unit.job(job_id)
        assert job is not None
        job.last_error, job.failed_at = _ERROR.text, now
        unit.end(job, State.DEAD, Outcome.DEAD, _ERROR)
    unit.flush()
    if ended_too:
        # Only object stores have an outbox. They keep jobs that have ended in segments.
        rows = transaction.execute(_SQL["recount"], (transaction.outbox is not None,)).fetchall()
        found += [
            f"the counters of queue {name!r} did not fit its jobs: they were corrected" for (name,) in rows
        ]
    return found


def _is_whole(transaction: Transaction, seq: int, now: Micros) -> bool:
    try:
        (row,) = transaction.execute(_BY_SEQ, (f"[{seq}]",)).fetchall()
        record = record_from_row(row, now)
        record.payload = b""  # A copy of a dead job may be larger than a request.
        check_records([record])
    except Exception:
        return False
    return True


def _name(stored: bytes | None) -> str | None:
    """Return a stored text if it is a name."""
    try:
        name: str = msgspec.convert((stored or b"").decode(), Name)
    except ValueError:
        return None
    return None if "\0" in name or name.isspace() else name
