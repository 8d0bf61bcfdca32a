"""A program of its own for tests of files: processes that write the same object, and are killed while they do.

Forks, so it must be small and without threads; what it found is its output, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from taskharbor.drivers.objectstore import local_files
from taskharbor.drivers.objectstore.blobs import Blobs, Conflict
from taskharbor.drivers.objectstore.local_files import LocalFiles

NAME = "queues/q/0/state"
SIZE = 100_000


def content(number: int) -> bytes:
    """Large, and the same all over: a mix of two would show."""
    return f"{number:020d}".encode() * (SIZE // 20)


def number_in(data: bytes) -> int:
    number = int(data[:20])
    if data != content(number):
        raise AssertionError("a mix of two contents")
    return number


async def increment(blobs: Blobs) -> int:
    while True:
        blob = await blobs.read(NAME)
        number = 0 if blob is None else number_in(blob.data)
        try:
            if blob is None:
                await blobs.write(NAME, content(1), None)
            else:
                await blobs.write(NAME, content(number + 1), blob.version)
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


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def many(folder: str, processes: int, increments: int) -> dict[str, Any]:
    """All of them increment; nothing may be lost."""

    async def work() -> None:
        blobs = LocalFiles(folder)
        for _ in range(increments):
            await increment(blobs)

    pids = [child(lambda: asyncio.run(work())) for _ in range(processes)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "number": current(folder)}


def random_kills(folder: str, seed: int, rounds: int) -> dict[str, Any]:
    """Two writers at a time, one of which is killed at some moment. What was confirmed must be there afterwards."""
    chance = random.Random(seed)
    confirmed = 0
    for _ in range(rounds):
        reading, writing = os.pipe()

        async def work(said: int = writing) -> None:
            blobs = LocalFiles(folder)
            while True:
                os.write(said, f"{await increment(blobs)}\n".encode())

        victim, other = (child(lambda: asyncio.run(work())) for _ in range(2))
        os.close(writing)
        lines = os.fdopen(reading)
        confirmed = max(confirmed, int(lines.readline()))
        time.sleep(chance.random() * 0.02)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        before = current(folder)
        # The other goes on: no lock was left behind.
        for line in lines:
            confirmed = max(confirmed, int(line))
            if confirmed > before + 1:
                break
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        confirmed = max(confirmed, *(int(line) for line in lines if line.endswith("\n")), 0)
        lines.close()
        if current(folder) < confirmed:
            return {"lost": [confirmed, current(folder)]}
    return {"confirmed": confirmed, "number": current(folder)}


POINTS = ("open", "rename", "fsync", "mkdir", "unlink", "close", "fdopen")


def kill_points(folder: str) -> dict[str, Any]:
    """A writer that dies before its first step at the disk, before its second, ... until one survives."""
    point = 0
    numbers = []
    while True:
        before = current(folder)
        point += 1
        pid = child(partial(die_at, folder, point))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        after = current(folder)
        if after not in (before, before + 1):
            return {"point": point, "before": before, "after": after}
        numbers.append(after - before)
        if status == 0:
            return {"points": point, "steps": numbers}
        if status != -signal.SIGKILL:
            return {"point": point, "status": status}


def die_at(folder: str, point: int) -> None:
    asyncio.run(dying(folder, point))


async def dying(folder: str, point: int) -> None:
    blobs = LocalFiles(folder)
    calls = iter(range(1, 1_000_000))

    class DyingOs:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            if name not in POINTS:
                return real

            def counted(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return counted

    local_files.os = DyingOs()  # type: ignore[attr-defined]
    await increment(blobs)


if __name__ == "__main__":
    story, folder, *numbers = sys.argv[1:]
    stories: dict[str, Callable[..., dict[str, Any]]] = {
        "many": many,
        "random_kills": random_kills,
        "kill_points": kill_points,
    }
    print(json.dumps(stories[story](folder, *map(int, numbers))))
