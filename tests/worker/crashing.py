"""An app with a job that kills its process, and the program of a worker for it: `python crashing.py URL`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from taskharbor import Harbor

harbor = Harbor("memory://", backoff=(0.01, 0.01), queue="crashing")


@harbor.job
async def innocent(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@harbor.job
def guilty() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


OPTIONS: dict[str, Any] = {"lease": 1.0, "poll_interval": 0.1, "until_empty": "retries"}

if __name__ == "__main__":
    harbor.use(sys.argv[1])
    harbor.worker(**OPTIONS).run()
