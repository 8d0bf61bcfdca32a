"""What is measured in processes of their own, as workers are."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable

spawn = multiprocessing.get_context("spawn")

PAUSE = 0.02


def in_child(target: Callable[..., None], *args: object) -> float:
    """The number that the target sends through the pipe that it is given first."""
    here, there = spawn.Pipe()
    child = spawn.Process(target=target, args=(there, *args))
    child.start()
    there.close()
    figure: float = here.recv()
    child.join()
    return figure


async def latency(
    target: Callable[..., None], url: str, count: int, enqueue: Callable[[int], Awaitable[object]]
) -> float:
    """Median milliseconds. The target sends time.monotonic(), one clock for all processes of a machine, at every start."""
    here, there = spawn.Pipe()
    child = spawn.Process(target=target, args=(there, url, count))
    child.start()
    await enqueue(0)
    here.recv()  # The first one also waits for the child to start, and does not count.
    delays: list[float] = []
    for n in range(1, count):
        await asyncio.sleep(PAUSE)
        began = time.monotonic()
        await enqueue(n)
        delays.append(here.recv() - began)
    child.join()
    return statistics.median(delays) * 1000
