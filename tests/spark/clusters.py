"""A standalone Spark cluster on this machine: a master and two workers, from the pip package and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

HOME = Path(pyspark.__file__).parent
PATIENCE = 120.0

SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""These tests start half a dozen JVMs on a small machine."""

EXECUTOR_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.executor.extraJavaOptions": SMALL_JVM,
}


def environment() -> dict[str, str]:
    """What every Spark program of a test is started with: the loopback, this interpreter, and no settings from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return {
        **kept,
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": SMALL_JVM,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }


def conf_arguments(settings: Mapping[str, str] = EXECUTOR_SETTINGS) -> list[str]:
    return [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]


class Standalone:
    """`with Standalone(folder) as cluster:`; `cluster.url` is the master's."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._count = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0", "--webui-port", "0")
            self.url = self._wait_for("master", r"Starting Spark master at (spark://\S+)")[1]
            for number in range(self._count):
                name = f"worker{number}"
                folder = self._folder / name
                self._start(
                    name,
                    "org.apache.spark.deploy.worker.Worker",
                    *("--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "600m"),
                    *("--work-dir", str(folder), self.url),
                )
            for number in range(self._count):
                self._wait_for(f"worker{number}", "Successfully registered with master")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def executors(self) -> list[int]:
        """The process ids of the executors that run now."""
        ours = {process.pid for process in self._processes}
        return [pid for pid in _descendants(ours) if "CoarseGrainedExecutorBackend" in _command_line(pid)]

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        with open(self._folder / f"{name}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(HOME / "bin" / "spark-class"), kind, "--host", "127.0.0.1", *arguments],
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_for(self, name: str, pattern: str) -> re.Match[str]:
        file = self._folder / f"{name}.log"
        for _ in looks():
            if found := re.search(pattern, file.read_text(errors="replace")):
                return found
        raise AssertionError(f"the {name} did not start:\n{file.read_text(errors='replace')[-3000:]}")

    def _stop(self) -> None:
        for process in self._processes:
            for pid in [*_descendants({process.pid}), process.pid]:
                _kill(pid)
        for process in self._processes:
            process.wait(PATIENCE)


def looks(seconds: float = PATIENCE) -> Iterator[None]:
    """For loops that look until they find: ends when the patience does."""
    pause, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        pause.wait(0.2)


@contextmanager
def program(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A Spark driver in a process of its own, ended with the block."""
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*_descendants({process.pid}), process.pid]:
                _kill(pid)
        process.communicate()


def _descendants(roots: set[int]) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # After the command's name, which may hold anything but is in parentheses.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: list[int] = []
    below = set(roots)
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += below
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
