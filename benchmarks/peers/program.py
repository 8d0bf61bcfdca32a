"""What every contender can do, one command per process. Runs in the contender's own environment.

prepare          make its schema in an empty database
fill N           enqueue N jobs by the quickest documented way, and tell how long that took
drain N          be a worker until killed, expecting N jobs
serve            be a worker until killed, telling every start
produce          enqueue one job for every line that is read
"""

from __future__ import annotations

import abc
import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any

from benchmarks.peers import stopwatch

CHUNK = 1000


class Program(abc.ABC):
    """One contender. Its library is imported where it is used: the race itself knows nothing of it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abc.abstractmethod
    async def prepare(self) -> None: ...

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect as a producer."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def enqueue(self, n: int) -> None:
        """One job that carries this number."""

    @abc.abstractmethod
    async def enqueue_many(self, count: int) -> None:
        """Jobs 0 to count - 1, by whatever the library offers for many; in chunks of CHUNK where it is left to us."""

    @abc.abstractmethod
    def work(self, idle: bool) -> None:
        """Run jobs until killed, every one through `stopwatch.mark`. `idle`: it will wait for single jobs, not drain."""


def run(program: Program, command: str, count: int) -> None:
    if command == "prepare":
        run_async(program.prepare())
    elif command == "fill":
        run_async(_fill(program, count))
    elif command == "produce":
        run_async(_produce(program))
    else:
        stopwatch.expect(count)
        program.work(idle=command == "serve")


async def _fill(program: Program, count: int) -> None:
    await program.open()
    began = time.monotonic()
    await program.enqueue_many(count)
    stopwatch.tell("filled", count, time.monotonic() - began)
    await program.close()


async def _produce(program: Program) -> None:
    await program.open()
    stopwatch.tell("ready", 0)
    for n, _ in enumerate(sys.stdin):
        began = time.monotonic()
        await program.enqueue(n)
        stopwatch.tell("enqueued", n, began)
    await program.close()


def run_async(work: Coroutine[Any, Any, None]) -> None:
    """On uvloop where the contender's environment has it."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
