"""A process that starts a broker for the store it is told: one URL per line; `-` stops the last broker.

One process for all cases of the kit: starting one costs as much as fifty cases. And not a thread of the kit's own process,
whose two loops would wait for each other at every call.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

from taskharbor.broker.app import make_app
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.runtime import candidacy_for
from taskharbor.broker.server import BrokerServer, listen, serve, url_of
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.objectstore.leadership import Leadership
from taskharbor.drivers.registry import installed_drivers

# The kit lives in a time of its own.
CONFIG = BrokerConfig(trust_client_time=True)
TERM = 15.0


@cache
def driver_for(scheme: str) -> type[Driver]:
    """Looking for it takes longer than most cases."""
    found: type[Driver] = installed_drivers()[scheme].load()
    return found


@asynccontextmanager
async def broker(store: str) -> AsyncIterator[str]:
    """The broker's URL, once it answers."""
    listener = listen("127.0.0.1", 0)
    url = url_of(listener, tls=False)
    driver = driver_for(store.partition("://")[0]).from_url(store)
    app = make_app(driver, CONFIG, candidacy_for(driver, url=url, term=TERM))
    ready: asyncio.Future[BrokerServer] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, listener, when_ready=ready.set_result))
    either: list[asyncio.Future[Any]] = [serving, ready]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await serving
    if isinstance(app.service.leads, Leadership):
        await app.service.leads.leads.wait()
    yield url
    ready.result().stop()
    await serving


async def main() -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as running:
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            try:
                await running.aclose()
                url = "rests" if line == "-" else await running.enter_async_context(broker(line))
                print(url, flush=True)
            except Exception as error:
                print(f"failed: {type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
