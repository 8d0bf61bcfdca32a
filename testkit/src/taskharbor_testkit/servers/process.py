"""A server's process and its directory: started, stopped, killed, frozen, and never left behind.

Three things end a server that its test forgot: leaving the `with` block, the end of the interpreter, and the guardian
when the interpreter itself was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from taskharbor_testkit.servers import guardian
from taskharbor_testkit.servers.account import private_directory, server_account

_STARTS_WITHIN = 60.0
_STOPS_WITHIN = 30.0
_POLL = 0.01


class ServerFailed(Exception):
    """A server did not start, or did not do what it was told; the message ends with what it logged."""


class ServerProcess:
    """One directory, and at most one process in it at a time. The log of all of them is `directory/log`."""

    def __init__(self, name: str, *, at_end: Callable[[], None] | None = None) -> None:
        self.name = name
        self._at_end = at_end
        self.directory = private_directory(f"taskharbor-{name}-")
        self.log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._closed = False
        _tell_guardian("guard", self.directory)
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.name} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str | Path], ready: Callable[[], bool]) -> None:
        """Returns when it is ready; raises ServerFailed, with the process gone, when that does not come."""
        if self.running:
            raise ServerFailed(f"{self.name} runs already, as process {self.pid}")
        seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = server_account().spawn(command, cwd=self.directory, output=log)
        _tell_guardian("guard", self.directory, self._process.pid)
        try:
            self.wait(ready, "become ready", since=seen)
        except BaseException:
            self.kill()
            raise

    def wait(self, condition: Callable[[], bool], what: str, *, since: int = 0) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN
        while not condition():
            if not self.running:
                raise ServerFailed(f"{self.name} ended before it could {what}:\n{self.logged(since)}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.name} did not {what} in {_STARTS_WITHIN:g} s:\n{self.logged(since)}"
                )
            time.sleep(_POLL)

    def logged(self, since: int = 0) -> str:
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")[-4000:]

    def stop(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self.resume()
        guardian.send([self._process.pid], number)
        try:
            self._process.wait(_STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"{self.name} had to be killed: {number.name} did not stop it in {_STOPS_WITHIN:g} s:\n{self.logged()}"
            ) from None
        self._gone()

    def kill(self) -> None:
        """SIGKILL, to it and to its children; returns when all are dead."""
        if self._process is None:
            return
        orphans = guardian.kill_family(self._process.pid) if self._process.poll() is None else []
        self._process.wait()
        while any(guardian.alive(pid) for pid in orphans):
            time.sleep(_POLL)
        self._gone()

    def pause(self) -> None:
        """Freeze it, with its children: connections stay open and nothing answers."""
        guardian.send([self.pid], signal.SIGSTOP)
        guardian.send(guardian.children(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        if self.running:
            guardian.send([self.pid, *guardian.children(self.pid)], signal.SIGCONT)

    def close(self) -> None:
        """Remove it with all it holds. In a forked child this does nothing: the server is the parent's."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.running:
            try:
                self.stop(signal.SIGQUIT)
            except ServerFailed:
                pass  # It was killed, which is what matters here.
        self._gone()
        if self._at_end is not None:
            self._at_end()
        shutil.rmtree(self.directory, ignore_errors=True)
        _tell_guardian("leave", self.directory)

    def _gone(self) -> None:
        if self._process is not None:
            self._process.wait()
            _tell_guardian("guard", self.directory)
            self._process = None


_guardian: tuple[int, subprocess.Popen[str]] | None = None
_guardian_lock = threading.Lock()


def _guardian_of_this_process() -> subprocess.Popen[str]:
    """Started with the first server. It leaves when we do, and the servers before it: that is the order of atexit."""
    global _guardian
    if _guardian is None or _guardian[0] != os.getpid():
        # It keeps our standard output: who waits for that to end after killing us waits for the servers too.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        _guardian = (os.getpid(), process)
        atexit.register(_dismiss, *_guardian)
    return _guardian[1]


def _tell_guardian(order: str, directory: Path, pid: int = 0) -> None:
    with _guardian_lock:
        pipe = _guardian_of_this_process().stdin
        assert pipe is not None
        try:
            pipe.write(f"{order}\t{directory}\t{pid}\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # Someone killed the guardian; the other two ways out remain.


def _dismiss(owner: int, process: subprocess.Popen[str]) -> None:
    if owner == os.getpid():
        process.communicate()
