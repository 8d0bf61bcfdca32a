"""A process beside the worker that extends its leases while a handler keeps the worker's own heartbeats from running.

All threads of a process share Python's interpreter lock (GIL). A handler that holds it without a break (a long regular
expression, C code that computes) stops the worker's heartbeats too. This process then reads from the store what the worker
holds, and extends that. It hears of every heartbeat by a line on its stdin, and does nothing while these come. It does nothing
either for a worker that uses no CPU time (frozen, or deadlocked), nor for a job past its timeout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from taskharbor.clock import BackendClock
from taskharbor.drivers.contract import Driver, Extension, JobFilter
from taskharbor.drivers.registry import connect
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import JobState, Micros
from taskharbor.worker.fetch import Outage

# Heartbeats that may be missing before this process extends the leases.
_SILENCE = 1.5
# Share of a CPU that a worker uses at least, if it computes: on a crowded machine it gets no more.
_BUSY = 0.01
# Looks at the worker per heartbeat. Its CPU time is that of the last heartbeat's length.
_LOOKS = 4
_PAGE = 1000


class WatchedWorker(msgspec.Struct, frozen=True):
    """The first line on stdin: whose leases to keep."""

    url: str
    worker: str
    lease_us: Micros
    heartbeat: float


class HeartbeatProcess:
    """The process, as its worker sees it."""

    def __init__(self, watched: WatchedWorker) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        # A group of its own: Ctrl-C in the terminal is for the worker.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        self.tell(msgspec.json.encode(watched))

    def tell(self, line: bytes = b"") -> None:
        """Tell that the worker's heartbeats go on. The first line says what to keep."""
        assert self._process.stdin is not None
        with suppress(OSError):  # It has ended. The worker's own heartbeats are left.
            self._process.stdin.write(line + b"\n")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


async def keep(watched: WatchedWorker) -> None:
    """Extend the worker's leases when they need it, until it ends."""
    heard = time.monotonic()

    def listen() -> None:
        nonlocal heard
        for _ in sys.stdin.buffer:
            heard = time.monotonic()
        os._exit(0)  # The worker has ended.

    threading.Thread(target=listen, daemon=True).start()
    worker, driver = os.getppid(), connect(watched.url)
    await Outage().ride_out(driver.open)
    clock = BackendClock(driver.time)
    spent = deque([cpu_seconds(worker)], _LOOKS + 1)
    while os.getppid() == worker:
        await asyncio.sleep(watched.heartbeat / _LOOKS)
        spent.append(cpu_seconds(worker))
        is_busy = spent[-1] - spent[0] > _BUSY * watched.heartbeat
        is_silent = time.monotonic() - heard > _SILENCE * watched.heartbeat
        with suppress(TaskHarborError, OSError):
            async with asyncio.timeout(watched.heartbeat):
                await clock.refresh()
                if is_silent and is_busy:
                    await extend_all(driver, clock, watched)


async def extend_all(driver: Driver, clock: BackendClock, watched: WatchedWorker) -> None:
    """Extend every lease of the worker, except those of jobs past their timeouts."""
    held, cursor = JobFilter(worker=watched.worker, states=frozenset({JobState.INFLIGHT})), None
    while True:
        now = clock.now()
        page = await driver.list_jobs(held, now=now, limit=_PAGE, cursor=cursor)
        extensions = [
            Extension(job.id, job.token) for job in page.jobs if job.token and not job.is_overdue(now)
        ]
        if extensions:
            await driver.extend_lease(extensions, lease_for=watched.lease_us, now=now)
        if (cursor := page.cursor) is None:
            return


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run this process."""
    asyncio.run(keep(msgspec.json.decode(sys.stdin.buffer.readline(), type=WatchedWorker)))
