"""Named pipes that wake waiters in other processes.

A handle that waits owns one pipe in the folder `<file>-notifications`, which exists while somebody waits; a commit that may have
made something runnable writes one byte into every pipe. The byte says no more than "look again": the queues' versions are in the
database, so a lost, doubled or late byte never loses a wake-up for longer than the waiter's next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from taskharbor.drivers.engine import inspect
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.waiting import Look, Notifications
from taskharbor.jobs import Micros

POLL = 0.05
"""Seconds between two looks of a waiter that has no pipe,"""
POLL_WITH_PIPE = 1.0
"""and of one that has: a writer may be unable to reach it."""

_HIDDEN = "."
"""A pipe is made under a hidden name and renamed once it is open: one without a reader is taken for a dead process's."""

Read: TypeAlias = Callable[[Callable[[Transaction], Any]], Awaitable[Any]]


class PipeSource:
    """One handle's queues and its pipe, for `waiting.wait`."""

    trusts_notifications = False

    def __init__(self, folder: str, notifications: Notifications, read: Read) -> None:
        self.notifications = notifications
        self._folder = Path(folder)
        self._read_store = read
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipe: int | None = None

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        versions, due = await self._read_store(lambda tx: inspect.watch(tx, queues, since))
        return Look.at((versions.get(queue, 0) for queue in queues), version, due)

    def listen(self, queues: Sequence[str]) -> float:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close()
            self._loop = loop
            self._open(loop)
        return POLL if self._pipe is None else POLL_WITH_PIPE

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        hidden = self._folder / f"{_HIDDEN}{self._name}"
        try:
            self._folder.mkdir(exist_ok=True)
            _remove_abandoned(self._folder)
            os.mkfifo(hidden)
            # Read and write: so that the pipe never reports its end when the last writer closes it.
            self._pipe = os.open(hidden, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.rename(hidden, self._folder / self._name)
            loop.add_reader(self._pipe, self._read)
        except (OSError, AttributeError, NotImplementedError):
            # A folder that cannot be written, a system without pipes, a loop without readers.
            self.close()

    def _read(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, 4096)
        self.notifications.notify()

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None and self._loop is not None:
            # A loop that is closed already listens to nothing.
            with contextlib.suppress(RuntimeError, OSError, ValueError, NotImplementedError):
                self._loop.remove_reader(pipe)
            os.close(pipe)
        with contextlib.suppress(OSError):
            for name in (self._name, f"{_HIDDEN}{self._name}"):
                (self._folder / name).unlink(missing_ok=True)
            self._folder.rmdir()


def notify_processes(folder: str) -> None:
    """Wake the waiters of other processes, after a commit."""
    own = f"{os.getpid()}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith((own, _HIDDEN)):
                _write_byte(Path(folder, name))


def _write_byte(pipe: Path) -> None:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            # Nobody reads: its process is gone.
            pipe.unlink(missing_ok=True)
        return
    # Full of bytes that nobody took yet (one of them is enough), or closed just now.
    with contextlib.suppress(OSError):
        os.write(descriptor, b"!")
    os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the pipes of processes that died without closing."""
    for name in os.listdir(folder):
        pid, _, _ = name.removeprefix(_HIDDEN).partition("-")
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            (folder / name).unlink(missing_ok=True)
        except (OSError, ValueError):
            # Alive, and somebody else's; or no pipe of ours.
            continue
