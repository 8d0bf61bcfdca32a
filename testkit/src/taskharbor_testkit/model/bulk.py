"""The model's side of bulk reading and writing: one stream of the log, blobs in a dict, portions that are published once."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.bulk.stage import unpack
from taskharbor.drivers.contract import JobShare, LogPage, LogState, LogStream
from taskharbor.jobs import Micros
from taskharbor_testkit.model.store import Model


class BulkModel:
    """The bulk calls of the contract, over the jobs and the log of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._blobs: dict[str, bytes] = {}
        self._published: dict[str, tuple[tuple[int, int], int]] = {}
        """Per series: the last portion (number of the write, number of the portion), and the jobs its write has added."""

    def log_streams(self) -> LogState:
        first = self._model.log[0].seq if self._model.log else self._model.next_seq
        last = self._model.next_seq - 1
        stream = LogStream(name="", queue=None, last=last, trimmed=first - 1, is_dense=False)
        return LogState(str(id(self._model)), [stream])

    def read_log(self, stream: str, after: int, until: int, limit: int) -> LogPage:
        rows = [row for row in self._model.log if after < row.seq <= until]
        page = rows[:limit]
        return LogPage(page, page[-1].seq if len(page) < len(rows) else until)

    def split_log(self, stream: str, after: int, until: int, rows: int) -> list[int]:
        return list(range(after + rows, until, rows))

    def split_jobs(self, queue: str | None, parts: int) -> list[JobShare]:
        return [JobShare(queue=queue)]

    def put_blob(self, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
        is_expected = not swaps or self._blobs.get(blob) == expected
        if is_expected:
            self._blobs[blob] = data
        return is_expected

    def read_blobs(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._blobs.get(name) for name in names]

    def list_blobs(self, folder: str) -> list[str]:
        return sorted(name for name in self._blobs if name.startswith(f"{folder}/"))

    def drop_blobs(self, names: Sequence[str]) -> list[None]:
        for name in names:
            self._blobs.pop(name, None)
        return [None] * len(names)

    def check_room(self, queue: str, size: int) -> None:
        """A model has room for everything."""

    def publish_blobs(
        self, series: str, number: int, portion: int, names: Sequence[str], now: Micros
    ) -> dict[str, int]:
        jobs = [job for name in names if name in self._blobs for job in unpack(self._blobs[name])]
        last, added = self._published.get(series, ((number, 0), 0))
        added = added if last[0] == number else 0
        if last < (number, portion):
            added += sum(not answer.existed for answer in self._model.enqueue(jobs, now=now))
            self._published[series] = ((number, portion), added)
        return {"": added}
