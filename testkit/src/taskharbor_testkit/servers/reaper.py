"""Ends servers whose owner was killed before it could: a program of its own, and the functions that end a process family.

It reads which servers run from a pipe and does nothing until that pipe closes, which also happens when the owner gets a
SIGKILL. (PR_SET_PDEATHSIG would do with less, but it fires when the *thread* that started the server ends.) Run by path,
without the package around it: standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_QUITS_WITHIN = 3.0


def main(lines: Iterable[str]) -> None:
    """A line is a directory and the process in it, or 0 where none runs. The last line of a directory counts."""
    for directory, pid in dict(line.rstrip("\n").split("\t") for line in lines).items():
        if pid != "0":
            quit_then_kill(int(pid))
        shutil.rmtree(directory, ignore_errors=True)


def quit_then_kill(pid: int) -> None:
    """SIGQUIT lets PostgreSQL give back its shared memory. A server that does not obey is killed."""
    everyone = [pid, *children(pid)]
    send([pid], signal.SIGQUIT)
    send(everyone, signal.SIGCONT)
    deadline = time.monotonic() + _QUITS_WITHIN
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_family(pid)


def kill_family(pid: int) -> list[int]:
    """SIGKILL to a process and its children, none of which is born meanwhile. Returns the children."""
    send([pid], signal.SIGSTOP)
    family = children(pid)
    send([pid, *family], signal.SIGKILL)
    return family


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children(parent: int) -> list[int]:
    return [pid for pid, (ppid, _) in _processes().items() if ppid == parent]


def alive(pid: int) -> bool:
    """False for a zombie that its parent has not waited for."""
    _, state = _processes(pid).get(pid, (0, "Z"))
    return not state.startswith(("Z", "X"))


def _processes(only: int | None = None) -> dict[int, tuple[int, str]]:
    """pid -> (parent, state)"""
    if not Path("/proc/self/stat").exists():
        command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listing.splitlines()]
        return {int(pid): (int(parent), state) for pid, parent, state in rows}
    found: dict[int, tuple[int, str]] = {}
    for name in [str(only)] if only is not None else filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            facts = Path("/proc", name, "stat").read_text(errors="replace")
            # The program's name comes first, in parentheses, and may hold anything.
            state, parent = facts.rpartition(")")[2].split()[:2]
            found[int(name)] = (int(parent), state)
    return found


if __name__ == "__main__":
    main(sys.stdin)
