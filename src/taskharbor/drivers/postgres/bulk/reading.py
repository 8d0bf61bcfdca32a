"""Reading a PostgreSQL store: whole tables by ranges of blocks, the attempt log as a stream by ranges of its cursor.

A batch read of `attempts` is one snapshot, however many parts it has and whenever they are read. A read of `jobs` is one where
it is one part; in several parts, a job that ends while they are read may be seen twice, or not at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from psycopg import sql

from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.store import BulkStore, DriverStore, run_sync
from taskharbor.bulk.tables import SCHEMAS, Part, Selection, Table
from taskharbor.drivers.postgres.connections import Connections, Row
from taskharbor.drivers.postgres.log import START, Place, parse_cursor
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.postgres.rows import STATE_NUMBERS, int_array
from taskharbor.drivers.postgres.statements import load, quoted
from taskharbor.errors import InvalidRequest

_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_EXPRESSIONS = {
    "priority": "r.rank",
    "max_stalls": "coalesce(r.max_stalls, 0)",
    "lease_expires_at": "r.expires_at",
    "codec": "coalesce(r.codec, 'json')",
    # 0 and 1 both wait: which of them a job is follows from the clock.
    "state": "CASE WHEN r.state > 1 THEN r.state WHEN r.run_at > %(now)s THEN 0::smallint ELSE 1::smallint END",
}
"""Columns of jobs that are kept otherwise than they are read. Instants and codes stay numbers, which cost Arrow nothing."""
_LIVE_AND_DEAD = [0, 1, 2, 3, 5]


def statement_of(part: Part, source: str, given: Mapping[str, Any]) -> str:
    """A query for the rows of a source that a part selects. It has conditions for what is given and for nothing else: an index is
    of use only to a condition that is there. Every value is a literal, quoted by the client library."""
    expressions = {"priority": "r.rank"} if part.table == "attempts" else _EXPRESSIONS
    chosen = part.selection
    instant = "ended_at" if part.table == "attempts" else "created_at"
    conditions = {
        "queue": (chosen.queue, "r.queue = %(queue)s"),
        "type": (chosen.type, "r.type = %(type)s"),
        "state": (
            None if chosen.state is None else STATE_NUMBERS[chosen.state],
            f"{expressions.get('state', 'r.state')} = %(state)s",
        ),
        "since": (chosen.since_us, f"r.{instant} >= %(since)s"),
        "before": (chosen.until_us, f"r.{instant} < %(before)s"),
    }
    values = {**given, **{name: value for name, (value, _) in conditions.items()}}
    columns = ", ".join(expressions.get(name, f"r.{name}") for name in SCHEMAS[part.table].names)
    filters = "".join([f" AND {text}" for value, text in conditions.values() if value is not None])
    return _PLACEHOLDER.sub(
        lambda match: sql.Literal(values[match[1]]).as_string(None),
        f"SELECT {columns} FROM ({source}\n) AS r WHERE true{filters}",  # noqa: S608
    )


_BLOCKS_PER_PART = 256
"""Two megabytes: less costs more to start than to read."""
_BLOCKS_PER_STATEMENT = 16_384
"""A few seconds' worth: while a statement runs, the server keeps all dead rows that it might still see, those of the
queue's busiest table among them, and claims have to step over them."""


Blocks = tuple[str, int, int]
"""A table, its first block, and the one after the last."""


def shared_out(sizes: Sequence[tuple[str, int]], parallelism: int) -> list[list[Blocks]]:
    """About `parallelism` shares of all tables together. A large table is cut up; small ones share a part."""
    shares = []
    for low, high in spans(0, sum(size for _, size in sizes), parallelism, _BLOCKS_PER_PART):
        share, offset = [], 0
        for table, size in sizes:
            first, end = max(low - offset, 0), min(high - offset, size)
            if first < end:
                share.append((table, first, end))
            offset += size
        shares.append(share)
    return shares


def in_steps(share: Iterable[Blocks]) -> Iterator[Blocks]:
    """The same blocks in pieces that are read by one statement each."""
    for table, first, end in share:
        for start in range(first, end, _BLOCKS_PER_STATEMENT):
            yield table, start, min(start + _BLOCKS_PER_STATEMENT, end)


def spans(after: int, until: int, parts: int, least: int) -> list[tuple[int, int]]:
    """The numbers above `after` up to `until`, in at most `parts` shares of at least `least` where there are so many."""
    size = until - after
    if size <= 0:
        return []
    count = max(1, min(parts, size // least))
    return list(pairwise([after + size * n // count for n in range(count + 1)]))


_LOOKS = 20
_PAUSE = 0.005
"""Seconds between two looks: a row that is held back is usually held back by a transaction that ends in a moment."""
_ROWS_PER_PART = 20_000
_PROBES_PER_PART = 16
_NO_END = 2**63 - 1


def _bounds(low: Place, high: Place, begin: int, end: int) -> dict[str, str | int | None]:
    return {
        "after_xid": str(low.xid),
        "after_seq": low.seq,
        "until_xid": str(high.xid),
        "until_seq": high.seq,
        "begin": begin,
        "end": end,
    }


class PostgresReading(BulkStore):
    """The reading half."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._options = parse_url(url)
        self._connections = Connections(self._options)

    def close(self) -> None:
        run_sync(self._connections.close())

    def _rows(self, name: str, *values: Any, family: str = "bulk_reading") -> list[Row]:
        statement = load(family, self._options.schema)[name]
        return run_sync(self._connections.run(lambda session: session.rows(statement, values)))

    def _row(self, name: str, *values: Any, family: str = "bulk_reading") -> Row:
        (row,) = self._rows(name, *values, family=family)
        return row

    # -- whole tables -------------------------------------------------------------------------------------------

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "queues":
            return [Part(table=table, selection=selection)]
        if table == "attempts":
            return self._parts_of_attempts(selection, parallelism)
        return self._parts_of_jobs(selection, parallelism)

    def _parts_of_attempts(self, selection: Selection, parallelism: int) -> list[Part]:
        # In this order: whatever the snapshot shows lies in blocks that are there when the sizes are taken.
        snapshot, xmin, begin = self._row("snapshot")
        fixed = {"snapshot": snapshot, "xmin": xmin, "begin": begin}
        days = [
            (name, size)
            for name, size, since, until in self._days("attempts")
            if (since is None or selection.until_us is None or since < selection.until_us)
            and (until is None or selection.since_us is None or until > selection.since_us)
        ]
        shares = shared_out(days, parallelism) or [[]]
        return [
            Part(table="attempts", selection=selection, bounds={"blocks": share, **fixed}) for share in shares
        ]

    def _parts_of_jobs(self, selection: Selection, parallelism: int) -> list[Part]:
        (now,) = self._row("time", family="inspect")
        days = [(name, size) for name, size, _, _ in self._days("finished")]
        shares = shared_out(days, parallelism - 1) if parallelism > 1 else []
        bounds: list[dict[str, Any]] = [{"states": int_array(range(7)), "now": now}]
        if len(shares) > 1:
            bounds = [{"states": int_array(_LIVE_AND_DEAD), "now": now}]
            bounds += [{"blocks": share, "now": now} for share in shares]
        return [Part(table="jobs", selection=selection, bounds=one) for one in bounds]

    def _days(self, parent: str) -> list[tuple[str, int, int | None, int | None]]:
        rows: Any = self._rows("days", f"{quoted(self._options.schema)}.{parent}")
        return list(rows)

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "queues":
            return self._read_queues(part)
        # Imported here: who only plans has no need of it, and it takes a while.
        from taskharbor.drivers.postgres.bulk import arrow

        return arrow.read(self._options, part.table, self._statements(part))

    def _read_queues(self, part: Part) -> Iterator[pa.RecordBatch]:
        with DriverStore(self.url) as store:
            for planned in store.parts("queues", part.selection, parallelism=1):
                yield from store.read(planned)

    def _statements(self, part: Part) -> list[str]:
        sources = load("bulk_reading", self._options.schema)
        if "blocks" not in part.bounds:
            name = "attempts_of_range" if part.table == "attempts" else "jobs_in_states"
            return [statement_of(part, sources[name], part.bounds)]
        return [
            statement_of(
                part,
                sources[f"{part.table}_of_blocks"].replace("/*table*/", quoted(table)),
                {**part.bounds, "from": f"({first},0)", "to": f"({end},0)"},
            )
            for table, first, end in in_steps(part.bounds["blocks"])
        ]

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return str(START)

    def latest(self) -> str:
        """The last row that is certain, after a short wait for those that can be seen already."""
        epoch, xid, seq, newest = self._row("end_of_log")
        if newest is not None and (xid is None or int(newest) > int(xid)):
            for _ in range(_LOOKS):
                if self._row("is_over", newest)[0]:
                    break
                time.sleep(_PAUSE)
            epoch, xid, seq, _ = self._row("end_of_log")
        return str(Place(epoch, 0, 0) if xid is None else Place(epoch, int(xid), seq))

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        first, last = parse_cursor(after), parse_cursor(until)
        if last <= first:
            return after
        if rows is None:
            return until
        for low, high, begin, end in self._ranges(first, last):
            bounds = _bounds(low, high, begin, end).values()
            found = self._rows("limited", *bounds, rows - 1)
            if found:
                return str(Place(low.epoch, int(found[0][0]), found[0][1]))
            if high is not last and self._rows("limited", *bounds, 0):
                # An old epoch whose rest is fewer rows than asked for: the next one begins with the next batch.
                return str(Place(low.epoch + 1, 0, 0))
        return until

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        first, last = parse_cursor(after), parse_cursor(until)
        parts = []
        for number, (low, high, begin, end) in enumerate(self._ranges(first, last)):
            following = self._following(low, begin, end, is_resumed=number == 0 and first.seq > 0)
            if following is None:
                continue
            edges = self._edges(following, high, begin, parallelism) if high is last else []
            for left, right in zip([low, *edges], [*edges, high], strict=True):
                parts.append(Part(table="attempts", bounds=_bounds(left, right, begin, end)))
        return parts

    def _ranges(self, after: Place, until: Place) -> Iterator[tuple[Place, Place, int, int]]:
        """Per epoch: after which place, up to which, and which numbers belong to it."""
        epochs: dict[int, int] = dict(self._rows("epochs", family="log"))
        if max(after.epoch, until.epoch) > max(epochs):
            raise InvalidRequest(
                f"{self._options.place}: {after} and {until} are cursors of another store: this one is in epoch {max(epochs)}. "
                "Begin with a fresh checkpoint"
            )
        for epoch in range(after.epoch, until.epoch + 1):
            low = after if epoch == after.epoch else Place(epoch, 0, 0)
            high = until if epoch == until.epoch else Place(epoch, 2**64 - 1, _NO_END)
            if low < high:
                yield low, high, epochs[epoch], epochs.get(epoch + 1, _NO_END)

    def _following(self, place: Place, begin: int, end: int, *, is_resumed: bool) -> Place | None:
        """The first row of a range. Raises HistoryGone where rows were removed that a reader who comes back has not seen.

        Retention leaves a mark in the present epoch. Where there is none, a sign of it is a cursor whose own row is gone while
        numbers after it were given out and the next row has not the next number.
        """
        is_there, xid, seq, last_number, has_begun, is_passed, is_mark = self._row(
            "around", str(place.xid), place.seq, begin, end
        )
        is_present = end == _NO_END
        if is_resumed and is_present and not has_begun:
            raise InvalidRequest(
                f"{self._options.place}: the cursor {place} is of a transaction that has not begun here yet: the store was put "
                "back to an earlier time, or it is another one. Begin with a fresh checkpoint"
            )
        is_passed = is_present and is_passed
        is_lost = not is_there and last_number > place.seq and seq != place.seq + 1
        if is_resumed and (is_passed or (is_lost and not (is_present and is_mark))):
            raise HistoryGone(
                f"{self._options.place}: rows of the attempt log after {place} were removed "
                f"{'by retention ' if is_passed else ''}before this reader came to them. Keep the log longer (keep_attempts of "
                "the queues), or begin with a fresh checkpoint"
            )
        return None if xid is None else Place(place.epoch, int(xid), seq)

    def _edges(self, first: Place, last: Place, begin: int, parallelism: int) -> list[Place]:
        """Where to cut a range of the present epoch into about equal shares.

        Numbers are given out densely and roughly in the order of commits, so a few looks at which numbers stand where tell how
        the rows are spread over the transactions, which by themselves say nothing about it.
        """
        count = min(parallelism, (last.seq - first.seq) // _ROWS_PER_PART)
        span = last.xid - first.xid
        if count < 2 or span < count:
            return []
        probes = min(_PROBES_PER_PART * count, span)
        xids = sorted({first.xid + span * n // probes for n in range(1, probes)})
        answers = self._rows("probes", int_array(xids), begin)
        edges: list[Place] = []
        for xid, (seq,) in zip(xids, answers, strict=True):
            wanted = first.seq + (last.seq - first.seq) * (len(edges) + 1) // count
            if seq is not None and seq >= wanted and len(edges) < count - 1:
                edges.append(Place(last.epoch, xid, 0))
        return edges
