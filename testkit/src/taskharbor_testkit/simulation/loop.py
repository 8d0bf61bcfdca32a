"""An event loop that is one simulated thread: virtual time, a clock of its own, and a plug that can be pulled.

A frozen loop (SIGSTOP, a paused virtual machine, a blocked thread) keeps what is due until it is thawed. A killed one
forgets everything: no clean-up runs, no `finally`, just as with `kill -9`.
"""

from __future__ import annotations

import asyncio
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from taskharbor.jobs import SECOND, Micros

if TYPE_CHECKING:
    from taskharbor_testkit.simulation.scheduler import Scheduler

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as code without sockets, signals and subprocesses needs."""

    def __init__(self, scheduler: Scheduler, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self._scheduler = scheduler
        self._offset = offset
        self._rate = rate
        self._holds = 0
        """How many freezes are on: they may overlap."""
        self.name = name
        self.ready: deque[Handle] = deque()
        self.is_listed = False
        """The scheduler counts this loop among those that can run."""
        self.is_dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Tasks that have not ended. Kept alive here: a task that is collected would run its clean-up."""
        self.errors: list[str] = []
        """Exceptions that nobody caught."""

    # -- time ---------------------------------------------------------------------------------------------

    def time(self) -> float:
        """This machine's monotonic clock: off by `offset`, fast or slow by `rate`."""
        return self._offset + self._rate * self._scheduler.now

    def monotonic_us(self) -> Micros:
        return int(self.time() * SECOND)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        if not self.is_dead:
            scheduler = self._scheduler
            scheduler.add_timer(max(scheduler.now, (when - self._offset) / self._rate), self, handle)
        return handle

    def fire(self, handle: Handle) -> None:
        """A callback is due."""
        if self.is_dead:
            return
        self.ready.append(handle)
        if not self.is_listed and not self._holds:
            self.is_listed = True
            self._scheduler.add_runnable(self)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """asyncio's own hook; the scheduler skips a cancelled timer when it comes to it."""

    # -- callbacks and tasks --------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        self.fire(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Handle:
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name or "simulated", context=context)
        self.tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # -- the plug -----------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self._holds += 1
        if self.is_listed:
            self.is_listed = False
            self._scheduler.remove_runnable(self)

    def thaw(self) -> None:
        self._holds -= 1
        if not self._holds and self.ready and not self.is_dead:
            self.is_listed = True
            self._scheduler.add_runnable(self)

    def block(self, seconds: float) -> None:
        """Code on this loop that does not yield for a while: everybody else on it waits."""
        self.freeze()
        self._scheduler.after(seconds, self.thaw)

    def kill(self) -> None:
        # What was due stays where it is, never to run: `bury` needs it to end the tasks it belongs to.
        self.is_dead = True
        if self.is_listed:
            self.is_listed = False
            self._scheduler.remove_runnable(self)

    def bury(self) -> None:
        """When all is over: let abandoned tasks be cancelled, so that nothing is left to the garbage collector."""
        self.is_dead = False
        self._holds = 0
        if self.ready and not self.is_listed:
            self.is_listed = True
            self._scheduler.add_runnable(self)
        for task in list(self.tasks):
            task.cancel()
