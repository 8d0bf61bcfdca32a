"""Set-up of a Python process that runs jobs: interpreter settings and signals.

Two defaults are made for programs with one busy thread and little garbage. A worker has a busy thread for its
handlers, one for its backend and often one inside the driver, and it makes and drops a dozen small objects per job
beside an app that was imported once and stays.

Python runs a signal's handler on the main thread, between two steps of the interpreter. A signal that another thread's turn
took, or that came in the instant before the main thread began to wait in the kernel, is noted but wakes nobody: an idle
process would go on sleeping. So the number is also written to a pipe by the interpreter itself, in whatever thread the signal
came, and a thread of ours reads it there.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SWITCH_SECONDS = 0.0005
"""Seconds that a computing handler may hold the interpreter while the backend's thread waits for it. Python's own 5 ms, paid
at every step of a write, cost a sixth of the throughput."""

YOUNG_OBJECTS = 10_000
"""Number of new objects that starts a collection of cycles. With Python's own few hundred, the collector walked the app
over and over, for up to a quarter of a busy worker's time."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_HANDLED = 0x80
"""Marks a number that a handler passed on, beside the one that the interpreter wrote."""
_END = b"\0"


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Set switches and collector, and put them back. Settings that the program has chosen itself stay."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    sets_collector = gc.isenabled() and threshold[0] <= YOUNG_OBJECTS
    if sets_collector:
        gc.freeze()  # What exists now is left alone.
        gc.set_threshold(YOUNG_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if sets_collector:
            gc.set_threshold(*threshold)
            gc.unfreeze()


@contextmanager
def interrupts(react: Callable[[int], None]) -> Iterator[None]:
    """Call `react(number)` once for each SIGINT or SIGTERM, on a thread of its own.

    Does nothing outside of the main thread, where signals cannot be caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def handled(number: int, frame: Any) -> None:
        # The pipe may by now be that of somebody's event loop, which took it for its own signals: then only this tells us.
        with suppress(BlockingIOError):
            writing.send(bytes((number | _HANDLED,)))

    previous_pipe = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, handled) for number in SIGNALS}
    listener = threading.Thread(target=_listen, args=(reading, react), name="taskharbor-signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(previous_pipe)
        # A word and not just the end of the file: a forked child may hold a copy of our side for as long as it lives.
        writing.setblocking(True)
        writing.send(_END)
        listener.join()
        reading.close()
        writing.close()


def _listen(reading: socket.socket, react: Callable[[int], None]) -> None:
    """Each signal is told twice, as a rule: it is new when either way has told of more than was reacted to."""
    written = handled = reacted = 0
    while True:
        for byte in reading.recv(64):
            if byte == _END[0]:
                return
            number = byte & ~_HANDLED
            if number not in SIGNALS:
                continue
            if byte & _HANDLED:
                handled += 1
            else:
                written += 1
            if max(written, handled) > reacted:
                reacted += 1
                react(number)


def exit_reason(code: int | None) -> str:
    """Describe how a process ended."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"
