"""A worker as a program of its own, for a test that kills and freezes it: `python chaos_program.py URL NAME FOLDER`.

It notes every execution it begins, in a file that survives it, and leaves when whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from taskharbor import Job, Worker

QUEUES = ("plain", "mixed", "limited", "keyed")
LEASE = 2.0


class Handlers:
    def __init__(self, notes: int) -> None:
        self._notes = notes

    def _note(self, job: Job) -> None:
        os.write(self._notes, f"{job.id} {job.fence}\n".encode())

    async def quick(self, job: Job) -> None:
        self._note(job)

    async def slow(self, job: Job) -> None:
        self._note(job)
        await asyncio.sleep(0.02)

    async def lasting(self, job: Job) -> None:
        self._note(job)
        await asyncio.sleep(1)

    async def flaky(self, job: Job) -> None:
        self._note(job)
        if job.attempt == 1:
            raise ValueError("the first time it does not work")

    async def doomed(self, job: Job) -> None:
        self._note(job)
        raise ValueError("it never works")


def leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


def main(url: str, name: str, folder: str) -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    # Until the worker listens for signals itself: one that is dismissed by then holds nothing. The notes say that it is up.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    handlers = Handlers(os.open(Path(folder, f"{name}.notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    worker = Worker(url, queues=QUEUES, name=name, lease=LEASE, poll_interval=0.5, grace=5.0)
    for type in ("quick", "slow", "lasting", "flaky", "doomed"):
        worker.register(type, getattr(handlers, type))
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
