"""A child's side of `--processes`: stop when the parent is gone, and tell it how things are."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

log = logging.getLogger("taskharbor.worker")

REPORT_EVERY = 1.0
AFTER_GRACE = 10.0


def stop_with_parent(stop: Callable[[], None], grace: float, fd: int = 0) -> None:
    """Watch the parent's end of our stdin. It closes with the parent, even with one that was killed."""

    def watch() -> None:
        try:
            while os.read(fd, 1024):
                pass
        except OSError:
            pass
        log.warning("the parent process is gone: stopping")
        last_resort = threading.Timer(grace + AFTER_GRACE, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        stop()

    threading.Thread(target=watch, name="taskharbor-parent", daemon=True).start()


def report_to_parent(snapshot: Callable[[], dict[str, Any]], fd: int) -> None:
    """Write a line about ourselves every second, for the health endpoint that the parent serves."""

    def tell() -> None:
        pause = threading.Event()
        try:
            with open(fd, "wb", buffering=0) as pipe:
                while True:
                    pipe.write(msgspec.json.encode(snapshot()) + b"\n")
                    pause.wait(REPORT_EVERY)
        except OSError:
            pass  # The parent is gone; `stop_with_parent` sees that too.

    threading.Thread(target=tell, name="taskharbor-report", daemon=True).start()
