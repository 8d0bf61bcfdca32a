"""The tables of the queue: transactions and their statements, records as rows, queues, and counters.

Statements are in `sql/`, a file per family of operations, each under a `-- name:` line. `/*rows: n*/` in a statement stands for
row values of n columns. Such a statement takes many rows in one step, because Python gives up the GIL at every step and a busy
handler thread may keep it for milliseconds.

States and outcomes are small integers in the file. What SQL never looks at travels in one JSON column, which is NULL for a job
that uses only defaults: most of them, and each column costs time at every move of the job. A job carries the number of its queue:
short in every index, and no name is too long for it. Counters move by the sums of a whole call: a trigger per row would double
the work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from sqlite3 import Connection
from typing import Any

import msgspec

from taskharbor.drivers.contract import QueueSettings
from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    Attempt,
    JobRecord,
    JobState,
    Micros,
    Outcome,
    UpdateFlags,
)

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_ROWS = re.compile(r"/\*rows: (\d+)\*/")
_STEPS = (100, 10, 1)
"""Rows per step: a few sizes, so that every one of them is a statement prepared once."""

STATES = tuple(JobState)
OUTCOMES = tuple(Outcome)
STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}
OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(OUTCOMES)}

SCHEDULED, READY, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = range(7)

INLINE_PAYLOAD = 1024
"""Longer payloads get a row of their own: SQLite rewrites the whole row whenever a job moves."""

TOKEN_LENGTH = 24


class Transaction(msgspec.Struct):
    """A connection in a transaction."""

    connection: Connection
    outbox: list[JobRecord] | None = None
    """Takes the jobs for failure queues, where those are kept in other databases."""
    notifies: bool = False
    """Whether waiters are to be woken once it is committed."""


@cache
def load(family: str, package: str = __package__) -> dict[str, str]:
    """The statements of one file of a package's folder `sql`, by name."""
    text = (files(package) / "sql" / f"{family}.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def _for_rows(statement: str, count: int) -> str:
    def placeholders(match: re.Match[str]) -> str:
        return ", ".join([f"({', '.join('?' * int(match[1]))})"] * count)

    return _ROWS.sub(placeholders, statement)


def in_steps(statement: str, count: int) -> Iterator[tuple[str, int]]:
    """A `/*rows*/` statement for so many rows: what to run step by step, each with the number of rows up to its end."""
    end = 0
    for size in _STEPS:
        while count - end >= size:
            end += size
            yield _for_rows(statement, size), end


def insert_rows(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run a `/*rows*/` statement over all rows."""
    start = 0
    for step, end in in_steps(statement, len(rows)):
        connection.execute(step, list(chain.from_iterable(rows[start:end])))
        start = end


_QUEUES = load("queues")
_DEFAULTS = QueueSettings()


# -- records and rows -----------------------------------------------------------------------------------------


class Spec(msgspec.Struct, omit_defaults=True):
    """The part of a record that only Python reads. Field names are those of JobRecord."""

    codec: str = "json"
    headers: dict[str, str] = {}
    timeout_us: Micros = 0
    update: UpdateFlags | None = None
    idempotency_key: str | None = None
    backoff_min_us: Micros = DEFAULT_BACKOFF_MIN
    backoff_max_us: Micros = DEFAULT_BACKOFF_MAX


_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(Spec).decode


def to_json(value: Any) -> str:
    return _encode(value).decode()


def spec_of(record: JobRecord) -> Spec:
    return Spec(
        record.codec,
        record.headers,
        record.timeout_us,
        record.update,
        record.idempotency_key,
        record.backoff_min_us,
        record.backoff_max_us,
    )


def spec_text(record: JobRecord) -> str | None:
    if (
        record.codec == "json"
        and not record.headers
        and not record.timeout_us
        and record.update is None
        and record.idempotency_key is None
        and record.backoff_min_us == DEFAULT_BACKOFF_MIN
        and record.backoff_max_us == DEFAULT_BACKOFF_MAX
    ):
        return None
    return to_json(spec_of(record))


def read_spec(text: str | None) -> Spec:
    return Spec() if text is None else _decode_spec(text)


def apply_spec(record: JobRecord, text: str) -> None:
    spec = _decode_spec(text)
    record.codec = spec.codec
    record.headers = spec.headers
    record.timeout_us = spec.timeout_us
    record.update = spec.update
    record.idempotency_key = spec.idempotency_key
    record.backoff_min_us = spec.backoff_min_us
    record.backoff_max_us = spec.backoff_max_us


def record_from_row(row: tuple[Any, ...], now: Micros) -> JobRecord:
    """From the columns of `inspect.sql`."""
    state = row[11]
    if state == SCHEDULED and row[6] <= now:
        state = READY
    record = JobRecord(
        id=row[1],
        type=row[2],
        queue=row[3],
        payload=row[4],
        priority=row[5],
        run_at_us=row[6],
        created_at_us=row[7],
        key=row[8],
        max_attempts=row[9],
        max_stalls=row[10],
        state=STATES[state],
        attempts=row[12],
        stalls=row[13],
        fence=row[14],
        last_error=row[15],
        failed_at_us=row[16],
        finished_at_us=row[17],
        result=row[18],
        progress=row[19],
        cancel_requested=bool(row[20]),
        merged_into=row[21],
        token=None if row[22] is None else lease_token(row[22], row[0]),
        worker=row[23],
        expires_at_us=row[24],
        reserved_at_us=row[25],
    )
    if row[26] is not None:
        apply_spec(record, row[26])
    return record


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        seq=row[0],
        job_id=row[1],
        queue=row[2],
        type=row[3],
        key=row[4],
        priority=row[5],
        fence=row[6],
        worker=row[7],
        created_at_us=row[8],
        run_at_us=row[9],
        reserved_at_us=row[10],
        lease_expires_at_us=row[11],
        ended_at_us=row[12],
        outcome=OUTCOMES[row[13]],
        state=STATES[row[14]],
        error_type=row[15],
        error_message=row[16],
        payload_size=row[17],
    )


def lease_token(secret: str, seq: int) -> str:
    """The proof of a lease: the secret of the reserve call and the number of the job's row.

    The row number saves settling the search by id. It grants nothing: id and secret are still compared.
    """
    return f"{secret}{seq:x}"


# -- queues and counters --------------------------------------------------------------------------------------


class QueueRow(msgspec.Struct, frozen=True):
    name: str
    max_inflight: int | None
    failure_queue: str | None


def known_queue_id(transaction: Transaction, name: str) -> int | None:
    row = transaction.connection.execute(_QUEUES["id_of"], (name,)).fetchone()
    return None if row is None else int(row[0])


def queue_id(transaction: Transaction, name: str) -> int:
    """The queue's number; a queue nobody knew yet gets one."""
    known = known_queue_id(transaction, name)
    if known is not None:
        return known
    keep = (_DEFAULTS.keep_done_us, _DEFAULTS.keep_dead_us, _DEFAULTS.keep_attempts_us)
    return transaction.connection.execute(_QUEUES["add"], (name, *keep)).lastrowid or 0


def forget_queue(transaction: Transaction, number: int) -> None:
    """A queue that was only named: every job for it was known before, elsewhere."""
    transaction.connection.execute(_QUEUES["remove"], (number,))


def queue_row(transaction: Transaction, number: int) -> QueueRow:
    return QueueRow(*transaction.connection.execute(_QUEUES["row"], (number,)).fetchone())


def configure(transaction: Transaction, name: str, settings: QueueSettings) -> None:
    number = queue_id(transaction, name)
    transaction.connection.execute(
        _QUEUES["configure"],
        (
            settings.paused,
            settings.max_inflight,
            settings.failure_queue,
            settings.keep_done_us,
            settings.keep_dead_us,
            settings.keep_attempts_us,
            number,
        ),
    )
    transaction.notifies = True


def settings_of(transaction: Transaction, name: str) -> QueueSettings:
    row = transaction.connection.execute(_QUEUES["settings"], (name,)).fetchone()
    return _DEFAULTS if row is None else settings_from(row)


def settings_from(
    row: tuple[int, int | None, str | None, int | None, int | None, int | None],
) -> QueueSettings:
    paused, max_inflight, failure_queue, keep_done, keep_dead, keep_attempts = row
    return QueueSettings(
        paused=bool(paused),
        max_inflight=max_inflight,
        failure_queue=failure_queue,
        keep_done_us=keep_done,
        keep_dead_us=keep_dead,
        keep_attempts_us=keep_attempts,
    )


def is_next_due(transaction: Transaction, queue: int, run_at: Micros) -> bool:
    """Whether a job that was scheduled is due before all others, which is news for those who wait."""
    (earliest,) = transaction.connection.execute(_QUEUES["earliest_scheduled"], {"queue": queue}).fetchone()
    return earliest is not None and run_at <= earliest


class Counts:
    """Deltas of one call. `flush` also says which queues have something new for those who wait."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._deltas: dict[int, list[int]] = {}
        self._stirred: set[int] = set()
        self._scheduled: dict[int, Micros] = {}
        self._ends: dict[int, Micros] = {}

    def move(self, queue: int, old: int | None, new: int | None, jobs: int = 1) -> None:
        """`jobs` jobs from one state to another; None is outside. An end also counts for ever."""
        deltas = self._deltas.setdefault(queue, [0] * 10)
        if old is not None:
            deltas[old] -= jobs
        if new is not None:
            deltas[new] += jobs
            if new >= DONE and old != new:
                deltas[new + 3] += jobs

    def stir(self, queue: int) -> None:
        """Something may have become runnable."""
        self._stirred.add(queue)

    def schedule(self, queue: int, run_at: Micros) -> None:
        """A job was scheduled: of interest to those who wait only if it is due before all others."""
        self._scheduled[queue] = min(run_at, self._scheduled.get(queue, run_at))

    def end_lease(self, queue: int, over_at: Micros) -> None:
        """No later lease of the queue may begin before this. Whoever ends a lease also moves its job."""
        self._ends[queue] = max(over_at, self._ends.get(queue, over_at))

    def flush(self) -> None:
        execute = self._transaction.connection.execute
        for queue, run_at in self._scheduled.items():
            if queue not in self._stirred and is_next_due(self._transaction, queue, run_at):
                self._stirred.add(queue)
        for queue in self._stirred - self._deltas.keys():
            self._deltas[queue] = [0] * 10
        for queue, deltas in self._deltas.items():
            execute(_QUEUES["count"], (*deltas, queue in self._stirred, self._ends.get(queue, 0), queue))
        if self._stirred:
            self._transaction.notifies = True
