"""Reading an SQLite store by ranges of row numbers, several of them at once.

One writer at a time means that the numbers of the attempt log are in the order of commits: a cursor is a number, and whatever
is fixed by the highest one is a snapshot. Rows are read in short windows, because a read that lasts keeps the write-ahead
log from being folded back.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from taskharbor.bulk.batches import fitted
from taskharbor.bulk.contract import BulkStore, HistoryGone, Part, Selection, Table
from taskharbor.bulk.generic import GenericStore
from taskharbor.bulk.schemas import SCHEMAS
from taskharbor.bulk.splitting import spans
from taskharbor.drivers.sqlite.connection import Connection, open_connection, translated
from taskharbor.drivers.sqlite.options import parse_url
from taskharbor.drivers.sqlite.rows import OUTCOMES, STATE_NUMBERS, STATES
from taskharbor.drivers.sqlite.statements import load
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch

_SQL = load("bulk_reading")
_ROWS_PER_PART = 10_000
"""A part of fewer rows costs more to start than to read."""
_WINDOW = {"attempts": 20_000, "jobs": 1_000}
"""Numbers per statement. Jobs carry payloads, of up to a megabyte each."""
_BATCH_ROWS = 20_000
_BATCH_BYTES = 16_000_000

_CODES: dict[str, pa.Array] = {
    "state": pa.array([state.value for state in STATES]),
    "outcome": pa.array([outcome.value for outcome in OUTCOMES]),
}


class SQLiteReading(BulkStore):
    """The reading half."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._address = parse_url(url)

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "queues":
            return [Part(table=table, selection=selection)]
        with self._reader() as connection:
            first, last = connection.execute(_SQL[f"range_of_{table}"]).fetchone()
        after, until = (0, 0) if first is None else (first - 1, last)
        now = time.time_ns() // 1000
        return _parts(table, selection, after, until, parallelism, now) or [
            Part(table=table, selection=selection, bounds={"after": 0, "until": 0, "now": now})
        ]

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "queues":
            return self._read_queues(part)
        return self._read_windows(part)

    def _read_windows(self, part: Part) -> Iterator[pa.RecordBatch]:
        table, until, window = part.table, _number(part, "until"), _WINDOW[part.table]
        values = _values(part.selection) | {"now": part.bounds["now"]}
        rows: list[tuple[Any, ...]] = []
        weight = 0
        with self._reader() as connection:
            for after in range(_number(part, "after"), until, window):
                bounds = {"after": after, "until": min(after + window, until)}
                found = connection.execute(_SQL[table], values | bounds).fetchall()
                rows += found
                if table == "jobs":
                    weight += sum(len(row[23]) + len(row[24] or b"") for row in found)
                if len(rows) >= _BATCH_ROWS or weight >= _BATCH_BYTES:
                    yield _batch(table, rows)
                    rows, weight = [], 0
            if rows:
                yield _batch(table, rows)

    def _read_queues(self, part: Part) -> Iterator[pa.RecordBatch]:
        # Opening the driver would make a store where there is none.
        self._check_file()
        with GenericStore(self.url) as store:
            yield from store.read(part)

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return "0"

    def latest(self) -> str:
        with self._reader() as connection:
            return str(_highest(connection))

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        first, last = _cursor(after), _cursor(until)
        with self._reader() as connection:
            self._check_history(connection, first, last)
            if first == 0:
                # From the beginning, wherever that is by now.
                kept = connection.execute(_SQL["range_of_attempts"]).fetchone()[0]
                first = last if kept is None else max(first, kept - 1)
        return _parts("attempts", Selection(), first, last, parallelism, 0)

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        if rows is None or _cursor(until) <= _cursor(after):
            return str(max(_cursor(after), _cursor(until)))
        values = {"after": _cursor(after), "until": _cursor(until), "limit": rows}
        with self._reader() as connection:
            (last,) = connection.execute(_SQL["limited"], values).fetchone()
        return until if last is None else str(last)

    def _check_history(self, connection: Connection, after: int, until: int) -> None:
        """Numbers follow one another without a gap, so a gap right after a cursor whose own row is gone means that retention
        has overtaken the reader. (Where queues are kept for different times, gaps are nothing unusual further on.)"""
        highest = _highest(connection)
        if max(after, until) > highest:
            raise InvalidRequest(
                f"cursor {max(after, until)} is beyond the log of {self._address.path}, which ends at {highest}: it belongs to "
                "another store. Begin with a fresh checkpoint"
            )
        is_there, following = connection.execute(_SQL["around"], {"after": after}).fetchone()
        if after and not is_there and after < highest and following != after + 1:
            raise HistoryGone(
                f"rows {after + 1} to {highest if following is None else following - 1} of the attempt log were removed by "
                "retention before this reader came to them. Keep the log longer (keep_attempts of the queues), or begin with "
                "a fresh checkpoint"
            )

    # -- connections --------------------------------------------------------------------------------------------

    def _check_file(self) -> None:
        if not self._address.path.is_file():
            raise BackendUnavailable(f"{self._address.path}: there is no such store; check the path")

    @contextmanager
    def _reader(self) -> Iterator[Connection]:
        self._check_file()
        connection = open_connection(self._address, writing=False)
        try:
            yield connection
        except sqlite3.Error as error:
            if "no such table" in str(error):
                raise SchemaMismatch(
                    f"{self._address.path}: not a TaskHarbor store, or an old one ({error}): run `taskharbor migrate`"
                ) from error
            raise translated(error, self._address.path) from error
        finally:
            connection.close()


def _highest(connection: Connection) -> int:
    highest: int = connection.execute(_SQL["highest"]).fetchone()[0]
    return highest


def _parts(
    table: Table, selection: Selection, after: int, until: int, parallelism: int, now: int
) -> list[Part]:
    return [
        Part(table=table, selection=selection, bounds={"after": low, "until": high, "now": now})
        for low, high in spans(after, until, parallelism, _ROWS_PER_PART)
    ]


def _values(selection: Selection) -> dict[str, str | int | None]:
    return {
        "queue": selection.queue,
        "type": selection.type,
        "state": None if selection.state is None else STATE_NUMBERS[selection.state],
        "since": selection.since_us,
        "before": selection.until_us,
    }


def _batch(table: Table, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = []
    for field, values in zip(SCHEMAS[table], zip(*rows, strict=True), strict=True):
        if field.name in _CODES:
            columns.append(_CODES[field.name].take(pa.array(values, pa.int8())))
        else:
            columns.append(pa.array(values, pa.int64() if pa.types.is_timestamp(field.type) else field.type))
    return fitted(table, columns)


def _number(part: Part, bound: str) -> int:
    number = part.bounds[bound]
    assert isinstance(number, int)
    return number


def _cursor(text: str) -> int:
    if not (text.isdecimal() and len(text) < 19):
        raise InvalidRequest(f"{text!r} is not a cursor of this store: pass on what `start` or `latest` gave")
    return int(text)
