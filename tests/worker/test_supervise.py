"""The parent of several workers, with small scripts in their place."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from records import present
from taskharbor.cli.worker import app_folder, watched_files
from taskharbor.worker import supervise
from taskharbor.worker.supervise import Supervisor

SERVING = """
import os, signal, sys
signal.signal(signal.SIGTERM, {react})
os.write(int(sys.argv[1]), b'{{"serving": true, "backend_answers": true, "worker": "w"}}\\n')
while True:
    signal.pause()
"""
PATIENT = SERVING.format(react="lambda *_: sys.exit(0)")
STUBBORN = SERVING.format(react="signal.SIG_IGN")


class Running(logging.Handler):
    """A supervisor on a thread, and what it logs, to be waited for."""

    def __init__(self, script: str, **options: Any) -> None:
        super().__init__()

        def command(number: int, fd: int) -> list[str]:
            return [sys.executable, "-c", script, str(fd), str(number)]

        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        supervise.log.addHandler(self)
        self.supervisor = Supervisor(command, **{"processes": 1, **options})
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def until(self, part: str) -> str:
        while part not in (line := self._lines.get(timeout=20)):
            pass
        return line

    def until_ready(self) -> None:
        """Reports come over a pipe; looking again is all there is to do."""
        while not self.supervisor.look()[0]:
            time.sleep(0.001)

    def end(self, stops: int = 0) -> int | None:
        for _ in range(stops):
            self.supervisor.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.code


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setattr(supervise, "RESTART_PAUSES", (0.01, 0.04))
    level = supervise.log.level
    supervise.log.setLevel(logging.DEBUG)
    running: list[Running] = []

    def start(script: str, **options: Any) -> Running:
        running.append(Running(script, **options))
        return running[-1]

    yield start
    for one in running:
        one.end(stops=3)
        supervise.log.removeHandler(one)
    supervise.log.setLevel(level)


def test_a_crashed_child_comes_back(start: Callable[..., Running]) -> None:
    running = start("raise SystemExit(1)")
    for _ in range(4):
        running.until("starts again")
    assert running.supervisor._slots[0].crashes >= 4
    assert running.end(stops=1) == 0


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RESTART_PAUSES", (1.0, 5.0))
    supervisor = Supervisor(lambda number, fd: [], processes=1)
    (slot,) = supervisor._slots
    slot.started = float("inf")
    pauses = []
    for _ in range(5):
        supervisor._restart_later(slot, 1)
        pauses.append(present(slot.restart).interval)
    assert pauses == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(("code", "options"), [(0, {"processes": 3, "finite": True}), (2, {"processes": 2})])
def test_children_that_finish_or_refuse_to_start_end_it(
    code: int, options: dict[str, Any], start: Callable[..., Running]
) -> None:
    assert start(f"raise SystemExit({code})", **options).end() == code


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


def test_a_change_restarts_the_children(start: Callable[..., Running]) -> None:
    running = start(PATIENT, reload=True)
    running.until_ready()
    before = running.supervisor.pids()
    running.until("started")
    running.supervisor.changed("jobs.py")
    running.until("jobs.py changed")
    running.until("started")
    assert running.supervisor.pids() != before
    running.until_ready()
    assert running.end(stops=1) == 0


def test_while_reloading_a_broken_app_waits_for_the_next_change(start: Callable[..., Running]) -> None:
    running = start("raise SystemExit(2)", reload=True)
    running.until("a change of a file starts it again")
    running.supervisor.changed("jobs.py")
    running.until("started")
    running.until("a change of a file starts it again")
    assert running.end(stops=1) == 0


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


def test_the_apps_folder_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_package_to_watch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "jobs.py").write_text("")
    assert app_folder("some_package_to_watch.jobs") == package
    monkeypatch.chdir(tmp_path)
    assert app_folder("no_such_module_anywhere") == tmp_path
