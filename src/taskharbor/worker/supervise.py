"""Several worker processes under one parent: started, restarted when they crash, stopped together.

The parent runs no job. It waits on one queue of things to do (a child ended, a signal came, a file changed), so everything
happens in one thread and in one order. A child holds the reading end of a pipe whose writing end only the parent
has: when the parent is gone, however it went, the child reads the end of the file and stops.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from taskharbor.worker.process_setup import exit_reason, interrupts

log = logging.getLogger("taskharbor.supervisor")

# The exit code of a child that no restart can help: a wrong option, an app that does not import.
BAD_INPUT = 2

# Seconds after which a child without a new report no longer counts as ready.
FRESH_SECONDS = 5.0

# Seconds before a crashed child starts again: after its first crash, and at most. The pause doubles from crash to crash.
RESTART_PAUSES = (0.5, 30.0)

# Seconds after which a child's earlier crashes no longer count.
STEADY_SECONDS = 60.0


class Slot(msgspec.Struct, eq=False):
    """A place for one child, and what happened to the children in it."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    crashes: int = 0
    restart: threading.Timer | None = None
    """Starts the next child, where a restart is waiting."""
    reloading: bool = False
    report: tuple[float, dict[str, Any]] | None = None


class Supervisor:
    """Keeps `processes` children running until told to stop, or until all have finished by themselves.

    `command(number, status_fd)` is the command line of child 1, 2, ...; the child writes its reports to `status_fd`.
    `finite`: a child that ends with 0 has done its part (a drain). `reload`: a child that ends otherwise waits for the
    next change of a file instead of a restart.
    """

    def __init__(
        self,
        command: Callable[[int, int], Sequence[str]],
        *,
        processes: int,
        grace: float = 30.0,
        finite: bool = False,
        reload: bool = False,
    ) -> None:
        self._command = command
        self._grace = grace
        self._finite = finite
        self._reload = reload
        self._slots = [Slot(number) for number in range(1, processes + 1)]
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked = 0
        self._code = 0

    # -- from other threads ---------------------------------------------------------

    def stop(self) -> None:
        self._events.put(self._stop)

    def changed(self, what: str) -> None:
        self._events.put(partial(self._restart_all, what))

    def pids(self) -> list[int]:
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def look(self) -> tuple[bool, dict[str, Any]]:
        """For the health server: ready when every child reported lately that it is."""
        now = time.monotonic()
        reports = [slot.report for slot in self._slots]
        fresh = [report for at, report in filter(None, reports) if now - at <= FRESH_SECONDS]
        serving = [one for one in fresh if one.get("serving") and one.get("backend_answers")]
        wanted = len(self._slots)
        details = {"processes": wanted, "alive": len(self.pids()), "ready": len(serving), "workers": fresh}
        return self._asked == 0 and len(serving) == wanted, details

    # -- life -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """The exit code: 0 after a graceful stop or a drain, 2 where the children refuse to start, else 1."""
        with interrupts(lambda _: self.stop()):
            try:
                for slot in self._slots:
                    self._start(slot)
                while self._goes_on():
                    self._events.get()()
            finally:
                self._kill()
        return self._code

    def _goes_on(self) -> bool:
        can_restart = self._reload or any(slot.restart for slot in self._slots)
        return bool(self.pids()) or (can_restart and not self._asked)

    def _later(self, seconds: float, event: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, self._events.put, (event,))
        timer.daemon = True
        timer.start()
        return timer

    # -- children ---------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                self._command(slot.number, writing),
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
                # A group of its own: Ctrl-C in the terminal reaches the parent alone, which passes it on once.
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        slot.process, slot.started, slot.restart, slot.reloading = process, time.monotonic(), None, False
        ended = partial(self._ended, slot)
        threading.Thread(target=lambda: self._events.put(partial(ended, process.wait())), daemon=True).start()
        threading.Thread(target=_read_reports, args=(slot, reading), daemon=True).start()
        log.info("worker process %d started, pid %d", slot.number, process.pid)

    def _ended(self, slot: Slot, code: int) -> None:
        if slot.process is not None and slot.process.stdin is not None:
            slot.process.stdin.close()
        slot.process = slot.report = None
        reason = exit_reason(code)
        if self._asked:
            # SIGTERM itself: a child that had not yet begun, so there was nothing to finish.
            if code not in (0, -signal.SIGTERM):
                self._code = self._code or 1
        elif slot.reloading:
            self._start(slot)
        elif self._finite and code == 0:
            log.info("worker process %d has finished", slot.number)
        elif self._reload and code != 0:
            text = "worker process %d ended with %s; a change of a file starts it again"
            log.warning(text, slot.number, reason)
        elif code == BAD_INPUT:
            log.error("worker process %d refused to start; giving up", slot.number)
            self._code = BAD_INPUT
            self._stop()
        else:
            if time.monotonic() - slot.started >= STEADY_SECONDS:
                slot.crashes = 0
            first, longest = RESTART_PAUSES
            pause = min(longest, first * 2**slot.crashes)
            slot.crashes += 1
            slot.restart = self._later(pause, partial(self._restart, slot))
            text = "worker process %d ended with %s; it starts again in %.1f s"
            log.warning(text, slot.number, reason, pause)

    def _restart(self, slot: Slot) -> None:
        if slot.restart is not None:  # Neither stopped nor started meanwhile.
            self._start(slot)

    def _restart_all(self, what: str) -> None:
        if self._asked:
            return
        log.info("%s changed: restarting", what)
        for slot in self._slots:
            slot.crashes = 0
            if slot.process is None:
                self._start(slot)
            elif not slot.reloading:
                slot.reloading = True
                slot.process.send_signal(signal.SIGTERM)

    # -- stopping ---------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._asked += 1
        if self._asked == 1:
            log.info("stopping: running jobs get %g s (a second signal stops at once)", self._grace)
        for slot in self._slots:
            slot.restart = None
            if slot.process is not None:
                slot.process.send_signal(signal.SIGTERM)
        # A child keeps to the grace period by itself; this is for one that cannot.
        self._later((self._grace if self._asked == 1 else 0.0) + 10.0, self._kill)
        if self._asked > 2:
            self._kill()

    def _kill(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()


def _read_reports(slot: Slot, reading: int) -> None:
    with open(reading, "rb") as lines:
        for line in lines:
            try:
                slot.report = (time.monotonic(), msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue  # A child that was killed in the middle of a line.
