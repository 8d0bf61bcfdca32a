"""The stop mark: a job in a queue of its own that nobody serves. Once it is there, the workers of its run stop.

The store is the one place that every executor can reach, on any cluster and through any driver, or it could not work at
all: no port has to be opened for this, and anybody who has the store's URL can stop a run, from anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from taskharbor.client import Client, portal
from taskharbor.drivers.contract import Driver, JobFilter
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import LATEST, JobRecord, JobState

QUEUE = "taskharbor.control"
TYPE = "taskharbor.stop"
LOOK_EVERY = 0.5


def ask_to_stop(store: str | Driver, run: str) -> None:
    """Make all workers of a run stop gracefully. The run's driver takes the mark away when they have."""
    client = Client(store)
    try:
        set_mark(client, run)
    finally:
        client.close()


def set_mark(client: Client, run: str) -> None:
    now = client.now()
    # Never due: the mark waits, and counts nowhere as work to do.
    mark = JobRecord(id=run, type=TYPE, queue=QUEUE, run_at_us=LATEST, created_at_us=now)
    portal().call(
        client.driver.enqueue([mark], now=now)
    )  # Known by its id: setting it twice changes nothing.


def is_marked(client: Client, run: str) -> bool:
    (mark,) = client.get_many([run])
    return mark is not None


def clear_mark(client: Client, run: str) -> None:
    client.cancel_many([run])
    client.purge(JobFilter(queue=QUEUE, states=frozenset({JobState.CANCELLED})))


class Watch:
    """Looks for the mark, on a thread beside the worker, and calls back once it is there."""

    def __init__(self, client: Client, run: str, found: Callable[[], None]) -> None:
        self._client = client
        self._run = run
        self._found = found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="taskharbor-stop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(5.0)  # A look that hangs in an outage must not hold up the task.

    def _look(self) -> None:
        while not self._over.is_set():
            try:
                if is_marked(self._client, self._run):
                    self._found()
                    return
            except (BackendUnavailable, OSError):
                pass  # The worker rides the outage out, and so does this.
            self._over.wait(LOOK_EVERY)
