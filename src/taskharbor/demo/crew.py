"""The demo's worker processes: real ones, started by the command line, and one of them killed without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from taskharbor.errors import TaskHarborError


class WorkerGone(TaskHarborError):
    """A worker of the demo ended by itself."""


class Crew:
    """Workers by name. Their logs stand beside the database."""

    def __init__(self, folder: Path, url: str, *, lease: float, names: tuple[str, ...]) -> None:
        self._folder = folder
        self._url = url
        self._lease = lease
        self.names = names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            for name in self.names:
                self._processes[name] = self._start(name)
            yield
        finally:
            self._dismiss()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "taskharbor", "worker", "taskharbor.demo.app:harbor"]
        command += [
            "--url",
            self._url,
            "--name",
            name,
            "--lease",
            f"{self._lease:g}",
            "--poll-interval",
            "0.5",
        ]
        # The hidden option ties the worker's life to ours: with the demo gone, its workers go too.
        command += ["--grace", "5", "--log-format", "json", "--supervised=-1"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TASKHARBOR")}
        with open(self._log_file(name), "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill_if(self, name: str, holds: Callable[[], list[str]]) -> list[str]:
        """SIGKILL the worker while it holds jobs; which ones. It is frozen first, so that what it holds cannot change
        between the look and the kill. Nothing is killed where it holds nothing."""
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        held = holds()
        if held:
            process.kill()
            process.wait()
            self._leave(name)
        else:
            process.send_signal(signal.SIGCONT)
        return held

    def check(self) -> None:
        """Raise where a worker ended that was not killed by us."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = self._log_file(name).read_text("utf-8", errors="replace").strip().splitlines()[-3:]
                said = " | ".join(tail) or "nothing"
                raise WorkerGone(f"{name} ended with exit code {process.returncode}; its last words: {said}")

    def _leave(self, name: str) -> None:
        process = self._processes.pop(name)
        if process.stdin is not None:
            process.stdin.close()

    def _dismiss(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in list(self._processes.items()):
            try:
                process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._leave(name)
