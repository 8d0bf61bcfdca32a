"""A process that works on a store and dies by SIGKILL: `python -m taskharbor_testkit.conformance.victim URL`.

Only `cases/crash.py` starts it. It reads a call from its input, writes the driver's answer and dies at once. Without a call it
enqueues batch after batch until it dies.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
from typing import Any

from taskharbor.drivers.contract import Driver
from taskharbor.drivers.operations import Operation
from taskharbor.drivers.registry import connect
from taskharbor.jobs import JobRecord
from taskharbor.requests import new_ids
from taskharbor_testkit.conformance.twin import QUEUE, START

STREAM_FOR = 0.3
"""Seconds until the stream is cut off; long enough for some batches on any backend."""


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _batch(name: str) -> list[JobRecord]:
    fields: dict[str, Any] = {"type": "mail", "queue": QUEUE, "run_at_us": START, "created_at_us": START}
    return [JobRecord(id=one, headers={"batch": name}, **fields) for one in new_ids(10)]


async def main(driver: Driver, call: Operation[object] | None) -> None:
    await driver.open()
    if call is not None:
        sys.stdout.buffer.write(pickle.dumps(await driver.run(call)))
        _die()
    await driver.enqueue(_batch("0"), now=START)
    threading.Timer(STREAM_FOR, _die).start()
    for n in range(1, 1_000_000):
        await driver.enqueue(_batch(str(n)), now=START)


if __name__ == "__main__":
    asyncio.run(main(connect(sys.argv[1]), pickle.load(sys.stdin.buffer)))  # noqa: S301
