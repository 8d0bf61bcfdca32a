"""A DataFrame becomes jobs, or names jobs to requeue, cancel or purge.

Jobs are staged by the tasks and published in one step when all of them are done.

A task stages under its own attempt, so of a partition that was computed twice (a retry, a speculative copy) only what the
winner staged is published. A batch of a stream has the same name whenever it is done over, and is published once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.types as kinds
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from taskharbor.bulk.stage import new_write, numbered_write, wall_clock
from taskharbor.bulk.store import open_store
from taskharbor.client import chunks
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest, JobError, TaskHarborError
from taskharbor.jobs import JobState, Micros
from taskharbor.requests import RecordBuilder
from taskharbor.spark.session import require_shared_store
from taskharbor.spark.source.requests import OPTIONS, RowRefused, RowsToJobs

ENQUEUE = "enqueue"
ACTIONS = ("requeue", "cancel", "purge")

_KNOWN_OPTIONS = {"url", "mode", *OPTIONS}
_SPARK_OPTIONS = {"path", "checkpointlocation", "queryname", "outputmode"}
"""Options that Spark itself passes on."""


@dataclass
class StagedTask(WriterCommitMessage):
    """A task's message to the publisher."""

    write: str
    task: str
    jobs: int


class JobWriter(DataSourceArrowWriter):
    """One `df.write`. Made once per write, so its name is the write's."""

    def __init__(self, url: str, rows: RowsToJobs) -> None:
        self._url = url
        self._rows = rows
        self._write = new_write()
        # One instant for all: jobs that are due at once then run in the DataFrame's order, whichever task began first.
        self._now = wall_clock()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _stage(self._url, self._rows, self._write, self._now, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _publish(self._url, self._write, _staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        with open_store(self._url) as store:
            store.abandon(self._write)


class JobStreamWriter(DataSourceStreamArrowWriter):
    """One `df.writeStream`. Another process commits than writes, so what they share is in the tasks' properties and messages."""

    def __init__(self, url: str, rows: RowsToJobs) -> None:
        self._url = url
        self._rows = rows

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise TaskHarborError("Spark did not say to which query and batch this task belongs")
        return _stage(
            self._url, self._rows, numbered_write(f"spark-{query}", int(batch)), wall_clock(), iterator
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        staged = _staged(messages)
        if staged:
            _publish(self._url, staged[0].write, staged)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        with open_store(self._url) as store:
            for write in {message.write for message in messages if isinstance(message, StagedTask)}:
                store.abandon(write)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """The writer for `df.write`: every row becomes a job, or is an id of a job to requeue, cancel or purge."""
    url, mode = _checked(options, overwrite=overwrite)
    if mode == ENQUEUE:
        return JobWriter(url, RowsToJobs(schema.fieldNames(), options))
    return TriageWriter(url, mode, schema.fieldNames())


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """The writer for `df.writeStream`: every row becomes a job, once per query and batch."""
    url, mode = _checked(options, overwrite=overwrite)
    if mode != ENQUEUE:
        raise InvalidRequest(f"mode={mode!r} is for df.write; in a stream use foreachBatch")
    return JobStreamWriter(url, RowsToJobs(schema.fieldNames(), options))


def _checked(options: Mapping[str, str], *, overwrite: bool) -> tuple[str, str]:
    given = {name.lower() for name in options}
    unknown = sorted(given - _KNOWN_OPTIONS - _SPARK_OPTIONS)
    if unknown:
        raise InvalidRequest(
            f"unknown option {', '.join(unknown)}: a write knows {', '.join(sorted(_KNOWN_OPTIONS))}"
        )
    if overwrite:
        raise InvalidRequest("jobs are only ever added: use .mode('append') or .outputMode('append')")
    if "url" not in options:
        raise InvalidRequest("which queue? Add .option('url', 'postgresql://...') or another driver's URL")
    require_shared_store(options["url"])
    mode = options.get("mode", ENQUEUE)
    if mode not in (ENQUEUE, *ACTIONS):
        raise InvalidRequest(f"mode={mode!r}: choose {ENQUEUE} (the default), {', '.join(ACTIONS)}")
    return options["url"], mode


def _stage(
    url: str, rows: RowsToJobs, write: str, now: Micros, batches: Iterator[pa.RecordBatch]
) -> WriterCommitMessage:
    context = _context()
    task = f"{context.partitionId()}.{context.taskAttemptId()}"
    builder = RecordBuilder()
    with open_store(url) as store:
        jobs = store.stage(write, task, (rows.records(batch, builder, now) for batch in batches))
        return StagedTask(write, task, jobs)


def _publish(url: str, write: str, staged: Sequence[StagedTask]) -> None:
    with open_store(url) as store:
        store.publish(write, [message.task for message in staged])


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    """Return the messages by partition, so that jobs are stored in the DataFrame's order."""
    staged = [message for message in messages if isinstance(message, StagedTask)]
    if len(staged) != len(messages):
        raise TaskHarborError("a task of this write did not say what it staged: nothing was published")
    return sorted(staged, key=lambda message: int(message.task.partition(".")[0]))


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise TaskHarborError("this runs in tasks of Spark only")
    return context


# -- triage of dead jobs with Spark SQL ------------------------------------------------------------------------------

# Tasks only collect the ids; the work is done when all of them are there. So a task that is tried again does nothing twice, and a
# write that is aborted has done nothing. The work itself goes in batches, each a transaction: what could not be done is reported
# at the end, and what was done stays done.
BATCH = 1000
EXAMPLES = 5


class TriageIncomplete(TaskHarborError):
    """Some jobs could not be requeued, cancelled or purged. The others were."""


@dataclass
class CollectedIds(WriterCommitMessage):
    packed: bytes


class TriageWriter(DataSourceArrowWriter):
    def __init__(self, url: str, action: str, columns: Sequence[str]) -> None:
        if "id" not in columns:
            raise InvalidRequest(f"mode={action!r} takes a column `id` with the ids of the jobs")
        self._url = url
        self._action = action

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        ids: dict[str, None] = {}
        for batch in iterator:
            column = batch.column("id")
            if not (kinds.is_string(column.type) or kinds.is_large_string(column.type)):
                raise RowRefused(f"the column `id` holds {column.type}, not text: ids of jobs are text")
            if column.null_count:
                raise RowRefused("the column `id` is null in some row: leave such rows out")
            ids.update(dict.fromkeys(column.to_pylist()))
        return CollectedIds(zlib.compress(msgspec.msgpack.encode(list(ids)), 1))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        ids: dict[str, None] = {}
        for message in messages:
            if isinstance(message, CollectedIds):
                ids |= dict.fromkeys(msgspec.msgpack.decode(zlib.decompress(message.packed), type=list[str]))
        check_answers(self._action, triage(self._url, self._action, list(ids)))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing was done yet."""


def check_answers(action: str, answers: Iterable[JobState | JobError]) -> None:
    """Raise TriageIncomplete if some jobs could not be changed. It says how many were, by state, and why the others were not."""
    done: Counter[str] = Counter()
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for answer in answers:
        if isinstance(answer, JobError):
            refused[answer.detail or answer.reason].append(answer.job_id)
        else:
            done[str(answer)] += 1
    if not refused:
        return
    states = ", ".join(f"{state} {count}" for state, count in sorted(done.items()))
    parts = [f"{action}: {done.total()} done" + (f" ({states})" if states else "")]
    for reason, ids in sorted(refused.items()):
        parts.append(f"{len(ids)} not, {reason} (e.g. {', '.join(ids[:EXAMPLES])})")
    raise TriageIncomplete(f"{'; '.join(parts)}. What was done stays done")


def triage(url: str, action: str, job_ids: Sequence[str]) -> list[JobState | JobError]:
    """One answer per id. For purge: the state that the job had."""

    async def ask() -> list[JobState | JobError]:
        answers: list[JobState | JobError] = []
        async with connect(url) as driver:
            for some in chunks(job_ids, BATCH):
                if action == "purge":
                    answers += await driver.remove(some)
                else:
                    call = driver.requeue if action == "requeue" else driver.cancel
                    answers += await call(some, now=await driver.time())
        return answers

    return asyncio.run(ask())
