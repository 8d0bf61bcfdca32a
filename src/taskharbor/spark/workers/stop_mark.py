"""The stop mark: a cancelled job under the run's name, in a queue that nobody serves. Once it is there, the workers stop.

Every executor can reach the store, on any cluster and through any driver; otherwise it could not work at all. So no port has to
be opened for this, and anybody who has the store's URL can stop a run, from anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from taskharbor.client import Client, portal
from taskharbor.drivers.contract import Driver
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord

QUEUE = "taskharbor.control"
TYPE = "taskharbor.stop"
LOOK_EVERY = 0.5


def ask_to_stop(store: str | Driver, run: str) -> None:
    """Make all workers of a run stop gracefully. The run's driver takes the mark away when they have."""
    with Client(store) as client:
        set_mark(client, run)


def set_mark(client: Client, run: str) -> None:
    """Set the mark. Setting it twice changes nothing."""
    now = client.now()
    mark = JobRecord(id=run, type=TYPE, queue=QUEUE, run_at_us=now, created_at_us=now)
    portal().call(client.driver.enqueue([mark], now=now))
    # It counts nowhere as work to do, and is removed like any ended job where nobody takes it away.
    client.cancel_many([run])


def is_marked(client: Client, run: str) -> bool:
    (mark,) = client.get_many([run])
    return mark is not None


def clear_mark(client: Client, run: str) -> None:
    portal().call(client.driver.remove([run]))


@contextmanager
def watching(client: Client, run: str, found: Callable[[], None]) -> Iterator[None]:
    """Look for the mark, on a thread beside the worker, and call back once it is there."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            # The worker waits for the end of an outage, and so does this.
            with suppress(BackendUnavailable, OSError):
                if is_marked(client, run):
                    found()
                    return
            over.wait(LOOK_EVERY)

    thread = threading.Thread(target=look, name="taskharbor-stop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)  # A look that hangs in an outage must not hold up the task.
