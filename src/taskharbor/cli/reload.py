"""Tells when a Python file of the app changed: by looking at modification times, which works on every file system."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
MOST_FILES = 5000


class Watcher:
    """Looks at the `.py` files under a folder every `interval` seconds, on a daemon thread."""

    def __init__(self, folder: Path, changed: Callable[[str], None], *, interval: float = 0.5) -> None:
        self._folder = folder
        self._changed = changed
        self._interval = interval
        self._stopped = threading.Event()
        self._seen = self._look()
        self._thread = threading.Thread(target=self._run, name="taskharbor-reload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            now = self._look()
            if now != self._seen:
                differing = sorted(path for path, _ in now.items() ^ self._seen.items())
                self._seen = now
                self._changed(os.path.relpath(differing[0]))

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in python_files(self._folder):
            try:
                found[path] = os.stat(path).st_mtime_ns
            except OSError:
                continue
            if len(found) >= MOST_FILES:
                break
        return found


def python_files(folder: Path) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
        yield from (os.path.join(here, name) for name in files if name.endswith(".py"))


def app_folder(module: str) -> Path:
    """The folder of the module's topmost package (or of the module itself), found without importing it."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return Path.cwd()
    return Path(spec.origin).parent
