"""The app that is measured: jobs that do nothing, so that all the time is ours."""

from __future__ import annotations

import time

from taskharbor import Harbor

TYPES = (1, 50, 500)
"""How many types of jobs an app declares. A worker claims by all of them."""

harbor = Harbor("memory://")
first_start = 0.0


@harbor.job
async def noop(n: int) -> None:
    global first_start
    if not first_start:
        first_start = time.perf_counter()


def names(types: int) -> list[str]:
    return [f"noop_{n}" for n in range(types)]


for _name in names(max(TYPES)):
    harbor.job(type=_name)(noop.function)
