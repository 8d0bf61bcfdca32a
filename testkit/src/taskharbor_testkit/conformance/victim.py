"""A process that works on a store and dies by SIGKILL: `python -m taskharbor_testkit.conformance.victim URL WHAT`.

Only `cases/crash.py` starts it. What it prints was answered by the driver before it died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect
from taskharbor.ids import new_ids
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.conformance.twin import QUEUE, START, ack

STREAM_FOR = 0.3
"""Seconds until the stream is cut off; long enough for some batches on any backend."""


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _batch(name: str) -> list[JobRecord]:
    return [
        JobRecord(
            id=job_id, type="mail", queue=QUEUE, headers={"batch": name}, run_at_us=START, created_at_us=START
        )
        for job_id in new_ids(10)
    ]


async def main(driver: Driver, what: str) -> None:
    await driver.open()
    jobs = _batch("0")
    await driver.enqueue(jobs, now=START)
    if what == "stream":
        threading.Timer(STREAM_FOR, _die).start()
        for n in range(1, 1_000_000):
            await driver.enqueue(_batch(str(n)), now=START)
    if what in ("reserve", "settle"):
        held = await driver.reserve(QUEUE, limit=10, lease_for=30 * SECOND, now=START, worker="victim")
        if what == "settle":
            await driver.settle([ack(job) for job in held], now=START)
    print(*[job.id for job in jobs])
    _die()


if __name__ == "__main__":
    asyncio.run(main(connect(sys.argv[1]), sys.argv[2]))
