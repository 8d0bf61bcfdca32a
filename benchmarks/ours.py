"""TaskHarbor's side of the figures that several backends share."""

from __future__ import annotations

import statistics
import time
from multiprocessing.connection import Connection

from benchmarks import workload
from benchmarks.children import latency
from taskharbor import Harbor, JobRequest
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Driver


def fill(url: str | Driver, count: int, types: int | str) -> None:
    """Jobs spread over so many types, or of one type."""
    workload.harbor.use(url)
    names = workload.names(types)
    workload.harbor.client.enqueue_many(
        JobRequest(type=names[n % len(names)], payload={"n": n}) for n in range(count)
    )
    workload.harbor.close()


def drain(answer: Connection, url: str, count: int, types: int | str) -> None:
    """In a child."""
    answer.send(drain_here(url, count, types))


def drain_here(url: str | Driver, count: int, types: int | str) -> float:
    """Jobs per second, from the first handler's start to the worker's end."""
    workload.harbor.use(url)
    workload.first_start = 0.0
    workload.harbor.worker(until_empty=True, types=workload.names(types)).run()
    return count / (time.perf_counter() - workload.first_start)


def bulk_enqueue(url: str, count: int) -> float:
    """Jobs per second."""
    workload.harbor.use(url)
    workload.noop.enqueue(0)  # connects
    calls = [(n,) for n in range(count)]
    began = time.perf_counter()
    workload.noop.enqueue_many(calls)
    elapsed = time.perf_counter() - began
    workload.harbor.close()
    return count / elapsed


async def enqueue_one(url: str, looks: int) -> float:
    """Median milliseconds."""
    spent = []
    async with AsyncClient(url) as client:
        await client.enqueue(JobRequest(type="t", payload={"n": 0}))
        for n in range(looks):
            began = time.perf_counter()
            await client.enqueue(JobRequest(type="t", payload={"n": n}))
            spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1000


async def pick_up(url: str, count: int) -> float:
    """Median milliseconds from the call that enqueues to the handler in an idle worker of another process."""
    async with AsyncClient(url) as client:
        return await latency(
            _stamp, url, count, lambda n: client.enqueue(JobRequest(type="stamp", payload={"n": n}))
        )


def _stamp(answer: Connection, url: str, count: int) -> None:
    harbor = Harbor(url)

    @harbor.job
    async def stamp(n: int) -> None:
        answer.send(time.monotonic())

    harbor.worker(max_jobs=count).run()
