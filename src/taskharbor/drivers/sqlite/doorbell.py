"""Wake-ups across processes without polling: a folder of named pipes beside the database file.

Every handle that waits owns one pipe in `<file>-doorbells/`; whoever commits something that may be runnable writes one byte
into each. A ring carries no meaning but "look again": what became runnable is in the database (`queues.stirred`),
so a lost, doubled or late ring can never lose a wake-up for longer than the waiter's next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import threading
from pathlib import Path

_HIDDEN = "."
"""A pipe is made under a hidden name and renamed once it is open: one without a reader is taken for a dead process's."""


class Bell:
    """One handle's ear. Made on the loop that will wait."""

    def __init__(self, doorbells: Doorbells, loop: asyncio.AbstractEventLoop) -> None:
        self._doorbells = doorbells
        self.loop = loop
        self.rung = asyncio.Event()
        self.is_shared = False
        """Whether other processes can ring it; if not, its owner has to look for itself."""
        self._descriptor: int | None = None
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"

    def hang(self) -> None:
        """Make the pipe and listen to it."""
        self._doorbells.add_local(self)
        if not hasattr(os, "mkfifo"):
            return
        folder = self._doorbells.folder
        hidden = folder / f"{_HIDDEN}{self.name}"
        try:
            folder.mkdir(exist_ok=True)
            self._doorbells.sweep()
            os.mkfifo(hidden)
            # Read and write: so that the pipe never reports its end when the last ringer closes it.
            self._descriptor = os.open(hidden, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.rename(hidden, folder / self.name)
            self.loop.add_reader(self._descriptor, self._on_byte)
            self.is_shared = True
        except (OSError, NotImplementedError):
            # A folder that cannot be written, a file system without pipes, a loop without readers.
            self._take_down()

    def _on_byte(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 4096)
        self.rung.set()

    def ring_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.rung.set)

    def close(self) -> None:
        self._doorbells.remove_local(self)
        if self._descriptor is not None:
            # A loop that is closed already listens to nothing.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                self.loop.remove_reader(self._descriptor)
        self._take_down()

    def _take_down(self) -> None:
        self.is_shared = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        for name in (self.name, f"{_HIDDEN}{self.name}"):
            with contextlib.suppress(OSError):
                os.unlink(self._doorbells.folder / name)
        with contextlib.suppress(OSError):
            self._doorbells.folder.rmdir()


class Doorbells:
    """All bells of one database file, as one process sees them."""

    def __init__(self, path: Path) -> None:
        self.folder = Path(f"{os.path.abspath(path)}-doorbells")
        self._lock = threading.Lock()
        self._local: dict[str, Bell] = {}

    def add_local(self, bell: Bell) -> None:
        with self._lock:
            self._local[bell.name] = bell

    def remove_local(self, bell: Bell) -> None:
        with self._lock:
            self._local.pop(bell.name, None)

    def ring(self) -> None:
        """Wake everybody. Called after a commit, in the writer's thread."""
        with self._lock:
            local = list(self._local.values())
        for bell in local:
            bell.ring_from_thread()
        own = {bell.name for bell in local}
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            if name not in own and not name.startswith(_HIDDEN):
                _ring_pipe(self.folder / name)

    def sweep(self) -> None:
        """Remove what processes left behind that died without closing."""
        for name in os.listdir(self.folder):
            pid, _, _ = name.removeprefix(_HIDDEN).partition("-")
            if not pid.isdecimal():
                continue
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / name)
            except OSError:
                # Alive, and somebody else's.
                continue


def _ring_pipe(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            # Nobody reads: its process is gone.
            with contextlib.suppress(OSError):
                os.unlink(path)
        return
    try:
        os.write(descriptor, b"!")
    except OSError:
        # Full of rings nobody took yet (one of them is enough), or closed just now.
        pass
    finally:
        os.close(descriptor)
