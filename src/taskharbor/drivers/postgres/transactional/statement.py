"""What is sent on the caller's connection, and what its answer means: the same for every library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.dispatch import check_records
from taskharbor.drivers.postgres.enqueue import is_plain, plain_values, rule_values
from taskharbor.drivers.postgres.notify_throttle import NOTIFYING, SILENT
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import InvalidRequest, SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

_MISSING = ("42P01", "42883", "3F000")
"""No such table, function, schema."""


class EnqueueStatement:
    """One statement for a batch of new records.

    Their ids were made a moment ago and are known to nobody, so the quick INSERT cannot fail for one that is: an error would
    cost the caller the whole transaction. It also needs no subtransaction per job, which a transaction that stays open for
    a while had better not have by the thousand.
    """

    def __init__(self, records: Sequence[JobRecord], now: Micros, options: Options) -> None:
        check_records(records)
        self._records = records
        # PostgreSQL delivers at commit the notifications that are made here, and drops them at rollback.
        stir = NOTIFYING if options.notify else SILENT
        self._is_plain = is_plain(records)
        self.text: LiteralString
        self.values: list[Any]
        if self._is_plain:
            self.text = load("enqueue", options.schema)["plain"]
            self.values = plain_values(records, now, stir, new_ids=True)
        else:
            has_keys = any(record.key is not None for record in records)
            self.text = (
                load("within", options.schema)["by_key"]
                if has_keys
                else load("enqueue", options.schema)["by_rules"]
            )
            self.values = rule_values(records, now, stir, again=False)

    def answers(self, rows: Sequence[Sequence[Any]]) -> list[Enqueued]:
        if self._is_plain:
            return [Enqueued(record.id) for record in self._records]
        if not rows:
            raise InvalidRequest(
                "a job with a key cannot be enqueued within a REPEATABLE READ or SERIALIZABLE transaction, which does not "
                "see what others did to the key: use READ COMMITTED, an idempotency_key instead, or no key"
            )
        return [Enqueued(job_id, existed) for job_id, existed in rows]


@contextmanager
def explaining(options: Options) -> Iterator[None]:
    """The caller's library raises its own errors, which the caller's code knows how to treat; all but one are left alone."""
    try:
        yield
    except Exception as error:
        if _sqlstate(error) not in _MISSING:
            raise
        text = " ".join(str(error).split())
        raise SchemaMismatch(
            f"the database of this transaction has no schema {options.schema!r} of this version ({text}): give a connection "
            f"to the database that the store is in ({options.place}), or run `taskharbor migrate` on it"
        ) from error


def _sqlstate(error: BaseException) -> str | None:
    """SQLAlchemy and Django wrap what the library below them raised."""
    for one in (error, getattr(error, "orig", None), error.__cause__):
        for name in ("sqlstate", "pgcode"):
            state = getattr(one, name, None)
            if isinstance(state, str):
                return state
    return None


def not_in_a_transaction(how: str) -> InvalidRequest:
    return InvalidRequest(
        f"the connection is in autocommit mode, so the job would be there at once, whatever happens next: {how}, or use "
        "an ordinary enqueue"
    )
