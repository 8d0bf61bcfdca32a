"""Real brokers for tests: one in a thread of this process, or one as a process of its own.

with running_broker("memory://") as url:
    harbor = Harbor(url)
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from taskharbor.broker.app import make_app
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.gate import BrokerApp
from taskharbor.broker.service import Leads
from taskharbor.broker.serving import TLS, BrokerServer, listen, serve, url_of
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect

PATIENCE = 30.0


class RunningBroker(msgspec.Struct):
    """A broker on a loop and a thread of its own."""

    url: str
    app: BrokerApp
    server: BrokerServer
    loop: asyncio.AbstractEventLoop


@contextmanager
def running_broker(store: str | Driver, **options: Any) -> Iterator[str]:
    """The URL of a broker on a free port of loopback; options as for `broker_thread`."""
    with broker_thread(store, **options) as broker:
        yield broker.url


@contextmanager
def broker_thread(
    store: str | Driver,
    *,
    leads: Leads | None = None,
    clock: Clock | None = None,
    tls: tuple[Path, Path] | None = None,
    **options: Any,
) -> Iterator[RunningBroker]:
    """A broker on a free port of loopback, for tests that look inside. `options` are fields of `BrokerConfig`. A driver that is
    given must not be open."""
    driver = connect(store) if isinstance(store, str) else store
    listener = listen("127.0.0.1", 0)
    url = url_of(listener, tls=tls is not None)
    ready: Future[RunningBroker] = Future()

    async def live() -> None:
        app = make_app(driver, BrokerConfig(**options), None if leads is None else lambda _: leads, clock)
        loop = asyncio.get_running_loop()
        await serve(
            app,
            listener,
            tls=None if tls is None else TLS(*tls),
            when_ready=lambda server: ready.set_result(RunningBroker(url, app, server, loop)),
        )

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            listener.close()

    thread = threading.Thread(target=run, name="taskharbor-broker", daemon=True)
    thread.start()
    try:
        broker = ready.result(PATIENCE)
        try:
            yield broker
        finally:
            # Closed already where a test has stopped it.
            with suppress(RuntimeError):
                broker.loop.call_soon_threadsafe(broker.server.stop)
    finally:
        thread.join(PATIENCE)


class BrokerProcess:
    """`taskharbor broker`, as a user would start it. `lines` are what it has said until it was ready."""

    def __init__(self, process: subprocess.Popen[str], url: str, lines: list[str]) -> None:
        self.process = process
        self.url = url
        self.lines = lines

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self) -> int:
        """Gracefully; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def broker_process(
    store_url: str, *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[BrokerProcess]:
    """A broker process on a free port, unless the arguments name one. Gone when the block ends, however it ends."""
    bind: Sequence[str] = () if "--bind" in arguments else ("--bind", "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "taskharbor", "broker", "--store", store_url, *bind, *arguments],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stderr is not None
    reading: threading.Thread | None = None
    try:
        lines: list[str] = []
        url = ""
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"serving .* at (https?://\S+)", line)
            if found:
                url = found[1]
                break
        if not url:
            raise RuntimeError(f"the broker did not start (exit code {process.wait()}):\n{''.join(lines)}")
        # A pipe that nobody reads would stop the broker in the middle of a line.
        reading = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reading.start()
        yield BrokerProcess(process, url, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        if reading is not None:
            reading.join(PATIENCE)
        process.stderr.close()
