"""The app that is measured: jobs that do nothing, so that all the time is ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from taskharbor import Harbor

if TYPE_CHECKING:
    import pyarrow as pa

TYPES = (1, 50, 500)
"""How many types of jobs an app declares. A worker claims by all of them."""

harbor = Harbor("memory://")
first_start = 0.0


def begin() -> None:
    global first_start
    if not first_start:
        first_start = time.perf_counter()


@harbor.job
async def noop(n: int) -> None:
    begin()


@harbor.job
def noop_on_thread(n: int) -> None:
    begin()


@harbor.batch_job
def noop_in_batches(rows: pa.Table) -> None:
    begin()


def names(types: int | str) -> list[str]:
    """Names of so many types, or the one name."""
    return [types] if isinstance(types, str) else [f"noop_{n}" for n in range(types)]


for _name in names(max(TYPES)):
    harbor.job(type=_name)(noop.function)
