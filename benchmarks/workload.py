"""The app that is measured: one job that does nothing, so that all the time is ours."""

from __future__ import annotations

import time

from taskharbor import Harbor

harbor = Harbor("memory://")
first_start = 0.0


@harbor.job
async def noop(n: int) -> None:
    global first_start
    if not first_start:
        first_start = time.perf_counter()
