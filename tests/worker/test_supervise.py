"""The parent of several workers, with small scripts in their place."""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest

from taskharbor.cli.worker import app_folder, watched_files
from taskharbor.worker import supervise
from taskharbor.worker.supervise import Supervisor
from worker.stage import logged

SERVING = """
import os, signal, sys
signal.signal(signal.SIGTERM, {react})
os.write(int(sys.argv[1]), b'{{"serving": true, "backend_answers": true, "worker": "w"}}\\n')
while True:
    signal.pause()
"""
PATIENT = SERVING.format(react="lambda *_: sys.exit(0)")
STUBBORN = SERVING.format(react="signal.SIG_IGN")


class Running:
    """A supervisor on a thread, and what it logs, to be waited for."""

    def __init__(self, script: str, **options: Any) -> None:
        def command(number: int, fd: int) -> list[str]:
            return [sys.executable, "-c", script, str(fd)]

        self._log: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self.handler = QueueHandler(self._log)
        supervise.log.addHandler(self.handler)
        self.supervisor = Supervisor(command, **{"processes": 1, **options})
        self._ended = ThreadPoolExecutor(1).submit(self.supervisor.run)

    def until(self, part: str) -> str:
        while part not in (line := self._log.get(timeout=20).getMessage()):
            pass
        return line

    def until_ready(self) -> None:
        """Reports come over a pipe; looking again is all there is to do."""
        while not self.supervisor.look()[0]:
            time.sleep(0.001)

    def end(self, stops: int = 0) -> int:
        for _ in range(stops):
            self.supervisor.stop()
        return self._ended.result(30)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setattr(supervise, "RESTART_PAUSES", (0.01, 0.04))
    with logged("taskharbor.supervisor", logging.DEBUG), ExitStack() as at_the_end:

        def start(script: str, **options: Any) -> Running:
            running = Running(script, **options)
            at_the_end.callback(supervise.log.removeHandler, running.handler)
            at_the_end.callback(running.end, stops=3)
            return running

        yield start


def test_pauses_double(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """From crash to crash."""
    monkeypatch.setattr(supervise, "RESTART_PAUSES", (0.1, 0.3))
    running = start("raise SystemExit(1)")
    pauses = [running.until("starts again").rpartition(" in ")[2] for _ in range(4)]
    assert pauses == ["0.1 s", "0.2 s", "0.3 s", "0.3 s"]
    assert running.end(stops=1) == 0


def test_children_that_all_end_end_it(start: Callable[..., Running]) -> None:
    assert start("raise SystemExit(0)", processes=3, finite=True).end() == 0
    assert start("raise SystemExit(2)", processes=2).end() == 2


def test_a_crash_during_a_drain_is_made_up_for(start: Callable[..., Running], tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    script = f"import os\nif os.path.exists({flag!r}): raise SystemExit(0)\nopen({flag!r}, 'w')\nos.abort()"
    running = start(script, finite=True)
    assert "SIGABRT" in running.until("starts again")
    assert running.end() == 0


def test_stops_gracefully_and_the_third_request_kills(start: Callable[..., Running]) -> None:
    running = start(PATIENT, processes=2)
    running.until_ready()
    _, details = running.supervisor.look()
    assert (details["processes"], details["alive"], details["ready"]) == (2, 2, 2)
    assert running.end(stops=1) == 0
    assert not running.supervisor.look()[0]
    stubborn = start(STUBBORN)
    stubborn.until_ready()
    assert stubborn.end(stops=3) == 1


def test_the_watcher_sees_changes_of_python_files_only(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("x = 1")
    (tmp_path / ".venv").mkdir()
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    with watched_files(tmp_path, seen.put, interval=0.01):
        (tmp_path / "notes.txt").write_text("no")
        (tmp_path / ".venv" / "other.py").write_text("no")
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "new.py").write_text("yes")
        assert seen.get(timeout=20).endswith("new.py")
        (tmp_path / "jobs.py").unlink()
        assert seen.get(timeout=20).endswith("jobs.py")


def test_the_apps_folder_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_package_to_watch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "jobs.py").write_text("")
    assert app_folder("some_package_to_watch.jobs") == package
    monkeypatch.chdir(tmp_path)
    assert app_folder("no_such_module_anywhere") == tmp_path
