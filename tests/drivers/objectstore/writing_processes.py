"""A program for tests of files: processes that write the same object, and are killed while they do.

It forks, so it must be small and without threads. It prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from taskharbor.drivers.objectstore import local_files
from taskharbor.drivers.objectstore.blobs import Conflict
from taskharbor.drivers.objectstore.local_files import LocalFiles

NAME = "queues/q/0/state"
SIZE = 100_000
POINTS = ("open", "rename", "fsync", "mkdir", "unlink", "close", "fdopen")


def content(number: int) -> bytes:
    """Large, and the same all over: a mix of two would show."""
    return f"{number:020d}".encode() * (SIZE // 20)


def number_in(data: bytes) -> int:
    number = int(data[:20])
    if data != content(number):
        raise AssertionError("a mix of two contents")
    return number


async def increment(blobs: LocalFiles) -> int:
    while True:
        blob = await blobs.read(NAME)
        number = 0 if blob is None else number_in(blob.data)
        try:
            await blobs.write(NAME, content(number + 1), None if blob is None else blob.version)
        except Conflict:
            continue
        return number + 1


def current(folder: str) -> int:
    async def look() -> int:
        blobs = LocalFiles(folder)
        blob = await blobs.read(NAME)
        await blobs.close()
        return 0 if blob is None else number_in(blob.data)

    return asyncio.run(look())


def child(folder: str, tell: Callable[[int], object], times: int = 1_000_000) -> int:
    """A process that increments so many times, and tells of each."""

    async def work() -> None:
        blobs = LocalFiles(folder)
        for _ in range(times):
            tell(await increment(blobs))

    pid = os.fork()
    if pid:
        return pid
    try:
        asyncio.run(work())
        os._exit(0)
    finally:
        os._exit(1)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def many(folder: str, processes: int, increments: int) -> dict[str, Any]:
    """All of them increment; nothing may be lost."""
    pids = [child(folder, id, increments) for _ in range(processes)]
    return {"codes": [exit_code(pid) for pid in pids], "number": current(folder)}


def random_kills(folder: str, seed: int, rounds: int) -> dict[str, Any]:
    """Two writers at a time, one of which is killed at some moment. What was confirmed must be there afterwards."""
    chance = random.Random(seed)
    confirmed = 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        victim, other = (
            child(folder, lambda number: os.write(writing, f"{number}\n".encode()))  # noqa: B023
            for _ in range(2)
        )
        os.close(writing)
        lines = os.fdopen(reading)
        confirmed = max(confirmed, int(lines.readline()))
        time.sleep(chance.random() * 0.02)
        os.kill(victim, signal.SIGKILL)
        exit_code(victim)
        before = current(folder)
        # The other goes on: no lock was left behind.
        for line in lines:
            confirmed = max(confirmed, int(line))
            if confirmed > before + 1:
                break
        os.kill(other, signal.SIGKILL)
        exit_code(other)
        confirmed = max(confirmed, *(int(line) for line in lines if line.endswith("\n")), 0)
        lines.close()
        if current(folder) < confirmed:
            return {"lost": [confirmed, current(folder)]}
    return {"confirmed": confirmed, "number": current(folder)}


def kill_points(folder: str) -> dict[str, Any]:
    """A writer that dies before its first step at the disk, before its second, ... until one survives."""
    numbers = []
    for point in itertools.count(1):
        before = current(folder)
        local_files.os = DyingOs(point)  # type: ignore[attr-defined,assignment]
        status = exit_code(child(folder, id, 1))
        local_files.os = os  # type: ignore[attr-defined]
        after = current(folder)
        if after not in (before, before + 1) or status not in (0, -signal.SIGKILL):
            return {"point": point, "before": before, "after": after, "status": status}
        numbers.append(after - before)
        if status == 0:
            break
    return {"points": point, "steps": numbers}


class DyingOs:
    """Kills the process before the step of that number."""

    def __init__(self, point: int) -> None:
        self._point = point
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        if name in POINTS:
            self._calls += 1
            if self._calls == self._point:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)


if __name__ == "__main__":
    story, folder, *numbers = sys.argv[1:]
    stories: dict[str, Callable[..., dict[str, Any]]] = {
        "many": many,
        "random_kills": random_kills,
        "kill_points": kill_points,
    }
    print(json.dumps(stories[story](folder, *map(int, numbers))))
