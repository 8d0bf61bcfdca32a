"""Workers as processes that can be killed and frozen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.brokers import wait_until

PROGRAM = Path(__file__).with_name("chaos_program.py")
WORKERS = 4


class Fleet:
    """The workers. Who was killed is replaced by a new one."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._started = url, folder, 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._started += 1
        name = f"worker-{self._started}"
        with open(self._folder / f"{name}.log", "wb") as log:
            command = [sys.executable, str(PROGRAM), self._url, name, str(self._folder)]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self.running[name] = subprocess.Popen(command, **streams, start_new_session=True)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.communicate()

    def freeze(self, name: str) -> None:
        process = self.running[name]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGCONT)

    def check(self) -> None:
        """Nobody has left who was not told to."""
        for name, process in self.running.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self._last_words(name)}"

    def dismiss(self) -> None:
        for name, process in self.running.items():
            # One that was started a moment ago could not say yet what a signal means to it.
            wait_until((self._folder / f"{name}.notes").exists, f"{name} is up")
            process.send_signal(signal.SIGTERM)
        for name, process in self.running.items():
            assert process.wait(30) == 0, f"{name} ended with {process.returncode}: {self._last_words(name)}"

    def executions(self) -> Counter[tuple[str, int]]:
        """Job and fence of every execution that was begun, with how often."""
        noted: Counter[tuple[str, int]] = Counter()
        for file in self._folder.glob("*.notes"):
            lines = [line.split() for line in file.read_text().splitlines()]
            noted.update((job_id, int(fence)) for job_id, fence in lines)
        return noted

    def _last_words(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            for _ in range(WORKERS):
                self.start()
            yield
            self.dismiss()
        finally:
            for name in list(self.running):
                self.kill(name)
