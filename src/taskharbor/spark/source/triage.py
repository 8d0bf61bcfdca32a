"""Requeue, cancel or purge the jobs whose ids a DataFrame holds: triage of dead jobs with Spark SQL.

Tasks only collect the ids; the work is done when all of them are there. So a task that is tried again does nothing twice, and a
write that is aborted has done nothing. The work itself goes in batches, each a transaction: what could not be done is reported
at the end, and what was done stays done.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.types as kinds
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from taskharbor.client import chunks
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest, JobError, TaskHarborError
from taskharbor.jobs import JobState
from taskharbor.spark.source.requests import RowRefused

ACTIONS = ("requeue", "cancel", "purge")
BATCH = 1000
EXAMPLES = 5

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[str]).decode


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
        return CollectedIds(zlib.compress(_encode(list(ids)), 1))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        packed = [message.packed for message in messages if isinstance(message, CollectedIds)]
        ids = dict.fromkeys(itertools.chain.from_iterable(_decode(zlib.decompress(one)) for one in packed))
        Summary(self._action, triage(self._url, self._action, list(ids))).check()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing was done yet."""


class Summary:
    """The result for the jobs: the number per state, and the number and the reasons of jobs that could not be changed."""

    def __init__(self, action: str, answers: Iterable[JobState | JobError]) -> None:
        self.action = action
        self.done: Counter[str] = Counter()
        self.refused: dict[str, list[JobError]] = {}
        for answer in answers:
            if isinstance(answer, JobError):
                self.refused.setdefault(answer.detail or answer.reason, []).append(answer)
            else:
                self.done[str(answer)] += 1

    def __str__(self) -> str:
        states = ", ".join(f"{state} {count}" for state, count in sorted(self.done.items()))
        done = f"{self.action}: {self.done.total()} done" + (f" ({states})" if states else "")
        reasons = [
            f"{len(errors)} not, {reason} (e.g. {', '.join(error.job_id for error in errors[:EXAMPLES])})"
            for reason, errors in sorted(self.refused.items())
        ]
        return "; ".join([done, *reasons])

    def check(self) -> None:
        if self.refused:
            raise TriageIncomplete(f"{self}. What was done stays done")


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
