"""Bulk writing: tasks stage batches, publishing turns them into jobs in one transaction.

Every batch is staged in a transaction of its own. One long transaction (a COPY that waits for its input) would hold up the
readers of the attempt log and the folding of the counters for as long as the task computes.

Jobs with keys are stored one by one, by the rules: each may change the one before. While a write with thousands of them is
published, others who enqueue, settle or requeue jobs with keys wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import RawCursor

from taskharbor.bulk.stage import StagingLost, chunked, series_of, wall_clock
from taskharbor.bulk.store import BulkStore, run_sync
from taskharbor.drivers.postgres import migrations
from taskharbor.drivers.postgres.connections import NOTIFYING, SILENT, is_conflict, is_lost, translated
from taskharbor.drivers.postgres.enqueue import batch_values, rare_settings, rule_values
from taskharbor.drivers.postgres.options import Options, parse_url
from taskharbor.drivers.postgres.rows import text_array
from taskharbor.drivers.postgres.statements import call, load
from taskharbor.jobs import JobRecord, Micros
from taskharbor.requests import AlikeJobs, new_id_head

Connection = psycopg.Connection[tuple[Any, ...]]

_TRIES = 10
_CHUNK_JOBS = 10_000
"""Of one row. With next to nothing to do per job, it is the round trips that count."""
_STAGING_LOST = "TH001"
_LOCK_NOT_AVAILABLE = "55P03"
_NO_BATCH = [None] * 20


def staged_values(jobs: Sequence[JobRecord]) -> Iterator[tuple[list[Any], int, str | None, int | None]]:
    """Per row: the fields of its batch, how many jobs, and for jobs with keys what the rules take and how many locks."""
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


class PostgresWriting(BulkStore):
    """Every call opens a connection of its own: it may run in another process than the one before."""

    _is_made_ready = False

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        # One connection for all, and none after it: so all rows of a task were staged within one life of the server.
        options = self._made_ready()
        sql = load("enqueue", options.schema)
        count = number = 0
        with _connected(options) as connection, RawCursor(connection) as cursor:
            for jobs in chunked(batches, _CHUNK_JOBS):
                for batch, size, rules, locks in staged_values(jobs):
                    values = [*batch, write, task, number, size, rules, locks, *series_of(write)]
                    cursor.execute(sql["stage"].encode(), values)
                    number += 1
                count += len(jobs)
            cursor.execute(sql["complete"].encode(), [write, task, number, *series_of(write)])
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        options = self._made_ready()
        stir = NOTIFYING if options.notify else SILENT
        names = text_array(list(dict.fromkeys(tasks)))
        values = [write, *series_of(write), names, wall_clock() if now is None else now, stir, new_id_head()]
        try:
            return int(_repeated(options, "publish_write", values))
        except psycopg.Error as error:
            if error.sqlstate != _STAGING_LOST:
                raise translated(error, options) from error
            raise StagingLost(
                f"{options.place}: {error.diag.message_primary} (the server was restarted or another took over, and staging "
                "does not outlive that): nothing was published, write it again"
            ) from error

    def abandon(self, write: str) -> None:
        options = self._made_ready()
        try:
            _repeated(options, "abandon_write", [write, *series_of(write)])
        except psycopg.Error as error:
            raise translated(error, options) from error

    def _made_ready(self) -> Options:
        """Also brings the schema up to date, once: the first task may come before anybody opened the store."""
        options = parse_url(self.url)
        if not self._is_made_ready:
            run_sync(_make_ready(options))
            self._is_made_ready = True
        return options


async def _make_ready(options: Options) -> None:
    await (await migrations.open_ready(options)).connection.close()


@contextmanager
def _connected(options: Options) -> Iterator[Connection]:
    try:
        with psycopg.connect(
            options.conninfo, autocommit=True, prepare_threshold=0 if options.prepare else None
        ) as connection:
            yield connection
    except psycopg.Error as error:
        raise translated(error, options) from error


def _repeated(options: Options, function: str, values: Sequence[Any]) -> Any:
    """One transaction, which is safe to repeat: done again where it crossed another's, or its answer was lost."""
    statement = call(function, options.schema, len(values)).encode()
    tries = 0
    while True:
        tries += 1
        try:
            with (
                psycopg.connect(options.conninfo, autocommit=True, prepare_threshold=None) as connection,
                RawCursor(connection) as cursor,
            ):
                ((answer,),) = cursor.execute(statement, values).fetchall()
                return answer
        except psycopg.Error as error:
            is_crossed = is_conflict(error) or error.sqlstate == _LOCK_NOT_AVAILABLE
            if tries >= _TRIES or not (is_crossed or (is_lost(error) and tries == 1)):
                raise
            time.sleep(random.random() * 0.002 * 2**tries)
