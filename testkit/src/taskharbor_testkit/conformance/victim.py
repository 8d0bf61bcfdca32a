"""A process whose children work on a store and die by SIGKILL: `python -m taskharbor_testkit.conformance.victim URL`.

Only `cases/crash.py` starts it. For each call that it reads from its input it forks a child, because a fork is a hundred times
cheaper than a new interpreter. The child writes the driver's answer and dies at once. Without a call it enqueues batch after
batch until it dies. The process writes the answer as soon as the child is dead.
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
    os.kill(os.getpid(), signal.SIGKILL)


def _batch(name: str) -> list[JobRecord]:
    fields: dict[str, Any] = {"type": "mail", "queue": QUEUE, "run_at_us": START, "created_at_us": START}
    return [JobRecord(id=one, headers={"batch": name}, **fields) for one in new_ids(10)]


async def work_and_die(driver: Driver, call: Operation[object] | None, answer: int) -> None:
    await driver.open()
    if call is not None:
        with os.fdopen(answer, "wb") as out:
            pickle.dump(await driver.run(call), out)
        _die()
    await driver.enqueue(_batch("0"), now=START)
    threading.Timer(STREAM_FOR, _die).start()
    for n in range(1, 1_000_000):
        await driver.enqueue(_batch(str(n)), now=START)


def _child(driver: Driver, call: Operation[object] | None, answer: int) -> None:
    try:
        asyncio.run(work_and_die(driver, call, answer))
    finally:
        os._exit(1)


def main(url: str) -> None:
    connect(url)  # Imports the driver's modules, before the forks.
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _child(connect(url), call, write)
        os.close(write)
        with os.fdopen(read, "rb") as answers:
            answer = answers.read()
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit("a child ended before it could kill itself")
        sys.stdout.buffer.write(len(answer).to_bytes(8) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
