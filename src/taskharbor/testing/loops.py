"""Between synchronous and asynchronous code in one thread: where pytest's fixtures, debuggers and patches live.

A worker puts plain functions on threads. A test wants them here, so that what is bound to the test's thread (a
database connection, a context variable, a debugger) is what the handler sees.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def outside_the_loop() -> Iterator[None]:
    """Plain code called from a coroutine: for its duration no event loop runs in this thread."""
    outer = _get_running_loop()
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(outer)


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread, on a loop of its own that nobody else ever sees."""
    with outside_the_loop():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
