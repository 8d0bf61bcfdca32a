"""Writing through the driver contract, for drivers without a bulk store of their own.

There is no place to stage anything, so the jobs travel to the publisher, which holds all of a write in memory and enqueues it
in batches: *not one step*. A publisher that dies midway has published a part. Trying again is harmless as long as the jobs are
kept, because ids follow from the write, the task's partition and the row's place, and a known id changes nothing. Jobs
with a key that were merged into another are the exception: their ids are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from taskharbor.bulk.chunks import chunked, pack, unpack
from taskharbor.bulk.contract import StagingLost
from taskharbor.bulk.driven import DriverBacked
from taskharbor.drivers.contract import Driver
from taskharbor.jobs import JobRecord, Micros

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


class GenericWriting(DriverBacked):
    """Staged chunks live in this object until they are carried away or published."""

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        chunks: list[bytes] = []
        count = 0
        ids = _ids(write, task)
        for jobs in chunked(batches):
            for job in jobs:
                job.id = next(ids)
            chunks.append(pack(jobs))
            count += len(jobs)
        self._staged.setdefault(write, {})[task] = chunks
        return count

    def carry(self, write: str, task: str) -> bytes | None:
        return _encode(self._staged[write][task])

    def receive(self, write: str, task: str, carried: bytes) -> None:
        self._staged.setdefault(write, {})[task] = _decode(carried)

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        staged = self._staged.get(write, {})
        missing = [task for task in tasks if task not in staged]
        if missing:
            raise StagingLost(
                f"the jobs of the tasks {', '.join(missing)} did not arrive: hand over what `carry` gave"
            )
        # A broker goes by its own clock, and refuses calls from clocks that are far off: the publisher's may be.
        store_now = self.call(lambda driver: driver.time())
        added = 0
        for task in tasks:
            for chunk in staged[task]:
                added += self._enqueue(unpack(chunk), store_now)
        self._staged.pop(write, None)
        return added

    def abandon(self, write: str) -> None:
        self._staged.pop(write, None)

    def _enqueue(self, jobs: Sequence[JobRecord], now: Micros) -> int:
        async def enqueue(driver: Driver) -> int:
            answers = await driver.enqueue(jobs, now=now)
            return sum(not answer.existed for answer in answers)

        return self.call(enqueue)

    @property
    def _staged(self) -> dict[str, dict[str, list[bytes]]]:
        found: dict[str, dict[str, list[bytes]]] = self.__dict__.setdefault("_staged_chunks", {})
        return found


def _ids(write: str, task: str) -> Iterator[str]:
    """The same for every try of the task: `task` is `partition.attempt`, and only the partition counts."""
    partition, _, _ = task.partition(".")
    seed = hashlib.blake2b(f"{write}\0{partition}".encode(), digest_size=16).digest()
    number = 0
    while True:
        digits = hashlib.blake2b(number.to_bytes(8, "big"), key=seed, digest_size=16).hexdigest()
        # Version 8 of RFC 9562: a UUID whose bits are the maker's own.
        yield f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
        number += 1
