"""A thread that waits on sockets, and does what other threads ask of it in between.

Whatever belongs to the hub is touched by its thread only. So controls need no locks, and have taken effect, between two
events and never within one, when they return.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_PATIENCE = 30.0
"""Only a hub whose thread has died of an error takes longer."""


class Hub:
    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._requests: deque[Callable[[], None]] = deque()
        self._closing = False
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self.watch(self._bell, READ, self._answer)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, request: Callable[[], T]) -> T:
        """Run it on the hub's thread, and return what it returns."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(request())
            except BaseException as error:
                done.set_exception(error)

        self._requests.append(run)
        self._ring.send(b"!")
        return done.result(_PATIENCE)

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call back when one of these events has come; 0 stops that. On the hub's thread only."""
        watched = sock.fileno() in self._selector.get_map()
        if events and watched:
            self._selector.modify(sock, events, callback)
        elif events:
            self._selector.register(sock, events, callback)
        elif watched:
            self._selector.unregister(sock)

    def close(self) -> None:
        def end() -> None:
            self._closing = True

        self.do(end)
        self._thread.join()
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                # An earlier event of this round may have closed the socket, and a new one may have got its number.
                if self._selector.get_map().get(key.fd) == key:
                    key.data(events)

    def _answer(self, _events: int) -> None:
        self._bell.recv(4096)
        while self._requests:
            self._requests.popleft()()
