"""A DataFrame becomes jobs: staged by the tasks, published in one step when all of them are done.

A task stages under its own attempt, so of a partition that was computed twice (a retry, a speculative copy) only what the
winner staged is published. A batch of a stream has the same name whenever it is done over, and is published once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
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
from taskharbor.errors import InvalidRequest, TaskHarborError
from taskharbor.jobs import Micros
from taskharbor.requests import RecordBuilder
from taskharbor.spark.session import require_shared_store
from taskharbor.spark.source.requests import OPTIONS, RowsToJobs
from taskharbor.spark.source.triage import ACTIONS, TriageWriter

ENQUEUE = "enqueue"

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
