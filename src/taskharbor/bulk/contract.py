"""What a store offers to those who read or write it by the million.

Synchronous, because its callers are tasks of a cluster that do nothing else meanwhile. Every method may be called in another
process than the one before: what passes between them is plain data (`Part`, cursors, write ids), never a connection.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self, TypeAlias

import msgspec
import pyarrow as pa

from taskharbor.errors import InvalidRequest, JobError, TaskHarborError
from taskharbor.jobs import JobRecord, JobState, Micros

Table: TypeAlias = Literal["attempts", "jobs", "queues"]


class HistoryGone(TaskHarborError):
    """Retention removed rows of the attempt log that a reader had not seen yet."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows; what is None does not restrict. Instants are those of `ended_at` (attempts) and `created_at` (jobs): from
    `since_us` on, and before `until_us`."""

    queue: str | None = None
    type: str | None = None
    state: JobState | None = None
    since_us: Micros | None = None
    until_us: Micros | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a table that one task reads. `bounds` means something to the store that made it, and to nobody else."""

    table: Table
    selection: Selection = Selection()
    bounds: dict[str, str | int | None] = {}


class StagingLost(TaskHarborError):
    """What tasks had staged is gone, so the write cannot be published. Nothing of it became a job: write it again."""


class BulkStore(abc.ABC):
    """Opened by a URL. Reading never blocks or slows claims."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 (a store that holds nothing need not say so)
        """Give back what the store holds open. Safe to call twice."""

    # -- reading ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        """Cover the table as it is now, in at most about `parallelism` parts; at least one, even where nothing is there."""

    @abc.abstractmethod
    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """The rows of one part, in batches that fit `bulk.schemas` exactly."""

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    @abc.abstractmethod
    def start(self) -> str:
        """The cursor before the first row that is kept."""

    @abc.abstractmethod
    def latest(self) -> str:
        """A cursor at the end of the log: nothing can appear before it any more."""

    @abc.abstractmethod
    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        """Cover the rows after one cursor up to and including another. Raises `HistoryGone` where some were removed."""

    @abc.abstractmethod
    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        """A cursor at most `rows` rows after `after` (None: any number), and not after `until`; at least one row further where
        there is one. Never before `after`: where `until` is, because retention took the rows at the end, it is `after`."""

    # -- writing ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        """Put down one task's jobs where nobody sees them, and say how many. A task that is tried again uses another name.

        A batch may be `AlikeJobs`. A store that takes them as such gives them their ids when it publishes them.
        """

    @abc.abstractmethod
    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        """Make the jobs of these tasks visible, in one step, and forget those of all others. How many became jobs.

        By the rules of `Driver.enqueue`. A write that was published before is left as it is, and its number given again.
        """

    @abc.abstractmethod
    def abandon(self, write: str) -> None:
        """Forget what was staged for a write that will not be published."""

    def carry(self, write: str, task: str) -> bytes | None:
        """What must travel with a task's name from where it was staged to where it is published: the jobs themselves, where
        the store has no place to stage them. None: nothing."""
        return None

    def receive(self, write: str, task: str, carried: bytes) -> None:
        """Take in what `carry` gave, before publishing. Only for stores that let it travel."""
        raise InvalidRequest("this store stages jobs by itself: there is nothing to receive")

    # -- operating ----------------------------------------------------------------------------------------------

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        """Remove jobs that have ended, by id: the state each was in, or why it stays."""
        raise InvalidRequest(
            "this driver cannot remove jobs by id: purge by queue, type or state instead (`taskharbor dlq purge`)"
        )
