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
SLEEPS = {"slow": 0.02, "lasting": 1.0}


def leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


def main(url: str, name: str, folder: str) -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    # Until the worker listens for signals itself: one that is dismissed by then holds nothing. The notes say that it is up.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    notes = os.open(Path(folder, f"{name}.notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def handle(job: Job) -> None:
        os.write(notes, f"{job.id} {job.fence}\n".encode())
        if job.type in SLEEPS:
            await asyncio.sleep(SLEEPS[job.type])
        if job.type == "doomed" or (job.type == "flaky" and job.attempt == 1):
            raise ValueError("it does not work, or not the first time")

    worker = Worker(url, queues=QUEUES, name=name, lease=LEASE, poll_interval=0.5, grace=5.0)
    for type in ("quick", "slow", "lasting", "flaky", "doomed"):
        worker.register(type, handle)
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
