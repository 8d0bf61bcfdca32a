"""Spark programs and standalone clusters on this machine, from the pip package and nothing else.

A cluster is a master and two workers, with different addresses as if they were two hosts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark

HOME = Path(pyspark.__file__).parent
PATIENCE = 120.0
_LEADERS: set[int] = set()
"""Programs that run now. Each has a session of its own."""

SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""These tests start half a dozen JVMs on a small machine."""

EXECUTOR_SETTINGS = {
    **dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1"),
    **dict.fromkeys(("spark.driver.memory", "spark.executor.memory"), "512m"),
    "spark.executor.extraJavaOptions": SMALL_JVM,
}


# Of every Spark program of a test: this interpreter, and no settings from outside.
ENVIRONMENT = {
    "SPARK_HOME": str(HOME),
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_DAEMON_JAVA_OPTS": SMALL_JVM,
    **dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), sys.executable),
}


def conf_arguments(settings: Mapping[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]


@contextmanager
def standalone(folder: Path, *, cores: int = 2) -> Iterator[str]:
    """A cluster of two hosts; the URL of its master."""
    with ExitStack() as stack:

        def start(name: str, kind: str, host: str, pattern: str, *arguments: str) -> re.Match[str]:
            log = folder / f"{name}.log"
            command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", "--host", host]
            with log.open("wb") as output:
                daemon = [*command, "--port", "0", "--webui-port", "0", *arguments]
                stack.enter_context(_running(daemon, folder, {}, stdout=output, stderr=subprocess.STDOUT))
            for _ in looks():
                if found := re.search(pattern, log.read_text(errors="replace")):
                    return found
            raise AssertionError(f"the {name} did not start:\n{log.read_text(errors='replace')[-3000:]}")

        master = start("master", "master.Master", "127.0.0.1", r"Starting Spark master at (spark://\S+)")[1]
        for number, host in enumerate(("127.0.0.2", "127.0.0.3")):
            work = str(folder / f"work{number}")
            room = ["--cores", str(cores), "--memory", "600m", "--work-dir", work, master]
            start(f"worker{number}", "worker.Worker", host, "Successfully registered with master", *room)
        yield master


def executors() -> list[int]:
    """The process ids of the executors that run now, below what this process has started."""
    found = _processes(_LEADERS)
    return [pid for pid, command in found.items() if "CoarseGrainedExecutorBackend" in command]


def looks(seconds: float = PATIENCE, *, pause: float = 0.2) -> Iterator[None]:
    """For loops that look until they find: ends when the patience does."""
    event, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        event.wait(pause)


@contextmanager
def program(*arguments: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Spark driver in a process of its own, ended with the block."""
    local = {"SPARK_LOCAL_IP": "127.0.0.1", **environment}
    with _running(arguments, folder, local, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def finish(process: subprocess.Popen[str]) -> str:
    """What a program that ended well has said."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors[-3000:]
    return output


@contextmanager
def _running(
    arguments: Sequence[str], folder: Path, more: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    environment = {**kept, **ENVIRONMENT, **more}
    streams |= {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True}
    process = subprocess.Popen(arguments, cwd=folder, env=environment, **streams)
    _LEADERS.add(process.pid)
    try:
        yield process
    finally:
        _LEADERS.discard(process.pid)
        for pid in _processes({process.pid}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _processes(leaders: set[int]) -> dict[int, str]:
    """The processes in the sessions of these, and their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        # Not a process, or one that has just ended.
        with suppress(ValueError, OSError):
            if os.getsid(int(entry.name)) in leaders:
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
    return found
