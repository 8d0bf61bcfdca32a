"""Bulk writing: tasks stage chunks, publishing turns them into jobs by one INSERT ... SELECT in one transaction.

Every chunk is staged in a transaction of its own. One long transaction (a COPY that waits for its input) would hold up the
readers of the attempt log and the folding of the counters for as long as the task computes.

Jobs with keys are stored one by one, by the rules: each may change the one before. While a write with thousands of them is
published, others who enqueue, settle or requeue jobs with keys wait.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format

from taskharbor.bulk.stage import StagingLost, chunked, series_of, wall_clock
from taskharbor.bulk.store import BulkStore
from taskharbor.drivers.postgres import arrays, connections, migrations
from taskharbor.drivers.postgres.failures import is_conflict, is_lost, translated
from taskharbor.drivers.postgres.notify_throttle import NOTIFYING, SILENT
from taskharbor.drivers.postgres.options import Options, parse_url
from taskharbor.drivers.postgres.rows import (
    backoff_column,
    codec_column,
    flag_number,
    given_columns,
    headers_text,
    to_json,
)
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, JobRecord, Micros
from taskharbor.requests import AlikeJobs, new_id_head

_INTEGER = 23
_INTEGERS = 1007
_ONE_DIMENSION = struct.Struct("!iiiii")
# Before each number stands its length in bytes. Both together are eight bytes: this, with the number in the lower half.
_LENGTH = 4 << 32


class Ends:
    """0 and the end of each payload, encoded."""

    __slots__ = ("data",)

    def __init__(self, payloads: Sequence[bytes]) -> None:
        numbers = array("Q", accumulate(map(len, payloads), initial=_LENGTH))
        if sys.byteorder == "little":
            numbers.byteswap()
        self.data = _ONE_DIMENSION.pack(1, 0, _INTEGER, len(numbers), 1) + numbers.tobytes()


class _EndsDumper(Dumper):
    format = Format.BINARY
    oid = _INTEGERS

    def dump(self, obj: Ends) -> bytes:
        return obj.data


def teach(context: AdaptContext) -> None:
    """Let a connection or cursor take `Ends` for a parameter of type integer[]."""
    context.adapters.register_dumper(Ends, _EndsDumper)


_DEFAULTS = ("json", 0, 0, DEFAULT_BACKOFF_MIN, DEFAULT_BACKOFF_MAX, None)


def chunk_values(jobs: Sequence[JobRecord]) -> Iterator[list[Any]]:
    """Each list begins with `queue` and ends with `payloads`."""
    if isinstance(jobs, AlikeJobs) and jobs.template.key is None and jobs.template.idempotency_key is None:
        yield [
            jobs.template.queue,
            len(jobs),
            True,
            None,
            *_columns([jobs.template]),
            None,
            *_no_rules(jobs.payloads),
        ]
        return
    plain: dict[tuple[str, bool], list[JobRecord]] = {}
    keyed: list[JobRecord] = []
    for job in jobs:
        if job.key is not None:
            keyed.append(job)
        else:
            plain.setdefault((job.queue, job.idempotency_key is not None), []).append(job)
    for (queue, is_idempotent), some in plain.items():
        ids = [job.id for job in some]
        keys = arrays.text_array([job.idempotency_key or "" for job in some]) if is_idempotent else None
        payloads = [job.payload for job in some]
        yield [queue, len(some), False, arrays.text_array(ids), *_columns(some), keys, *_no_rules(payloads)]
    if keyed:
        rules = to_json([given_columns(job) for job in keyed])
        payloads = [job.payload for job in keyed]
        locks = len({(job.queue, job.key) for job in keyed})
        yield [None, len(keyed), False, None, *_NO_COLUMNS, rules, locks, *_joined(payloads)]


def _columns(jobs: Sequence[JobRecord]) -> list[str | None]:
    """types, run_ats, created_ats, ranks, max_attempts, headers and the rare ones."""
    return [
        arrays.text_array([job.type for job in jobs]),
        arrays.int_array([job.run_at_us for job in jobs]),
        arrays.int_array([job.created_at_us for job in jobs]),
        arrays.int_array([-job.priority for job in jobs]),
        arrays.int_array([job.max_attempts for job in jobs]),
        arrays.escaped_texts([headers_text(job.headers) for job in jobs])
        if any(job.headers for job in jobs)
        else None,
        *_rare_columns(jobs),
    ]


_NO_COLUMNS = [None] * 13


def _rare_columns(jobs: Sequence[JobRecord]) -> list[str | None]:
    """codecs, timeouts_us, max_stalls, backoff_mins, backoff_maxs, flags. None stands for the default in all of them."""
    seen = {
        (job.codec, job.timeout_us, job.max_stalls, job.backoff_min_us, job.backoff_max_us, job.update)
        for job in jobs
    }
    if seen == {_DEFAULTS}:
        return [None] * 6
    return [
        arrays.escaped_texts([codec_column(job.codec) for job in jobs]),
        _numbers([job.timeout_us or None for job in jobs]),
        _numbers([job.max_stalls or None for job in jobs]),
        _numbers([backoff_column(job.backoff_min_us, DEFAULT_BACKOFF_MIN) for job in jobs]),
        _numbers([backoff_column(job.backoff_max_us, DEFAULT_BACKOFF_MAX) for job in jobs]),
        _numbers([flag_number(job.update) for job in jobs]),
    ]


def _numbers(values: Iterable[int | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def _no_rules(payloads: Sequence[bytes]) -> tuple[None, None, Ends, bytes]:
    return None, None, *_joined(payloads)


def _joined(payloads: Sequence[bytes]) -> tuple[Ends, bytes]:
    return Ends(payloads), b"".join(payloads)


T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

_TRIES = 10
_CHUNK_JOBS = 10_000
"""Of one row. With next to nothing to do per job, it is the round trips that count."""
_STAGING_LOST = "TH001"
_LOCK_NOT_AVAILABLE = "55P03"


class PostgresWriting(BulkStore):
    """Every call opens a connection of its own: it may run in another process than the one before."""

    _is_made_ready = False

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        # One connection for all, and none after it: so all chunks of a task were staged within one life of the server.
        options = self._made_ready()
        sql = load("bulk_writing", options.schema)
        place = (write, *series_of(write))
        count = number = 0
        with _connected(options) as connection, connection.cursor(binary=True) as cursor:
            teach(cursor)
            for jobs in chunked(batches, _CHUNK_JOBS):
                for values in chunk_values(jobs):
                    cursor.execute(sql["stage"], [write, task, number, *values, *place])
                    number += 1
                count += len(jobs)
            cursor.execute(sql["complete"], [write, task, number, *place])
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        options = self._made_ready()
        statement = load("bulk_writing", options.schema)["publish"]
        stir = NOTIFYING if options.notify else SILENT
        names = arrays.escaped_texts(dict.fromkeys(tasks))
        values = [write, *series_of(write), names, wall_clock() if now is None else now, stir, new_id_head()]

        def publish(connection: Connection) -> int:
            try:
                ((added,),) = connection.execute(statement, values).fetchall()
            except psycopg.Error as error:
                if error.sqlstate != _STAGING_LOST:
                    raise
                raise StagingLost(
                    f"{options.place}: {error.diag.message_primary} (the server was restarted or another took over, and staging "
                    "does not outlive that): nothing was published, write it again"
                ) from error
            return int(added)

        return _repeated(options, publish)

    def abandon(self, write: str) -> None:
        options = self._made_ready()
        statement = load("bulk_writing", options.schema)["abandon"]
        _repeated(options, lambda connection: connection.execute(statement, [write, *series_of(write)]))

    def _made_ready(self) -> Options:
        """Also brings the schema up to date, once: the first task may come before anybody opened the store."""
        options = parse_url(self.url)
        if not self._is_made_ready:
            # In a thread: the caller may be below a running event loop.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, _make_ready(options)).result()
            self._is_made_ready = True
        return options


async def _make_ready(options: Options) -> None:
    async with await connections.connect(options) as connection:
        await migrations.make_ready(connection, options)


@contextmanager
def _connected(options: Options) -> Iterator[Connection]:
    try:
        with psycopg.connect(
            options.conninfo, autocommit=True, prepare_threshold=0 if options.prepare else None
        ) as connection:
            yield connection
    except psycopg.Error as error:
        raise translated(error, options) from error


def _repeated(options: Options, work: Callable[[Connection], T]) -> T:
    """One transaction, which is safe to repeat: done again where it crossed another's, or its answer was lost."""
    tries = 0
    while True:
        tries += 1
        try:
            with psycopg.connect(options.conninfo, autocommit=True, prepare_threshold=None) as connection:
                return work(connection)
        except psycopg.Error as error:
            is_crossed = is_conflict(error) or error.sqlstate == _LOCK_NOT_AVAILABLE
            if tries >= _TRIES or not (is_crossed or (is_lost(error) and tries == 1)):
                raise translated(error, options) from error
            time.sleep(random.random() * 0.002 * 2**tries)
