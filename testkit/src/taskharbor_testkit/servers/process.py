"""Server processes: the account they run as, their directories and ports, and how they start, stop, freeze and die.

PostgreSQL and PgBouncer refuse to run as root, which is what containers run tests as. There they run as `postgres` or
`nobody`, who must be able to enter the directories that they are given.

Three things end a server that its test forgot: leaving the `with` block, the end of the interpreter, and the reaper when
the interpreter itself was killed.
"""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from taskharbor_testkit.servers import reaper

K = TypeVar("K")
T = TypeVar("T")

HOST = "127.0.0.1"

_PORTS = range(12_000, 22_000)
"""Below what systems hand out to outgoing connections: one of those could take the port while its server is down. Nodes of
a Redis Cluster also use the port 10,000 above."""
_PORTS_TO_TRY = 5
_STARTS_WITHIN = 60.0
_STOPS_WITHIN = 30.0
_POLL = 0.01
_INHERITED_SETTINGS = ("PG", "LC_", "LANG")


class ServerFailed(Exception):
    """A server did not start, or did not do what it was told; the message ends with what it logged."""


class Closing:
    """A context manager that closes what it stands for."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def once(start: Callable[[K], T]) -> Callable[[K], T]:
    """Starts one per key for all threads of the process."""
    lock, started = threading.Lock(), functools.cache(start)

    def get(key: K) -> T:
        with lock:
            return started(key)

    return get


def free_port() -> int:
    """Free a moment ago: the caller must be ready to try another."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"no free port was found on {HOST} between {_PORTS.start} and {_PORTS.stop}")


def set_option(url: str, name: str, value: str) -> str:
    """The URL with this option, in place of one of that name."""
    parts = urlsplit(url)
    options = [one for one in parse_qsl(parts.query) if one[0] != name]
    return urlunsplit(parts._replace(query=urlencode([*options, (name, value)])))


@functools.cache
def account() -> pwd.struct_passwd | None:
    """The account that servers run as. None: our own."""
    if os.geteuid() != 0:
        return None
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users["nobody"]


def own(path: Path) -> None:
    """Give the path to the account that servers run as."""
    if user := account():
        os.chown(path, user.pw_uid, user.pw_gid)


def spawn(
    command: Sequence[str | Path], *, cwd: Path, output: IO[bytes] | int, user: pwd.struct_passwd | None
) -> subprocess.Popen[bytes]:
    """A process out of reach of the terminal's Ctrl-C: interrupted tests still tidy up."""
    given: dict[str, Any] = {}
    if user is not None:
        given = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    env = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED_SETTINGS)}
    env |= {"LC_ALL": "C", "TZ": "UTC"}
    given |= {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **given)


def run(program: str | Path, *arguments: str | Path, cwd: Path) -> None:
    """Run a program to its end, as that account."""
    with spawn([program, *arguments], cwd=cwd, output=subprocess.PIPE, user=account()) as process:
        output, _ = process.communicate()
    if process.returncode != 0:
        text = output.decode(errors="replace").strip()
        raise RuntimeError(f"{program} ended with {process.returncode}: {text}")


def temp_directory() -> Path:
    """A directory for temporary files that the account may enter. Root's own may be closed to it."""
    return Path("/tmp" if account() else tempfile.gettempdir())


class ServerProcess(Closing):
    """A server's directory and port, and at most one process at a time. The log of all of them is `directory/log`."""

    is_ours = False
    """It runs as our own account, whichever that is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.directory = Path(tempfile.mkdtemp(prefix=f"taskharbor-{name}-", dir=temp_directory()))
        own(self.directory)
        self.log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._closed = False
        _tell_reaper(self.directory)
        atexit.register(self.close)

    @abstractmethod
    def _launch(self) -> None:
        """Start the program at `self.port`, by `_run`."""

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.name} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start_on_free_port(self) -> Self:
        """For the first time."""
        for remaining in reversed(range(_PORTS_TO_TRY)):
            self.port = free_port()
            try:
                self._launch()
                break
            except ServerFailed as failure:
                if not remaining or "Address already in use" not in str(failure):
                    raise
        return self

    def wait(self, condition: Callable[[], bool], what: str, *, since: int = 0) -> None:
        """Until it holds. If it never does, the message says what the server did not do, and what it logged."""
        deadline = time.monotonic() + _STARTS_WITHIN
        while not condition():
            if not self.running or time.monotonic() > deadline:
                why = f"within {_STARTS_WITHIN:g} s" if self.running else "before it ended"
                raise ServerFailed(f"{self.name} did not {what} {why}:\n{self.logged(since)}")
            time.sleep(_POLL)

    def logged(self, since: int = 0) -> str:
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")[-4000:]

    def write_file(self, name: str, lines: Sequence[str]) -> Path:
        """A file in its directory that it may change."""
        file = self.directory / name
        file.write_text("\n".join([*lines, ""]))
        own(file)
        return file

    def kill(self) -> None:
        """SIGKILL, to it and to its children; returns when all are dead."""
        if self._process is not None:
            orphans = reaper.kill_family(self.pid) if self.running else []
            self._process.wait()
            while any(reaper.alive(pid) for pid in orphans):
                time.sleep(_POLL)
            self._forget()

    def pause(self) -> None:
        """Freeze it: connections stay open, and new ones are accepted by the kernel, but nothing answers."""
        reaper.send([self.pid], signal.SIGSTOP)
        reaper.send(reaper.children(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        if self.running:
            reaper.send([self.pid, *reaper.children(self.pid)], signal.SIGCONT)

    def close(self) -> None:
        """Remove it with all it holds. In a forked child this does nothing: the server is the parent's."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self) -> None:
        """Asked to stop, many a server would first write down what is removed a moment later."""
        self.kill()

    def _run(self, command: Sequence[str | Path], ready: Callable[[], bool]) -> None:
        """Returns when it is ready; raises ServerFailed, with the process gone, when that does not come."""
        seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            user = None if self.is_ours else account()
            self._process = spawn(command, cwd=self.directory, output=log, user=user)
        _tell_reaper(self.directory, self.pid)
        try:
            self.wait(ready, "become ready", since=seen)
        except BaseException:
            self.kill()
            raise

    def _terminate(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self.resume()
        reaper.send([self.pid], number)
        try:
            self._process.wait(_STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"{self.name} had to be killed: {number.name} did not stop it in {_STOPS_WITHIN:g} s:\n{self.logged()}"
            ) from None
        self._forget()

    def _forget(self) -> None:
        _tell_reaper(self.directory)
        self._process = None


_reaper: tuple[int, subprocess.Popen[str]] | None = None
_reaper_lock = threading.Lock()


def _tell_reaper(directory: Path, pid: int = 0) -> None:
    """Starts it with the first server. It leaves when we do, and the servers before it: that is the order of atexit."""
    global _reaper
    with _reaper_lock:
        if _reaper is None or _reaper[0] != os.getpid():
            # It keeps our standard output: a reader of that, after we were killed, also waits for the servers to end.
            command = [sys.executable, "-I", "-S", reaper.__file__]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, cwd="/", start_new_session=True, text=True
            )
            _reaper = (os.getpid(), process)
            atexit.register(process.communicate)
        pipe = _reaper[1].stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # Someone killed it; the other two ways out remain.
            pipe.write(f"{directory}\t{pid}\n")
            pipe.flush()
