"""An object store whose writes take 50 ms, behind a broker: jobs per second, the wait of a submit, writes per job. And claims by
type on the image of a queue.

The store is in the broker's memory; what a far one adds is injected below the driver, and every write is counted there.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from benchmarks.children import spawn
from benchmarks.measure import Figure, Series, alternate
from benchmarks.workload import TYPES, names
from taskharbor.broker.app import make_app
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.runtime import candidacy_for
from taskharbor.broker.server import listen, serve, url_of
from taskharbor.drivers.contract import Ack
from taskharbor.drivers.engine import enqueue, reserve, settle
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Data, Version
from taskharbor.drivers.objectstore.driver import ObjectStoreDriver
from taskharbor.drivers.objectstore.image import Image
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, JobRecord, Micros
from taskharbor.requests import new_ids
from taskharbor.worker.process_setup import tuned_interpreter

WRITE_SECONDS = 0.05
CLIENTS = 32
BATCH = 25
PROMISED = 2000.0
"""Jobs per second."""
_WAITING = 1_000
_CLAIMED = 100
_LOOKS = 30


class FarBlobs(Blobs):
    """A store that is far away: every write takes a while, and is counted."""

    is_remote = True

    def __init__(self, near: Blobs) -> None:
        self._near = near
        self.place = near.place
        self.writes = 0

    async def _travel(self) -> None:
        self.writes += 1
        await asyncio.sleep(WRITE_SECONDS)

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        await self._travel()
        return await self._near.write(name, data, known)

    async def put(self, name: str, data: bytes) -> None:
        await self._travel()
        await self._near.put(name, data)

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        return await self._near.read(name, unless, size)

    async def delete(self, names: Sequence[str]) -> None:
        await self._near.delete(names)

    async def names(self, prefix: str) -> list[str]:
        return await self._near.names(prefix)

    async def close(self) -> None:
        await self._near.close()


def _broker(pipe: Connection) -> None:
    """In a child: serves until told to stop, and answers whatever else it is told with the number of writes so far."""
    stores: list[FarBlobs] = []
    memory = parse_url("mem://")

    def far() -> Blobs:
        stores.append(FarBlobs(memory.open()))
        return stores[-1]

    async def live() -> None:
        listener = listen("127.0.0.1", 0)
        driver = ObjectStoreDriver(far)
        url = url_of(listener, tls=False)
        app = make_app(driver, BrokerConfig(), candidacy_for(driver, url=url, term=15.0))
        loop = asyncio.get_running_loop()

        def ready(server: object) -> None:
            def told() -> None:
                if pipe.recv():
                    pipe.send(sum(store.writes for store in stores))
                else:
                    loop.remove_reader(pipe.fileno())
                    server.stop()  # type: ignore[attr-defined]

            loop.add_reader(pipe.fileno(), told)
            pipe.send(url)

        await serve(app, listener, when_ready=ready)
        listener.close()

    with tuned_interpreter():
        asyncio.run(live())


class Seen(msgspec.Struct):
    """What one run showed."""

    jobs_per_second: float
    submit_p50: float
    submit_p99: float
    writes_per_job: float


class _Crew:
    """Clients that submit, claim and complete by the batch, until enough jobs were completed."""

    def __init__(self, url: str, wanted: int, types: int) -> None:
        self._url = url
        self._wanted = wanted
        self._types = names(types)
        self._type = itertools.cycle(self._types)
        self.submits: list[float] = []
        self.completed = 0

    async def work(self) -> float:
        """Seconds."""
        drivers = [HttpDriver.from_url(self._url) for _ in range(CLIENTS)]
        await _until_served(drivers[0])
        for driver in drivers[1:]:
            await driver.open()
        began = time.perf_counter()
        await asyncio.gather(*(self._client(driver, f"c{n}") for n, driver in enumerate(drivers)))
        elapsed = time.perf_counter() - began
        for driver in drivers:
            await driver.close()
        return elapsed

    async def _client(self, driver: HttpDriver, name: str) -> None:
        is_first = True
        while self.completed < self._wanted:
            now = time.time_ns() // 1000
            records = [
                JobRecord(
                    id=job_id, type=next(self._type), payload=b'{"n":1}', run_at_us=now, created_at_us=now
                )
                for job_id in new_ids(BATCH)
            ]
            began = time.perf_counter()
            await driver.enqueue(records, now=now, new_ids=True)
            if not is_first:  # The first calls also wait for the queue to be made.
                self.submits.append(time.perf_counter() - began)
            is_first = False
            now = time.time_ns() // 1000
            jobs = await driver.reserve(
                "default", limit=BATCH, lease_for=60 * SECOND, now=now, worker=name, types=self._types
            )
            acks = [Ack(job.id, job.token or "") for job in jobs]
            answers = await driver.settle(acks, now=time.time_ns() // 1000)
            assert not any(answers), answers
            self.completed += len(jobs)


async def _until_served(driver: HttpDriver) -> None:
    """The first answer of a broker that has become the leader."""
    for _ in itertools.count():
        with suppress(BackendUnavailable):
            await driver.open()
            await driver.stats(now=0)
            return
        await asyncio.sleep(0.1)


def run(wanted: int, types: int) -> Seen:
    here, there = spawn.Pipe()
    broker = spawn.Process(target=_broker, args=(there,))
    broker.start()
    try:
        crew = _Crew(here.recv(), wanted, types)
        before = _ask(here)
        elapsed = asyncio.run(crew.work())
        writes = _ask(here) - before
    finally:
        here.send(False)
        broker.join()
    cuts = statistics.quantiles(crew.submits, n=100)
    return Seen(crew.completed / elapsed, cuts[49] * 1000, cuts[98] * 1000, writes / crew.completed)


def _ask(pipe: Connection) -> int:
    pipe.send(True)
    writes: int = pipe.recv()
    return writes


def _through_a_broker(rounds: int, wanted: int, types: int) -> list[Callable[[], Figure]]:
    seen: list[Seen] = []

    def runs() -> list[Seen]:
        """One set of runs for all figures."""
        while len(seen) < rounds:
            seen.append(run(wanted, types))
        return seen

    def throughput() -> Figure:
        return Figure(
            name=f"{CLIENTS} clients through a broker, {WRITE_SECONDS * 1000:g} ms per write, {types} types",
            ours=Series("submit, claim, complete", "jobs/s", [one.jobs_per_second for one in runs()]),
            limit=Series("promised", "jobs/s", [PROMISED]),
            goal=1.0,
            note=f"batches of {BATCH}",
        )

    def submit() -> Figure:
        return Figure(
            name=f"wait of a submit, 99th percentile, {types} types",
            ours=Series("submit", "ms", [one.submit_p99 for one in runs()]),
            limit=Series("one write", "ms", [WRITE_SECONDS * 1000]),
            goal=3.0,
            higher_is_better=False,
            facts={"median": f"{statistics.median(one.submit_p50 for one in runs()):.4g} ms"},
        )

    def writes() -> Figure:
        return Figure(
            name=f"writes per job, {types} types",
            ours=Series("writes", "per job", [one.writes_per_job for one in runs()]),
            limit=Series("one job", "per job", [1.0]),
            goal=0.05,
            higher_is_better=False,
        )

    return [throughput, submit, writes]


class _Claims:
    """Claims of 100 jobs on the image of a queue, beside many jobs of another type.

    Every change writes the whole image, whatever the types. So the step is measured without the write, by processor time, and
    beside an image of the same size.
    """

    def __init__(self, many: int, types: list[str], *, ahead: bool) -> None:
        self._image = Image(b"", "the image", "default")
        self._types = types
        self._now = time.time_ns() // 1000
        self._add(["another"], many, self._now - (2 if ahead else 0) * SECOND)
        self._add(types, _WAITING, self._now - SECOND)

    def _add(self, types: Sequence[str], count: int, run_at: Micros) -> None:
        for start in range(0, count, _WAITING):
            ids = new_ids(min(_WAITING, count - start))
            jobs = [
                JobRecord(
                    id=job_id,
                    type=types[n % len(types)],
                    payload=b"1",
                    run_at_us=run_at,
                    created_at_us=self._now,
                )
                for n, job_id in enumerate(ids)
            ]
            self._image.change(lambda transaction, jobs=jobs: enqueue.enqueue(transaction, jobs, self._now))  # type: ignore[misc]

    def cost(self) -> float:
        """Median milliseconds of leasing. Leased jobs are finished and as many enqueued, so the backlog stays as it is."""
        spent: list[float] = []
        for _ in range(_LOOKS):
            began = time.process_time()
            held, _ = self._image.change(
                lambda transaction: reserve.reserve(
                    transaction, "default", _CLAIMED, 60 * SECOND, self._now, "w", self._types
                )
            )
            spent.append(time.process_time() - began)
            assert len(held) == _CLAIMED
            acks = [Ack(job.id, job.token or "") for job in held]
            self._image.change(lambda transaction, acks=acks: settle.settle(transaction, acks, self._now))  # type: ignore[misc]
            # As compaction does, which takes them to a segment.
            self._image.connection.execute("DELETE FROM attempts")
            self._image.connection.execute("DELETE FROM jobs WHERE state = 4")
            self._add([job.type for job in held], _CLAIMED, self._now - SECOND)
        return statistics.median(spent) * 1000


def _typed_claims(many: int, types: int, rounds: int) -> Figure:
    ahead, behind = (_Claims(many, names(types), ahead=one) for one in (True, False))
    mine, limit = alternate(
        rounds, (f"{many:,} ahead", ahead.cost), (f"{many:,} behind", behind.cost), "ms of CPU"
    )
    return Figure(
        name=f"claim of {_CLAIMED}, {types} declared, many of other types ahead",
        ours=mine,
        limit=limit,
        goal=1.3,
        higher_is_better=False,
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds, wanted = (1, 4_000) if quick else (3, 50_000)
    # A queue's state has at most 64 MiB.
    many = 5_000 if quick else 200_000
    return [
        *(figure for types in TYPES for figure in _through_a_broker(rounds, wanted, types)),
        *(partial(_typed_claims, many, types, 1 if quick else 7) for types in TYPES),
    ]
