"""A DataFrame becomes jobs, or names jobs to requeue, cancel or purge.

Jobs are staged by the tasks and published in one step when all of them are done.

A task stages under its own attempt, so of a partition that was computed twice (a retry, a speculative copy) only what the
winner staged is published. A batch of a stream has the same name whenever it is done over, and is published once.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.types as kinds
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from taskharbor.bulk.stage import new_write, numbered_write, wall_clock
from taskharbor.bulk.store import open_store
from taskharbor.client import Client, chunks, portal
from taskharbor.errors import InvalidRequest, JobError, TaskHarborError
from taskharbor.jobs import JobState
from taskharbor.requests import RecordBuilder
from taskharbor.spark.session import require_shared_store
from taskharbor.spark.source.requests import OPTIONS, RowRefused, RowsToJobs

ENQUEUE = "enqueue"
ACTIONS = ("requeue", "cancel", "purge")

_KNOWN_OPTIONS = {"url", "mode", *OPTIONS}
# Options that Spark itself passes on.
_SPARK_OPTIONS = {"path", "checkpointlocation", "queryname", "outputmode"}


@dataclass
class StagedTask(WriterCommitMessage):
    """A task's message to the publisher."""

    write: str
    task: str


class JobWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """One `df.write`, or the batches of one `df.writeStream`. Of a stream another process commits than writes, so what they share
    is in the tasks' properties and messages."""

    def __init__(self, options: Mapping[str, str], columns: Sequence[str], *, is_stream: bool) -> None:
        self._url = options["url"]
        self._rows = RowsToJobs(columns, options)
        # Made once per write, so this name is the write's. One instant for all: jobs that are due at once then run in the
        # DataFrame's order, whichever task began first.
        self._write = None if is_stream else new_write()
        self._now = None if is_stream else wall_clock()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        if context is None:
            raise TaskHarborError("this runs in tasks of Spark only")
        write, now = self._write or _batch_of(context), self._now or wall_clock()
        task = f"{context.partitionId()}.{context.taskAttemptId()}"
        builder = RecordBuilder()
        with open_store(self._url) as store:
            store.stage(write, task, (self._rows.records(batch, builder, now) for batch in iterator))
        return StagedTask(write, task)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:
        staged = _staged(messages)
        if len(staged) != len(messages):
            raise TaskHarborError("a task of this write did not say what it staged: nothing was published")
        # By partition, so that jobs are stored in the DataFrame's order.
        staged.sort(key=lambda message: int(message.task.partition(".")[0]))
        if staged:
            with open_store(self._url) as store:
                store.publish(staged[0].write, [message.task for message in staged])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:
        with open_store(self._url) as store:
            for write in filter(None, {self._write, *(message.write for message in _staged(messages))}):
                store.abandon(write)


def _batch_of(context: TaskContext) -> str:
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if query is None or batch is None:
        raise TaskHarborError("Spark did not say to which query and batch this task belongs")
    return numbered_write(f"spark-{query}", int(batch))


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    return [message for message in messages if isinstance(message, StagedTask)]


def mode_of(options: Mapping[str, str], *, overwrite: bool) -> str:
    """Check the options of `df.write` and `df.writeStream`, but those of jobs. Return what is to be done with the rows."""
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
    return mode


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
    parts += [
        f"{len(ids)} not, {why} (e.g. {', '.join(ids[:EXAMPLES])})" for why, ids in sorted(refused.items())
    ]
    raise TriageIncomplete(f"{'; '.join(parts)}. What was done stays done")


def triage(url: str, action: str, job_ids: Sequence[str]) -> list[JobState | JobError]:
    """One answer per id. For purge: the state that the job had."""
    with Client(url) as client:
        calls: dict[str, Callable[[list[str]], list[JobState | JobError]]] = {
            "requeue": client.requeue_many,
            "cancel": client.cancel_many,
            "purge": lambda some: portal().call(client.driver.remove(some)),
        }
        return [answer for some in chunks(job_ids, BATCH) for answer in calls[action](some)]
