"""Bulk writing. Not there yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taskharbor.bulk.contract import BulkStore
from taskharbor.jobs import JobRecord, Micros


class SQLiteWriting(BulkStore):
    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        raise NotImplementedError

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        raise NotImplementedError

    def abandon(self, write: str) -> None:
        raise NotImplementedError
