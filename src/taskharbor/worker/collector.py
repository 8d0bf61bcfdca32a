"""Keeps Python's cyclic garbage collector out of a worker's way.

A worker makes and drops a dozen small objects per job, hardly any of them in cycles, beside an app that was imported
once and stays. With the default settings the collector walks that app over and over: up to a quarter of a busy
worker's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000
"""How many new objects it takes to look for cycles among them; Python's own figure is in the hundreds."""


@contextmanager
def calm_collector() -> Iterator[None]:
    """For a process whose main business is to work: what exists now is left alone, what is new is looked at less often."""
    before = gc.get_threshold()
    # Whoever chose other settings, or switched the collector off, knows better.
    if not gc.isenabled() or before[0] > YOUNG_OBJECTS or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
