"""The parent of several workers, with small scripts in their place."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taskharbor.cli.worker import app_folder, watched_files
from taskharbor.worker.supervise import Supervisor

PATIENT = """
import os, signal, sys
def stop(*_):
    os.write(int(sys.argv[1]), b'{"stopping": true}\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(int(sys.argv[1]), b'{"serving": true, "backend_answers": true, "worker": "w"}\\n')
while True:
    signal.pause()
"""
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), b'{"serving": true, "backend_answers": true}\\n')
while True:
    signal.pause()
"""


class Said(logging.Handler):
    """What the supervisor logged, to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def until(self, part: str) -> str:
        while part not in (line := self._lines.get(timeout=20)):
            pass
        return line


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logger = logging.getLogger("taskharbor.supervisor")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class Running:
    """A supervisor on a thread."""

    def __init__(self, script: str, **options: Any) -> None:
        def command(number: int, fd: int) -> list[str]:
            return [sys.executable, "-c", script, str(fd), str(number)]

        self.supervisor = Supervisor(command, **{"processes": 1, "first_pause": 0.01, **options})
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def end(self) -> int | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.code


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(script: str, **options: Any) -> Running:
        running.append(Running(script, **options))
        return running[-1]

    yield start
    for one in running:
        for _ in range(3):
            one.supervisor.stop()
        one.end()


def until_ready(running: Running) -> None:
    """Reports come over a pipe; looking again is all there is to do."""
    while not running.supervisor.look()[0]:
        pass


def test_a_crashed_child_comes_back_after_growing_pauses(said: Said, start: Callable[..., Running]) -> None:
    running = start("raise SystemExit(1)", longest_pause=0.04)
    pauses = [said.until("starts again").rpartition("in ")[2] for _ in range(4)]
    assert pauses == ["0.0 s"] * 4
    assert running.supervisor._slots[0].crashes >= 4
    running.supervisor.stop()
    assert running.end() == 0


def test_pauses_double_up_to_the_longest() -> None:
    supervisor = Supervisor(lambda number, fd: [], processes=1, first_pause=1.0, longest_pause=5.0)
    (slot,) = supervisor._slots
    slot.started = float("inf")
    pauses = []
    for _ in range(5):
        import time

        before = time.monotonic()
        supervisor._restart_later(slot, 1)
        assert slot.due is not None
        pauses.append(round(slot.due - before))
    assert pauses == [1, 2, 4, 5, 5]


def test_children_that_finish_are_not_started_again(said: Said, start: Callable[..., Running]) -> None:
    running = start("raise SystemExit(0)", processes=3, finite=True)
    assert running.end() == 0


def test_a_crash_during_a_drain_is_made_up_for(
    said: Said, start: Callable[..., Running], tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    script = f"import os, pathlib\nf = pathlib.Path({str(flag)!r})\nif f.exists(): raise SystemExit(0)\nf.touch()\nos.abort()"
    running = start(script, finite=True)
    assert "SIGABRT" in said.until("starts again")
    assert running.end() == 0


def test_children_that_refuse_to_start_end_it(said: Said, start: Callable[..., Running]) -> None:
    running = start("raise SystemExit(2)", processes=2)
    assert running.end() == 2


def test_stops_gracefully(said: Said, start: Callable[..., Running]) -> None:
    running = start(PATIENT, processes=2)
    until_ready(running)
    ready, details = running.supervisor.look()
    assert ready
    assert (details["processes"], details["alive"], details["ready"]) == (2, 2, 2)
    running.supervisor.stop()
    assert running.end() == 0
    assert not running.supervisor.look()[0]


def test_the_third_request_kills(said: Said, start: Callable[..., Running]) -> None:
    running = start(STUBBORN)
    until_ready(running)
    for _ in range(3):
        running.supervisor.stop()
    assert running.end() == 1


def test_a_change_restarts_the_children(said: Said, start: Callable[..., Running]) -> None:
    running = start(PATIENT, reload=True)
    until_ready(running)
    before = running.supervisor.pids()
    said.until("started")
    running.supervisor.changed("jobs.py")
    said.until("jobs.py changed")
    said.until("started")
    assert running.supervisor.pids() != before
    until_ready(running)
    running.supervisor.stop()
    assert running.end() == 0


def test_while_reloading_a_broken_app_waits_for_the_next_change(
    said: Said, start: Callable[..., Running]
) -> None:
    running = start("raise SystemExit(2)", reload=True)
    said.until("a change of a file starts it again")
    running.supervisor.changed("jobs.py")
    said.until("started")
    said.until("a change of a file starts it again")
    running.supervisor.stop()
    assert running.end() == 0


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
