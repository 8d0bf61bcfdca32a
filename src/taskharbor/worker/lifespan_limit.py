"""Ends the process of a worker that was asked to stop while its app's lifespan hangs, at the start or at the end.

A thread watches: a lifespan may block the event loop.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("taskharbor.worker")


class LifespanLimit:
    """Bounds the lifespan once a stop is asked for, in a process that belongs to the worker."""

    def __init__(self, grace: float, max_seconds: float | None) -> None:
        self.grace = grace
        self.place = "start"
        self._is_asked = max_seconds is not None
        if max_seconds is not None:
            self._bound(max_seconds + grace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While the worker serves. What comes afterwards is the end of the lifespan."""
        self.place = ""
        try:
            yield
        finally:
            self.place = "end"
            if self._is_asked:
                self._bound(self.grace)

    def close(self) -> None:
        """The lifespan is over."""
        self.place = ""

    def ask_to_stop(self) -> None:
        """The lifespan has the grace period from now on, or from its end on."""
        self._is_asked = True
        self._bound(self.grace)

    def end(self, place: str) -> None:
        """End the process at once if the lifespan is at this place."""
        if place and place == self.place:
            log.critical("the lifespan hangs at its %s: the process ends without it", place)
            os._exit(1)

    def _bound(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.end, [self.place])
        timer.daemon = True
        timer.start()
