"""The tables of the queue: transactions and their statements, records as rows, queues, and counters.

Statements are in `sql/`, a file per family of operations, each under a `-- name:` line. `/*name*/` in a statement stands for
another one of its file or of `parts.sql`, `/*rows: n*/` for row values of n columns. A statement takes many rows in one step, and
returns many as one JSON text, because Python gives up the GIL at every step and a busy handler thread may keep it for
milliseconds.

States and outcomes are small integers in the file. What SQL never looks at travels in one JSON column, which is NULL for a job
that uses only defaults: most of them, and each column costs time at every move of the job. A job carries the number of its queue:
short in every index, and no name is too long for it. Counters move by the sums of a whole call: a trigger per row would double
the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import attrgetter
from sqlite3 import Connection, Cursor
from typing import Any

import msgspec
from msgspec.structs import astuple

from taskharbor.drivers.records import OUTCOMES, STATES, QueueSettings
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, JobRecord, Micros, UpdateFlags

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_PART = re.compile(r"/\*(\w+)\*/")
_ROWS = re.compile(r"/\*rows: (\d+)\*/")
_STEPS = (200, 50, 10, 1)
"""Rows per step: a few sizes, so that every one of them is a statement prepared once."""

OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(OUTCOMES)}


class State:
    """Numbers of states in the file: their places in `STATES`."""

    SCHEDULED, READY, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = range(7)


INLINE_PAYLOAD = 1024
"""Longer payloads get a row of their own: SQLite rewrites the whole row whenever a job moves."""

TOKEN_LENGTH = 24
"""The characters of `new_token`, with which the token of a lease begins."""


def _read(family: str, package: str) -> dict[str, str]:
    text = (files(package) / "sql" / f"{family}.sql").read_text("utf-8")
    pieces = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


@cache
def load(family: str, package: str = __package__) -> dict[str, str]:
    """Return the statements of one file of a package's folder `sql`, by name."""
    statements = _read(family, package)
    parts = _read("parts", __package__) | statements
    return {
        name: _PART.sub(lambda match: parts.get(match[1], match[0]), body)
        for name, body in statements.items()
    }


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


_QUEUES = load("queues")
_FIRST = -(2**63)


class Transaction(msgspec.Struct):
    """A connection in a transaction."""

    connection: Connection
    outbox: list[JobRecord] | None = None
    """Takes the jobs for failure queues, where those are kept in other databases."""
    notifies: bool = False
    """True if the commit wakes waiters."""

    @property
    def execute(self) -> Callable[..., Cursor]:
        return self.connection.execute

    def insert_rows(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run a `/*rows*/` statement over all rows."""
        start = 0
        for step, end in in_steps(statement, len(rows)):
            self.execute(step, list(chain.from_iterable(rows[start:end])))
            start = end

    def fetch(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Return the value that a statement returns as JSON."""
        (text,) = self.execute(statement, values).fetchone()
        return msgspec.json.decode(text)

    def known_queue_id(self, name: str) -> int | None:
        """The number of a queue that is known."""
        row = self.execute(_QUEUES["id_of"], (name,)).fetchone()
        return None if row is None else int(row[0])

    def queue_id(self, name: str) -> int:
        """The queue's number; a queue nobody knew yet gets one."""
        known = self.known_queue_id(name)
        if known is not None:
            return known
        return self.execute(_QUEUES["add"], (name, *astuple(QueueSettings()))).lastrowid or 0

    def is_next_due(self, queue: int, run_at: Micros) -> bool:
        """True if a scheduled job is due before all others, so that waiters must learn of it."""
        values = {"queue": queue, "since": _FIRST}
        (earliest,) = self.execute(_QUEUES["earliest_scheduled"], values).fetchone()
        return earliest is not None and run_at <= earliest


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

    @classmethod
    def of(cls, record: JobRecord) -> Spec:
        return cls(*spec_values(record))

    @classmethod
    def read(cls, text: str | None) -> Spec:
        return cls() if text is None else _decode_spec(text)

    def text(self) -> str | None:
        return None if self == Spec() else to_json(self)


_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(Spec).decode
spec_values: Callable[[object], tuple[Any, ...]] = attrgetter(*Spec.__struct_fields__)
DEFAULT_SPEC = spec_values(Spec())


def to_json(value: Any) -> str:
    return _encode(value).decode()


def apply_spec(record: JobRecord, text: str) -> None:
    spec = _decode_spec(text)
    for field in Spec.__struct_fields__:
        setattr(record, field, getattr(spec, field))


_COLUMNS = tuple(field for field in JobRecord.__struct_fields__ if field not in Spec.__struct_fields__)
"""Fields that are columns, in the order of `inspect.sql`."""


def record_from_row(row: tuple[Any, ...], now: Micros) -> JobRecord:
    """From the columns of `inspect.sql`: the number, the fields, the spec."""
    record = JobRecord(**dict(zip(_COLUMNS, row[1:-1], strict=True)))
    state: int = row[11]
    record.state = STATES[State.READY if state == State.SCHEDULED and record.run_at_us <= now else state]
    record.cancel_requested = bool(record.cancel_requested)
    if record.token is not None:
        record.token = lease_token(record.token, row[0])
    if row[-1] is not None:
        apply_spec(record, row[-1])
    return record


def lease_token(secret: str, seq: int) -> str:
    """The proof of a lease: the secret of the reserve call and the number of the job's row.

    The row number saves settling the search by id. It grants nothing: id and secret are still compared.
    """
    return f"{secret}{seq:x}"


# -- counters -------------------------------------------------------------------------------------------------


class Counts:
    """Changes of the counters in one call. `flush` also returns the queues whose waiters are to be woken."""

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
            if new >= State.DONE and old != new:
                deltas[new + 3] += jobs

    def stir(self, queue: int) -> None:
        """Something may have become runnable."""
        self._stirred.add(queue)

    def schedule(self, queue: int, run_at: Micros) -> None:
        """Note a scheduled job. Waiters need to know only if it is due before all others."""
        self._scheduled[queue] = min(run_at, self._scheduled.get(queue, run_at))

    def end_lease(self, queue: int, over_at: Micros) -> None:
        """Note the end of a lease: no later lease of the queue may begin before it. The caller also moves the job."""
        self._ends[queue] = max(over_at, self._ends.get(queue, over_at))

    def flush(self) -> None:
        for queue, run_at in self._scheduled.items():
            if queue not in self._stirred and self._transaction.is_next_due(queue, run_at):
                self._stirred.add(queue)
        for queue in self._stirred - self._deltas.keys():
            self._deltas[queue] = [0] * 10
        for queue, deltas in self._deltas.items():
            values = (*deltas, queue in self._stirred, self._ends.get(queue, 0), queue)
            self._transaction.execute(_QUEUES["count"], values)
        if self._stirred:
            self._transaction.notifies = True
