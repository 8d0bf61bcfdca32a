"""An app with schedules of one second, and a program that starts workers for it quickly: `beating_app.py URL`.

For each name that it reads, it forks a process that runs `taskharbor worker`, and prints its id. All is imported before, so a
worker is up within milliseconds. The leases of schedules are short, so that many are seen to run out.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import datetime

from taskharbor import Harbor
from taskharbor.cli import main
from taskharbor.drivers import postgres, redis, sqlite
from taskharbor.jobs import SECOND
from taskharbor.schedules import client, ticking

# Imported before the first fork.
__all__ = ["client", "postgres", "redis", "sqlite"]

COUNT = 8
LEASE = 2
OFFSET = 0.12

ticking.LEASE = LEASE * SECOND  # type: ignore[attr-defined]
harbor = Harbor("memory://", queue="beats")


@harbor.job(timeout=5)
async def beat(at: datetime) -> None: ...


for number in range(COUNT):
    harbor.schedule(f"s{number}", beat, every=1, offset=number * OFFSET, catch_up=3600)


def serve(url: str) -> None:
    """Until standard input ends. Then all workers are killed."""
    children: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in map(str.strip, sys.stdin):
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            sys.argv = [
                "taskharbor",
                "--url",
                url,
                "worker",
                "beating_app:harbor",
                "--name",
                name,
                "--lease",
                "2s",
            ]
            main()
            os._exit(0)
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    sys.modules["beating_app"] = sys.modules["__main__"]
    serve(sys.argv[1])
