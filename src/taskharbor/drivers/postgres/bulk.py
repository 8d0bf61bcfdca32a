"""PostgreSQL as a bulk store: reading by Arrow, writing by batches that are staged and then published. Needs pyarrow.

Whole tables are read by ranges of blocks, the attempt log as a stream by ranges of its cursor. A batch read of `attempts` is one
snapshot, however many parts it has and whenever they are read. A read of `jobs` is one where it is one part; in several parts, a
job that ends while they are read may be seen twice, or not at all.

Tasks stage batches, and publishing turns them into jobs in one transaction. Every batch is staged in a transaction of its own: a
long one (a COPY that waits for its input) would hold up the readers of the attempt log and the folding of the counters for as
long as the task computes. Jobs with keys are stored one by one, by the rules: each may change the one before. While a
write with thousands of them is published, others who enqueue, settle or requeue jobs with keys wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import astuple
from psycopg import sql

from taskharbor.bulk.cursors import ANEW, HistoryGone, StoreReplaced
from taskharbor.bulk.stage import StagingLost, chunked, series_of, wall_clock
from taskharbor.bulk.store import BulkStore, run_sync
from taskharbor.bulk.tables import SCHEMAS, Part, Selection, Table, fitted
from taskharbor.drivers.postgres.connections import Operation, Row, T, translated
from taskharbor.drivers.postgres.driver import PostgresDriver
from taskharbor.drivers.postgres.enqueue import batch_values, rare_settings
from taskharbor.drivers.postgres.log import START, Place, await_writers, parse_cursor
from taskharbor.drivers.postgres.migrations import open_ready
from taskharbor.drivers.postgres.options import PostgresOptions
from taskharbor.drivers.postgres.rows import int_array, load, quoted, rule_values, text_array
from taskharbor.drivers.records import STATES
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import JobRecord, JobState, Micros, Outcome
from taskharbor.requests import AlikeJobs, new_id_head

_CHUNK_JOBS = 10_000
"""The most jobs of one staged row. There is little work per job, so round trips decide the cost."""
_STAGING_LOST = "TH001"
_NO_BATCH = [None] * 15

_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_EXPRESSIONS = {
    "priority": "r.rank",
    "max_stalls": "coalesce(r.max_stalls, 0)",
    "lease_expires_at": "r.expires_at",
    "codec": "coalesce(r.codec, 'json')",
    # 0 and 1 both wait: the clock decides which of them a job is.
    "state": "CASE WHEN r.state > 1 THEN r.state WHEN r.run_at > %(now)s THEN 0::smallint ELSE 1::smallint END",
}
"""Columns of jobs that are stored otherwise than they are read. Instants and codes stay numbers, which cost Arrow nothing."""
_LIVE_AND_DEAD = [0, 1, 2, 3, 5]


def statement_of(part: Part, source: str, given: Mapping[str, Any]) -> str:
    """Make a query for the rows of a source that a part selects. It has conditions only for the values that are given, because an
    index serves only a condition that is there. Every value is a literal, quoted by the client library."""
    expressions = {"priority": "r.rank"} if part.table == "attempts" else _EXPRESSIONS
    chosen = part.selection
    instant = "ended_at" if part.table == "attempts" else "created_at"
    conditions = {
        "r.queue =": chosen.queue,
        "r.type =": chosen.type,
        f"{expressions.get('state', 'r.state')} =": chosen.state and STATES.index(chosen.state),
        f"r.{instant} >=": chosen.since_us,
        f"r.{instant} <": chosen.until_us,
    }
    columns = ", ".join(expressions.get(name, f"r.{name}") for name in SCHEMAS[part.table].names)
    fill = partial(_PLACEHOLDER.sub, lambda match: _literal(given[match[1]]))
    filters = [
        f" AND {fill(text)} {_literal(value)}" for text, value in conditions.items() if value is not None
    ]
    return fill(f"SELECT {columns} FROM ({source}\n) AS r WHERE true") + "".join(filters)  # noqa: S608


def _literal(value: Any) -> str:
    return sql.Literal(value).as_string(None)


_BLOCKS_PER_PART = 256
"""Two megabytes. A smaller part costs more to start than to read."""
_PIECES_PER_PART = 4
_BLOCKS_PER_STATEMENT = 16_384
"""A few seconds of reading. While a statement runs, the server keeps all dead rows that the statement might still see. Some of
them are in the queue's busiest table, where claims have to step over them."""


Blocks = tuple[str, int, int]
"""A table, its first block, and the block after the last."""


def shared_out(sizes: Sequence[tuple[str, int]], parallelism: int) -> list[list[Blocks]]:
    """Cut all tables together into about `parallelism` shares. Each piece of a share is read by one statement."""
    total = sum(size for _, size in sizes)
    count = max(1, min(parallelism, total // _BLOCKS_PER_PART))
    step = max(1, min(total // (_PIECES_PER_PART * count), _BLOCKS_PER_STATEMENT))
    pieces = [
        (table, first, min(first + step, size)) for table, size in sizes for first in range(0, size, step)
    ]
    return [pieces[n::count] for n in range(count)]


_ROWS_PER_PART = 20_000
_PROBES_PER_PART = 16


class PostgresBulkStore(BulkStore):
    """A bulk store on PostgreSQL. A writing call brings the schema up to date, because the first task may come before anybody
    opened the store; a reading call does not."""

    _reader: PostgresDriver
    _writer: PostgresDriver

    def _read(self, operation: Operation[T]) -> T:
        self._reading()
        return run_sync(self._reader._query(operation))

    def _rows(self, name: str, *values: Any) -> list[Row]:
        return self._read(lambda session: session.named("bulk_reading", name, *values))

    def _call(self, function: str, *values: Any) -> Any:
        self._writing()
        return run_sync(self._writer._store_call(function, *values))

    # -- whole tables -------------------------------------------------------------------------------------------

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "queues":
            return super().parts(table, selection, parallelism=parallelism)
        # In this order: all rows of the snapshot are in blocks that exist when the sizes are taken.
        ((snapshot, xmin, now),) = self._rows("snapshot")
        if table == "attempts":
            days = self._days("attempts", selection.since_us, selection.until_us)
            fixed: dict[str, Any] = {"snapshot": snapshot, "xmin": xmin}
            bounds = [{"blocks": share, **fixed} for share in shared_out(days, parallelism)]
        else:
            shares = shared_out(self._days("finished"), parallelism - 1) if parallelism > 1 else []
            is_one = len(shares) < 2
            bounds = [{"states": int_array(range(7) if is_one else _LIVE_AND_DEAD), "now": now}]
            bounds += [] if is_one else [{"blocks": share, "now": now} for share in shares]
        return [Part(table=table, selection=selection, bounds=one) for one in bounds]

    def _days(self, parent: str, since: Micros | None = None, until: Micros | None = None) -> list[Row]:
        """Return the partitions with rows of a time, and the number of blocks of each."""
        return self._rows("days", f"{quoted(self._reader.options.schema)}.{parent}", since, until)

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "queues":
            return super().read(part)
        return _read_arrow(self._reader.options, part.table, self._statements(part))

    def _statements(self, part: Part) -> list[str]:
        sources = load("bulk_reading", self._reader.options.schema)
        if "blocks" not in part.bounds:
            name = "attempts_of_range" if part.table == "attempts" else "jobs_in_states"
            return [statement_of(part, sources[name], part.bounds)]
        return [
            statement_of(
                part,
                sources[f"{part.table}_of_blocks"].replace("/*table*/", quoted(table)),
                {**part.bounds, "from": f"({first},0)", "to": f"({end},0)"},
            )
            for table, first, end in part.bounds["blocks"]
        ]

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return str(START)

    def latest(self) -> str:
        """Return the cursor of the last row that is certain, after a short wait for rows that can be seen already."""
        self._read(await_writers)
        found = self._rows("end_of_log")
        return str(Place(*found[0]) if found else START)

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        first, last = parse_cursor(after), parse_cursor(until)
        if last <= first:
            if last < first:
                self._following(first)
            return after
        found = [] if rows is None else self._rows("limited", *astuple(first), *astuple(last), rows - 1)
        return str(Place(*found[0])) if found else until

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        first, last = parse_cursor(after), parse_cursor(until)
        following = None if last == first else self._following(first)
        if following is None or following > last:
            return []
        edges = self._edges(following, last, parallelism)
        ranges = [
            {"after_xid": low.xid, "after_seq": low.seq, "until_xid": high.xid, "until_seq": high.seq}
            for low, high in pairwise([first, *edges, last])
        ]
        return [Part(table="attempts", bounds=bounds) for bounds in ranges]

    def _following(self, place: Place) -> Place | None:
        """Return the first row after a cursor. Raises HistoryGone if rows were removed that the reader has not seen, and
        StoreReplaced if the store never wrote the cursor's row.

        Retention leaves a mark. Without a mark, there is one sign of removed rows: the cursor's own row is gone, numbers after it
        were given out, and the next row does not have the next number.
        """
        ((is_there, xid, seq, last_number, has_begun, is_passed, is_mark),) = self._rows(
            "around", place.xid, place.seq
        )
        is_resumed, where = place.seq > 0, self._reader.options.place
        if is_resumed and (not has_begun or last_number < place.seq):
            raise StoreReplaced(
                f"{where}: the cursor {place} is of a row that this store has not written yet: it was put back to an earlier "
                f"time or is another one. To read what came since, {ANEW}"
            )
        is_lost = not is_there and not is_mark and last_number > place.seq and seq != place.seq + 1
        if is_resumed and (is_passed or is_lost):
            raise HistoryGone(
                f"{where}: rows of the attempt log after {place} were removed "
                f"{'by retention ' if is_passed else ''}before this reader came to them. Keep the log longer (keep_attempts of "
                f"the queues), or {ANEW}"
            )
        return None if xid is None else Place(xid, seq)

    def _edges(self, first: Place, last: Place, parallelism: int) -> list[Place]:
        """Return the places that cut a range into about equal shares.

        Numbers are given out densely and roughly in the order of commits. The numbers of transactions say nothing about the rows.
        So a few probes find out which numbers are where, and thereby how the rows are spread over the transactions.
        """
        count = min(parallelism, (last.seq - first.seq) // _ROWS_PER_PART)
        span = last.xid - first.xid
        if count < 2 or span < count:
            return []
        probes = min(_PROBES_PER_PART * count, span)
        xids = sorted({first.xid + span * n // probes for n in range(1, probes)})
        edges: list[Place] = []
        for xid, (seq,) in zip(xids, self._rows("probes", int_array(xids)), strict=True):
            wanted = first.seq + (last.seq - first.seq) * (len(edges) + 1) // count
            if seq is not None and seq >= wanted and len(edges) < count - 1:
                edges.append(Place(xid, 0))
        return edges

    # -- writing ------------------------------------------------------------------------------------------------

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        # One connection for all batches, and no second one after it: so all rows of a task were staged within one life of the
        # server.
        options = self._writer.options
        session = run_sync(open_ready(options))
        count = number = 0
        try:
            for jobs in chunked(batches, _CHUNK_JOBS):
                for batch, size, rules, locks in staged_values(jobs):
                    values = [*batch, write, task, number, size, rules, locks, *series_of(write)]
                    run_sync(session.named("enqueue", "stage", *values))
                    number += 1
                count += len(jobs)
            run_sync(session.named("enqueue", "complete", write, task, number, *series_of(write)))
        except psycopg.Error as error:
            raise translated(error, options) from error
        finally:
            run_sync(session.connection.close())
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        names = text_array(list(dict.fromkeys(tasks)))
        at = wall_clock() if now is None else now
        values = [*series_of(write), names, at, self._writer.options.stir, new_id_head()]
        try:
            return int(self._call("publish_write", write, *values))
        except TaskHarborError as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.Error) or cause.sqlstate != _STAGING_LOST:
                raise
            raise StagingLost(
                f"{self._writer.options.place}: {cause.diag.message_primary} (the server was restarted or another took over, and "
                "staging does not outlive that): nothing was published, write it again"
            ) from cause

    def abandon(self, write: str) -> None:
        self._call("abandon_write", write, *series_of(write))


def staged_values(jobs: Sequence[JobRecord]) -> Iterator[tuple[list[Any], int, str | None, int | None]]:
    """Return per row: the fields of its batch, the number of jobs, and for jobs with keys the argument of the rules and the
    number of locks."""
    if isinstance(jobs, AlikeJobs) and jobs.template.key is None and jobs.template.idempotency_key is None:
        yield batch_values([jobs.template], jobs.payloads, has_ids=False), len(jobs), None, None
        return
    batches: dict[tuple[Any, ...], list[JobRecord]] = {}
    keyed: list[JobRecord] = []
    for job in jobs:
        if job.key is not None:
            keyed.append(job)
        else:
            kind = (job.queue, job.idempotency_key is not None, *rare_settings(job))
            batches.setdefault(kind, []).append(job)
    for some in batches.values():
        yield batch_values(some), len(some), None, None
    if keyed:
        rules, *payloads = rule_values(keyed)
        yield [*_NO_BATCH, *payloads], len(keyed), rules, len({(job.queue, job.key) for job in keyed})


# -- results as Arrow, straight from the server's binary rows -----------------------------------------------------------

_NO_SUCH_TABLE = "42P01"
_BATCH_BYTES = 2_000_000
"""About ten thousand attempts. With larger batches a reader waits longer for the first, and works alone on the last."""


def _read_arrow(
    options: PostgresOptions, table: Table, statements: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Return the rows of some statements, one after the other, in batches that fit the table's schema.

    Each statement is its own transaction. Between two of them nothing is held open on the server.
    """
    # Imported here: planning and writing do not need it, and the import takes a while.
    from adbc_driver_postgresql import StatementOptions, dbapi

    try:
        with closing(dbapi.connect(options.conninfo, autocommit=True)) as connection:
            for statement in statements:
                with closing(connection.cursor()) as cursor:
                    cursor.adbc_statement.set_options(
                        **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
                    )
                    cursor.execute(statement)
                    for batch in cursor.fetch_record_batch():
                        if batch.num_rows:
                            yield _batch(table, batch)
    except dbapi.Error as error:
        raise _translated_adbc(error, options) from error


@cache
def _names_of(column: str) -> pa.Array:
    # Made on demand: with its first array pyarrow imports pandas.
    return pa.array([member.value for member in (JobState if column == "state" else Outcome)])


def _batch(table: Table, found: pa.RecordBatch) -> pa.RecordBatch:
    """Match columns by position. The server's names of the columns do not matter."""
    columns: list[Any] = []
    for field, column in zip(SCHEMAS[table], found.columns, strict=True):
        if field.name in ("state", "outcome"):
            columns.append(_names_of(field.name).take(column))
        elif field.name == "priority":
            columns.append(pc.negate(column.cast(pa.int32())))
        else:
            columns.append(column)
    return fitted(table, columns)


def _translated_adbc(error: Exception, options: PostgresOptions) -> Exception:
    from adbc_driver_postgresql import dbapi

    text = " ".join(str(error).split())
    if getattr(error, "sqlstate", None) == _NO_SUCH_TABLE:
        return HistoryGone(
            f"{options.place}: a day of the history was removed by retention after this read was planned ({text}): read again"
        )
    if isinstance(error, (dbapi.OperationalError, dbapi.InterfaceError, dbapi.InternalError)):
        return BackendUnavailable(f"{options.place}: {text}")
    return TaskHarborError(f"{options.place}: {text}")
