"""A worker as a program of its own: `python fleet.py URL NAME FOLDER`, for tests that kill it or run several."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from taskharbor import Job, Worker

AT_ONCE = 3


class Gathering:
    """The first jobs wait until as many as may run at once do, in whatever process: then everything goes on."""

    def __init__(self, folder: str) -> None:
        self._here = Path(folder, "here")
        self._full = Path(folder, "full")
        self._here.mkdir(exist_ok=True)

    def job(self, job: Job) -> None:
        (self._here / job.id).touch()
        while not self._full.exists():
            if len(list(self._here.iterdir())) >= AT_ONCE:
                self._full.touch()
            job.wait_for_stop(0.002)


def stuck(job: Job) -> None:
    print("began", job.fence, flush=True)
    threading.Event().wait()


def main(url: str, name: str, folder: str) -> None:
    worker = Worker(url, name=name, lease=1.0, concurrency=2, poll_interval=0.2, until_empty=name != "doomed")
    worker.register("short", Gathering(folder).job)
    worker.register("stuck", stuck)
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
