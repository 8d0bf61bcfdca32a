"""Handlers for worker processes: they find them here, by name."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import taskharbor.signals as signals
from records import present
from taskharbor import JSON, Harbor, Job, current_job
from taskharbor.drivers.memory import MemoryDriver


@asynccontextmanager
async def lifespan() -> AsyncIterator[dict[str, int]]:
    """A resource of each process. Its end is noted in the file that the resource is told of."""
    noted: dict[str, Any] = {"pid": os.getpid(), "opened": 1}
    yield noted
    if "file" in noted:
        Path(noted["file"]).write_text(str(os.getpid()))


harbor = Harbor(MemoryDriver(), backoff=(0, 0), lifespan=lifespan)
log = logging.getLogger("worker.isolated")
variable: ContextVar[str] = ContextVar("variable", default="clean")

once = harbor.job(isolation="process", max_attempts=1)


class Rot13:
    """A codec of the application's own."""

    name = "rot13"

    def encode(self, value: Any) -> bytes:
        return bytes(byte ^ 0x55 for byte in JSON.encode(value))

    def decode(self, data: bytes, type: Any = Any) -> Any:
        return JSON.decode(bytes(byte ^ 0x55 for byte in data), type)


harbor.codecs.register(Rot13())


def touch(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


@once
def add(a: int, b: int = 1) -> int:
    return a + b


@once
async def add_async(a: int, b: int = 1) -> int:
    await asyncio.sleep(0)
    return a + b


def undeclared(a: int) -> int:
    return a * 2


declared_elsewhere = harbor.job(isolation="process", type="declared")(undeclared)


@once
def who() -> tuple[int, str, str]:
    before = variable.get()
    variable.set("dirty")
    return os.getpid(), threading.current_thread().name, before


@once
async def who_async() -> tuple[tuple[int, str, str], int]:
    return who.function(), id(asyncio.get_running_loop())


@harbor.job(isolation="process", max_attempts=1, timeout=60)
def introspect(started: str, go_on: str) -> tuple[tuple[str, int, int], dict[str, str], bool, bool]:
    job = current_job()
    job.progress({"at": 1})
    touch(started)
    while not Path(go_on).exists():
        job.wait_for_stop(0.005)
    return (job.id, job.fence, job.attempt), dict(job.headers), job.deadline is not None, job.should_stop


class Custom(Exception):
    pass


class Declined(signals.Unrecoverable):
    pass


@harbor.job(isolation="process", max_attempts=2)
def fail(kind: str) -> None:
    errors: dict[str, BaseException] = {
        "custom": Custom("of our own"),
        "exit": SystemExit(7),
        "stop": StopIteration(),
        "keyboard": KeyboardInterrupt(),
        "cancelled": asyncio.CancelledError(),
        "retry": signals.Retry("in an hour", delay=3600),
        "snooze": signals.Snooze(3600),
        "discard": signals.Cancel("stale"),
        "unrecoverable": Declined("no money"),
    }
    raise errors[kind]


@once
async def fail_async(kind: str) -> None:
    fail.function(kind)


@harbor.job(isolation="process", max_attempts=2)
def die(path: str) -> str:
    if not Path(path).exists():
        touch(path)
        os.kill(os.getpid(), signal.SIGSEGV)
    return "survived"


@once
def die_after_a_fork(forked: str) -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(3600)
    Path(forked).write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)


@once
def fork_and_return(how: str) -> str:
    pid = os.fork()
    if pid == 0 and how == "raises":
        raise SystemExit(0)
    if pid:
        os.waitpid(pid, 0)
    return "parent" if pid else "fork"


@once
def close_connection() -> str:
    os.closerange(3, 100)
    return "closed"


@once
def spin(started: str) -> None:
    touch(started)
    while True:
        pass


@once
async def tidy(started: str, tidied: str) -> None:
    touch(started)
    try:
        await asyncio.Event().wait()
    finally:
        Path(tidied).write_text(current_job().stop_reason or "")


@once
def with_a_child(started: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(started).write_text(str(child.pid))
    child.wait()


@once
def print_and_log() -> None:
    print("printed in a process")
    print("complained in a process", file=sys.stderr)
    log.info("logged in a process", extra={"colour": "blue"})
    log.debug("too quiet to be heard")
    try:
        raise ValueError("with a traceback")
    except ValueError:
        log.exception("went wrong")


@once
def echo(value: Any) -> Any:
    return value


@once
def enqueue_another(count: int) -> None:
    if count:
        enqueue_another.enqueue(count - 1)


@once
def without_form() -> Any:
    return object()


@once
def stops_itself() -> bool:
    current_job().stop("enough")
    return current_job().should_stop


@once
def waits_for_stop(started: str) -> tuple[bool, str | None]:
    touch(started)
    job = current_job()
    return job.wait_for_stop(30), job.stop_reason


def takes_job(job: Job) -> list[Any]:
    return [job.id, job.payload.decode(), job.type]


@once
def open_files() -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted({os.readlink(link) for link in links if os.path.islink(link)})


if os.environ.get("TASKHARBOR_TEST_SLOW_IMPORT"):
    time.sleep(1.2)


@harbor.job(isolation="process", max_attempts=1, timeout=1.0)
def quick_when_begun() -> float:
    return present(current_job().deadline).timestamp() - time.time()


@once
def resource(file: str) -> tuple[int, int]:
    state = current_job().state
    state["file"] = file
    return os.getpid(), state["pid"]


@once
async def resource_async() -> tuple[int, int]:
    return os.getpid(), current_job().state["pid"]
