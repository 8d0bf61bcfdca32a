"""A real broker for tests, in a thread of this process.

with running_broker("memory://") as url:
    harbor = Harbor(url)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect
from taskharbor.errors import MissingExtra

try:
    from taskharbor.broker.admission import BrokerApp
    from taskharbor.broker.app import make_app
    from taskharbor.broker.config import BrokerConfig
    from taskharbor.broker.runtime import Leads
    from taskharbor.broker.server import TLS, BrokerServer, listen, serve, url_of
except ModuleNotFoundError as missing:
    raise MissingExtra(
        f"a broker needs packages that are not installed ({missing}): pip install 'taskharbor[broker]'"
    ) from missing

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
        app = make_app(driver, BrokerConfig(**options), None if leads is None else lambda: leads, clock)
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
