"""Two brokers over one store, as processes that can be killed and frozen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from taskharbor.broker.models import LeaderView
from taskharbor_testkit.servers.broker import BrokerProcess, broker_process
from taskharbor_testkit.servers.process import HOST, free_port

PATIENCE = 60.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_read_leader = msgspec.json.Decoder(LeaderView).decode


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


class BrokerPair:
    """Named by number, 0 and 1; each keeps its port through its lives."""

    def __init__(self, store: str, *, term: float, timeout: float = 1.0) -> None:
        """`timeout`: after how many seconds clients give up on a broker that says nothing."""
        self._store, self._term = store, term
        self._ports = [free_port(), free_port()]
        self._lives: list[contextlib.ExitStack] = [contextlib.ExitStack(), contextlib.ExitStack()]
        self._running: dict[int, BrokerProcess] = {}
        self._frozen: set[int] = set()
        self.url = f"http://{HOST}:{self._ports[0]},{HOST}:{self._ports[1]}?timeout={timeout:g}"
        self.frozen_leaders = self.killed_leaders = 0

    def address(self, one: int) -> str:
        return f"http://{HOST}:{self._ports[one]}"

    def start(self, one: int) -> None:
        options = ("--bind", f"{HOST}:{self._ports[one]}", "--term", f"{self._term:g}s")
        self._running[one] = self._lives[one].enter_context(broker_process(self._store, *options))

    def lines(self, one: int) -> str:
        """What it has said in this life."""
        return "".join(self._running[one].lines)

    def kill(self, one: int) -> None:
        self._running.pop(one).kill()
        self._frozen.discard(one)
        self._lives[one].close()

    def stop(self, one: int) -> int:
        code = self._running.pop(one).stop()
        self._lives[one].close()
        return code

    def freeze(self, one: int) -> None:
        """Not while it holds a lock: in a folder that would stop everybody, the new leader too, until it goes on."""

        def is_frozen_without_a_lock() -> bool:
            self.freeze_now(one)
            if is_locked(self._store):
                self.thaw(one)
                return False
            return True

        wait_until(is_frozen_without_a_lock, f"a moment in which broker {one} holds no lock")

    def freeze_now(self, one: int) -> None:
        self._frozen.add(one)
        pid = self._running[one].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self, one: int) -> None:
        os.kill(self._running[one].pid, signal.SIGCONT)
        self._frozen.discard(one)

    # -- who leads ----------------------------------------------------------------------------------------

    def says(self, one: int) -> LeaderView:
        with _NO_PROXY.open(f"{self.address(one)}/v1/leader", timeout=10) as answer:
            return _read_leader(answer.read())

    def leads(self, one: int) -> bool:
        return one in self._running and one not in self._frozen and self.says(one).is_leader

    def steps_down(self, one: int) -> int:
        """How often it has said so in this life."""
        return self.lines(one).count("another broker leads now")

    def leader(self) -> int:
        """The one that leads, as soon as one does."""
        found: list[int] = []

        def is_found() -> bool:
            found[:] = [one for one in (0, 1) if self.leads(one)]
            return len(found) == 1

        wait_until(is_found, "one leader")
        return found[0]

    # -- blows --------------------------------------------------------------------------------------------

    def kill_leader(self) -> None:
        """The other one takes over; whoever was killed comes back and stands by."""
        one = self.leader()
        self.kill(one)
        wait_until(lambda: self.leads(1 - one), f"broker {1 - one} leads")
        self.start(one)
        self.killed_leaders += 1

    def freeze_leader(self) -> None:
        """Past its term, until the other one leads; then it goes on, and must find out."""
        one = self.leader()
        before = self.steps_down(one)
        self.freeze(one)
        try:
            wait_until(lambda: self.leads(1 - one), f"broker {1 - one} leads")
        finally:
            self.thaw(one)
        wait_until(lambda: self.steps_down(one) > before, f"broker {one} says that it stands by")
        self.frozen_leaders += 1

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self.alive():
            for one in (0, 1):
                self.start(one)
            yield

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Whoever is started in here is gone afterwards."""
        with self._lives[0], self._lives[1]:
            yield


def is_locked(store: str) -> bool:
    """Whether a lock of this folder's stays taken. Who works takes one for microseconds; who is frozen may keep it."""
    folder = Path(store.removeprefix("file://").partition("?")[0])
    return any(_stays_taken(file) for file in folder.glob(".taskharbor/locks/*"))


def _stays_taken(lock: Path) -> bool:
    deadline = time.monotonic() + 0.3
    with lock.open("rb+") as file:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            time.sleep(0.002)
    return True
