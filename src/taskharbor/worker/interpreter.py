"""How a process whose main business is to work sets Python up.

Two defaults are made for programs with one busy thread and little garbage. A worker has a busy thread for its
handlers, one for its backend and often one inside the driver, and it makes and drops a dozen small objects per job
beside an app that was imported once and stays.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 0.0005
"""How long a computing handler may keep the interpreter while the backend's thread waits for it. Python's own 5 ms, paid
at every step of a write, cost a sixth of the throughput."""

YOUNG_OBJECTS = 10_000
"""How many new objects it takes to look for cycles among them. With Python's own few hundred, the collector walked the app
over and over, for up to a quarter of a busy worker's time."""


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Set both, and put them back. Whoever has chosen settings of their own keeps them."""
    with _quick_switches(), _calm_collector():
        yield


@contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _calm_collector() -> Iterator[None]:
    before = gc.get_threshold()
    if not gc.isenabled() or before[0] > YOUNG_OBJECTS:
        yield
        return
    gc.freeze()  # What exists now is left alone.
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
