"""A bell for one waiting task, which goes on within the very call that rings.

A Future puts the task that waits for it into the loop's next turn, behind a look at the network. That is fair, and
for a worker that has been idle it is a tenth of the time from hearing of a job to running it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Self


class Doorbell:
    """What asyncio asks of anything that a task may wait for (see `asyncio.isfuture`). One waits, once."""

    _asyncio_future_blocking = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wake: Callable[[Doorbell], object] | None = None
        self._context: Context | None = None
        self._is_cancelled = False

    def ring(self) -> None:
        """From a callback of the loop the task goes on at once; from within another task, in the loop's next turn."""
        if asyncio.current_task(self._loop) is None:
            self._open()
        else:
            self._loop.call_soon(self._open)

    def _open(self) -> None:
        wake, context = self._wake, self._context
        if wake is None or context is None:
            return  # Nobody waits, or no longer.
        self._wake = None
        context.run(wake, self)

    def __await__(self) -> Generator[Self, None, None]:
        self._asyncio_future_blocking = True
        yield self
        self.result()

    # -- asked by the task ----------------------------------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, wake: Callable[[Doorbell], object], *, context: Context) -> None:
        self._wake, self._context = wake, context

    def result(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError

    def cancel(self, msg: object = None) -> bool:
        if self._wake is None:
            return False
        self._is_cancelled = True
        self._loop.call_soon(self._open)
        return True
