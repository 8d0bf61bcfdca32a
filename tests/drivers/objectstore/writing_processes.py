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


def many(folder: str, processes: int, victims: int, increments: int, seed: int) -> dict[str, Any]:
    """All of them increment, and some are killed at some moment: no confirmed write may be lost, and no lock left behind."""
    chance = random.Random(seed)
    reading, writing = os.pipe()
    pids = [
        child(folder, lambda number: os.write(writing, f"{number}\n".encode()), increments)
        for _ in range(processes)
    ]
    os.close(writing)
    with os.fdopen(reading) as lines:
        confirmed = []
        for victim in pids[:victims]:
            confirmed.append(int(lines.readline()))
            time.sleep(chance.random() * 0.02)
            os.kill(victim, signal.SIGKILL)
        confirmed += map(int, lines)
    codes = [exit_code(pid) for pid in pids]
    return {"codes": codes[victims:], "confirmed": confirmed, "number": current(folder)}


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
    found = many(folder, *map(int, numbers)) if story == "many" else kill_points(folder)
    print(json.dumps(found))
