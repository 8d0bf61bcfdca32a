"""`python -m benchmarks walk`: the files of the package that one job's path enters, per driver.

An enqueue is one call of a client that has made a call before. The other walk is a worker that is idle until another process
enqueues a job: it hears of the job, claims, runs and settles it. Every thread counts. The broker behind `http` runs in the same
process, so its files count too. Python files only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
from rich.table import Table

import taskharbor
from benchmarks.postgres_server import fresh_database
from benchmarks.redis_server import fresh_redis
from taskharbor import Harbor, JobRequest
from taskharbor.client import AsyncClient
from taskharbor.jobs import JobState
from taskharbor.testing.broker import running_broker
from taskharbor.worker import backend_loop

PACKAGE = str(Path(taskharbor.__file__).parent) + "/"
spawn = multiprocessing.get_context("spawn")
_AN_HOUR = 3600.0


class Walk(msgspec.Struct):
    """The files that each of the two paths enters, in the order they are entered first."""

    driver: str
    enqueue: list[str]
    work: list[str]


class Trace:
    """Files of the package in which a function is called, in any thread that was started after `install`."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes: dict[CodeType, None] = {}
        self._ignored = threading.local()

    def install(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def ignore_this_thread(self) -> None:
        self._ignored.is_set = True

    def files(self) -> list[str]:
        """Entered since the last call."""
        names = dict.fromkeys(code.co_filename for code in self._codes if code.co_name != "<module>")
        self._codes.clear()
        return [name.removeprefix(PACKAGE) for name in names if name.startswith(PACKAGE)]

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and not getattr(self._ignored, "is_set", False):
            self._codes[frame.f_code] = None


def walk(drivers: Iterable[str]) -> Iterator[Walk]:
    """One enqueue, and one claim, run and settle, on a fresh store each."""
    # One for all: threads that serve the whole process, such as that of synchronous clients, are started only once.
    trace = Trace()
    trace.install()
    try:
        for driver in drivers:
            with STORES[driver]() as url:
                yield Walk(driver, _enqueue(trace, url), _work(trace, url, in_process=driver == "memory"))
    finally:
        trace.remove()


def _enqueue(trace: Trace, url: str) -> list[str]:
    harbor = Harbor(url)

    @harbor.job(queue="walk-enqueue")
    async def nothing(n: int) -> None: ...

    nothing.enqueue(0)  # Connects.
    trace.is_on = True
    nothing.enqueue(1)
    trace.is_on = False
    harbor.close()
    return trace.files()


def _work(trace: Trace, url: str, *, in_process: bool) -> list[str]:
    harbor = Harbor(url)

    @harbor.job(queue="walk-work")
    async def nothing(n: int) -> None: ...

    # Heartbeats and sweeps run by the clock, not for a job: a slow machine must not count them.
    backend_loop.RECLAIM_EVERY = _AN_HOUR
    worker = harbor.worker(queues=["walk-work"], lease=_AN_HOUR)
    running = threading.Thread(target=worker.run)
    running.start()
    run_one = partial(_run_one_in_thread, trace) if in_process else _run_one_in_process
    run_one(url, 0)  # The worker is up, and everything it loads is loaded.
    trace.is_on = True
    run_one(url, 1)
    trace.is_on = False
    worker.stop()
    running.join()
    harbor.close()
    return trace.files()


async def _run_one(url: str, n: int) -> None:
    """Enqueue one job and wait until it is settled."""
    async with AsyncClient(url) as client:
        job = await client.enqueue(JobRequest(type="nothing", payload={"n": n}, queue="walk-work"))
        while True:
            found = await client.get(job.id)
            if found is not None and found.state is JobState.DONE:
                return
            await asyncio.sleep(0.01)


def _run_one_in_child(url: str, n: int) -> None:
    asyncio.run(_run_one(url, n))


def _run_one_in_process(url: str, n: int) -> None:
    child = spawn.Process(target=_run_one_in_child, args=(url, n))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the client ended with exit code {child.exitcode}")


def _run_one_in_thread(trace: Trace, url: str, n: int) -> None:
    """For a store that one process keeps to itself: on a thread whose calls do not count."""

    def run() -> None:
        trace.ignore_this_thread()
        asyncio.run(_run_one(url, n))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@contextmanager
def _memory() -> Iterator[str]:
    yield f"memory://walk-{time.monotonic_ns()}"


@contextmanager
def _folder(url: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield url.format(folder)


STORES: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "memory": _memory,
    "sqlite": lambda: _folder("sqlite:///{}/jobs.db"),
    "postgresql": fresh_database,
    "redis": fresh_redis,
    "objectstore": lambda: _folder("file://{}/jobs"),
    "http": lambda: running_broker("memory://"),
}


def table(walks: list[Walk]) -> Table:
    shown = Table("driver", "one enqueue: files", "one claim, run, settle: files")
    for one in walks:
        shown.add_row(one.driver, str(len(one.enqueue)), str(len(one.work)))
    return shown
