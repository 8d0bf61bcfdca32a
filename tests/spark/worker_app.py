"""The app that executors run in these tests. Shipped to them as a file, so it may import nothing of the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa

from taskharbor import FixedDelays, Harbor, current_job

harbor = Harbor("memory://")  # Every test says which store it means.


@harbor.job
async def count(number: int) -> int:
    return number


@harbor.job(retry=FixedDelays([0]))
async def odd_fails(number: int) -> None:
    if number % 2:
        raise ValueError("odd")


@harbor.job
def dwell(seconds: float) -> None:
    """Some work, done by waiting."""
    current_job().wait_for_stop(seconds)


@harbor.batch_job(size=1000)
def tally(batch: pa.Table) -> pa.Array:
    return batch["number"]


@harbor.job
def deadly(folder: str, deaths: int) -> None:
    """Takes its executor's Python down, so many times."""
    number = len(list(Path(folder).iterdir()))
    if number < deaths:
        Path(folder, str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
