"""A process of a contender: told what to do by its command line, answering in lines, and gone when we are done with it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from benchmarks.peers.installed import ROOT, Launcher


class ContenderFailed(Exception):
    """It ended or fell silent; with the last that it said on stderr."""


class Child:
    def __init__(self, launcher: Launcher, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*launcher.command, *arguments],
            cwd=ROOT,
            env={**os.environ, **launcher.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # A group of its own, so that whatever it starts can be ended with it.
            start_new_session=True,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self) -> None:
        """One empty line: do it again."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderFailed(self._last_words()) from None

    def answer(self, what: str, timeout: float) -> float:
        """The number in the next line of this kind. Lines of any other kind are the library's own talk."""
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                raise ContenderFailed(f"no {what!r} within {timeout:g} s; {self._last_words()}") from None
            if line is None:
                raise ContenderFailed(f"ended without {what!r}; {self._last_words()}")
            words = line.split()
            if len(words) == 3 and words[0] == what:
                return float(words[2])

    def wait(self, timeout: float) -> None:
        """Until it has ended by itself, successfully."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ContenderFailed(f"still running after {timeout:g} s") from None
        if code:
            raise ContenderFailed(self._last_words())

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "nothing on stderr"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()
