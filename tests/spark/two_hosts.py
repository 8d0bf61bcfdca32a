"""A standalone Spark cluster on this machine whose two workers have different addresses, as if they were two hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from taskharbor_testkit.servers.process import free_port

STARTS_WITHIN = 90.0
HOSTS = ("127.0.0.2", "127.0.0.3")


@contextmanager
def two_hosts(folder: Path) -> Iterator[str]:
    """The URL of its master."""
    port = free_port()
    with ExitStack() as stack:
        log = folder / "master.log"
        stack.enter_context(
            _daemon(log, "master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        )
        _wait(log, lambda: _listens(port))
        master = f"spark://127.0.0.1:{port}"
        for host in HOSTS:
            work = str(folder / host)
            options = (
                "--host",
                host,
                "--webui-port",
                "0",
                "--cores",
                "2",
                "--memory",
                "1g",
                "--work-dir",
                work,
            )
            stack.enter_context(_daemon(folder / f"{host}.log", "worker.Worker", *options, master))
        yield master


@contextmanager
def _daemon(log: Path, name: str, *arguments: str) -> Iterator[None]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "PYSPARK_PYTHON": sys.executable,
    }
    environment.pop("SPARK_LOCAL_IP", None)
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield
    finally:
        # The group: the executors of a worker too.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(log: Path, is_ready: object) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    assert callable(is_ready)
    while not is_ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the master did not start:\n{log.read_text()}")
        time.sleep(0.05)
