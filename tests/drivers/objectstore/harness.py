"""Jobs, handles and whole stores that tests of the object-store driver share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bulk import stores
from bulk.stores import within
from records import NOW, make_record
from taskharbor.drivers.contract import Ack, Driver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.options import ObjectStoreOptions
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros

finish = partial(stores.finish, now=NOW)


def driver_on(blobs: Blobs, **options: Any) -> ObjectStoreDriver:
    return ObjectStoreDriver(lambda: blobs, ObjectStoreOptions(**{"poll": None, **options}))


def jobs_of(count: int, **fields: Any) -> list[JobRecord]:
    return [make_record(**fields) for _ in range(count)]


async def claim(driver: Driver, limit: int = 1, *, queue: str = "q", now: Micros = NOW) -> list[JobRecord]:
    return await driver.reserve(queue, limit=limit, lease_for=SECOND, now=now, worker="w")


async def ack(driver: Driver, held: list[JobRecord], now: Micros = NOW) -> None:
    assert not any(await driver.settle([Ack(job.id, job.token or "") for job in held], now=now))


async def counts(driver: Driver, *states: JobState, queue: str = "q", now: Micros = NOW) -> list[int]:
    (stats,) = await driver.stats(now=now, queue=queue)
    return [stats.counts[state] for state in states]


# -- stores in files, for bulk reading and writing --------------------------------------------------------------------


def waiting(url: str, *queues: str) -> dict[str, int]:
    async def count(driver: Driver) -> dict[str, int]:
        return {queue: (await counts(driver, JobState.READY, queue=queue))[0] for queue in queues}

    return within(url, count)


def objects(folder: Path, part: str = "") -> dict[str, bytes]:
    """The objects of a store in files with this part in their names, as they are on the disk."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".taskharbor" not in path.parts and part in path.as_posix()
    }
