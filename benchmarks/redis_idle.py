"""How often a worker that has nothing to do still asks the server."""

from __future__ import annotations

import multiprocessing
import re
import socket
import time
from collections import Counter
from multiprocessing.connection import Connection

from benchmarks.redis_server import fresh_redis, server
from taskharbor_testkit.servers.process import HOST

_SETTLED = 2.0
"""A worker that has just started still has questions that it will not ask again."""

_COMMAND = re.compile(rb'^\+[\d.]+ \[\d+ (\S+)\] "(\w+)"', re.MULTILINE)
"""As MONITOR shows it: when, the database and who, and the command."""


def commands_per_minute(seconds: float) -> str:
    """In words, by command. Those that a script runs are not counted: only what comes over the network is."""
    spawn = multiprocessing.get_context("spawn")
    with fresh_redis() as url:
        here, there = spawn.Pipe()
        worker = spawn.Process(target=_idle, args=(there, url))
        worker.start()
        here.recv()
        time.sleep(_SETTLED)
        seen = _overheard(seconds)
        worker.terminate()
        worker.join()
    kinds = ", ".join(f"{name} {calls * 60 / seconds:.3g}" for name, calls in sorted(seen.items()))
    return f"{seen.total() * 60 / seconds:.3g} ({kinds or 'none at all'})"


def _overheard(seconds: float) -> Counter[str]:
    said = bytearray()
    ends = time.monotonic() + seconds
    with socket.create_connection((HOST, server().port)) as listener:
        listener.sendall(b"MONITOR\r\n")
        while (left := ends - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                said += listener.recv(65_536)
            except TimeoutError:
                break
    return Counter(name.decode().upper() for who, name in _COMMAND.findall(said) if who != b"lua")


def _idle(answer: Connection, url: str) -> None:
    from taskharbor import Harbor

    harbor = Harbor(url)

    @harbor.job
    async def never() -> None: ...

    @harbor.job
    async def begun() -> None:
        answer.send(None)

    begun.enqueue()
    harbor.worker().run()
