"""Plain functions run here, on threads of the worker's own.

Leaner than an executor: a job costs one queue put and its share of one wake-up of the loop. A thread cannot be
killed, so a cancelled call asks its handler to stop and is over only when the thread is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeAlias

from taskharbor.middleware import TIMEOUT, Stoppable

_Call: TypeAlias = "tuple[asyncio.Future[Any], Context, Callable[[], Any]]"


class ThreadPool:
    """Threads start as they are needed, up to `size`, and are daemons: a stuck handler cannot keep a process alive."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._notified = False
        self._closed = False

    async def run(self, work: Stoppable, function: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._busy += 1
        if self._busy > len(self._threads) and len(self._threads) < self._size:
            self._start_thread()
        self._calls.put((future, copy_context(), function))
        cancelled: asyncio.CancelledError | None = None
        try:
            while not future.done():
                try:
                    await asyncio.shield(future)
                except asyncio.CancelledError as error:
                    if future.done():
                        break  # The thread ended before it could be asked to stop, or raised this itself.
                    # Whoever cancels by hand sets the reason first; without one it was the timeout.
                    work.stop(TIMEOUT)
                    cancelled = error
                    if self._closed:
                        raise  # The worker is gone and the process goes: nobody waits for the thread any more.
        finally:
            self._busy -= 1
        if cancelled is not None:
            # What came of it does not count: a handler that was asked to stop may have returned half-way.
            raise cancelled
        result, raised = future.result()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # Its traceback holds this frame.
        return result

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)

    def _start_thread(self) -> None:
        name = f"taskharbor-handler-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, context, function = call
            result: Any = None
            error: BaseException | None = None
            try:
                result = context.run(function)
            except StopIteration as stop:
                # A coroutine cannot raise StopIteration.
                error = RuntimeError(f"the handler raised StopIteration({stop.value!r})")
                error.__traceback__ = stop.__traceback__
            except BaseException as raised:
                error = raised
            self._ended.append((future, result, error))
            del future, context, function, call, result, error
            if not self._notified:
                self._notified = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # The loop is closed: the worker is gone, and so is the lease.

    def _deliver(self) -> None:
        # Cleared before draining: an append after the drain then notifies again.
        self._notified = False
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.cancelled():
                continue
            # Never as the future's exception: asyncio would throw it into the waiting task, and StopIteration,
            # GeneratorExit and KeyboardInterrupt mean something else there.
            future.set_result((result, error))
