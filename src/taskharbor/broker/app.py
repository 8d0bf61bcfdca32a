"""The broker as an ASGI application: the gate, the routes, and a life that begins and ends with the server's."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from taskharbor.broker.api import places
from taskharbor.broker.calls import driver_places
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.gate import Gate
from taskharbor.broker.leadership import Candidacy
from taskharbor.broker.routing import Routes
from taskharbor.broker.service import Service
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver


class BrokerApp:
    """`service` is what runs inside; the server starts and ends it by the lifespan protocol."""

    def __init__(self, service: Service) -> None:
        self.service = service
        routes = Routes([*places(service), *driver_places(service)])
        self._gate = Gate(routes, routes, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._gate(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            raise RuntimeError("a broker speaks HTTP and nothing else")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.service.start()
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()
        finally:
            await asyncio.shield(self.service.close())
        await send({"type": "lifespan.shutdown.complete"})


def make_app(
    driver: Driver,
    config: BrokerConfig | None = None,
    candidacy: Candidacy | None = None,
    clock: Clock | None = None,
) -> BrokerApp:
    """An application over any driver. `clock`: instead of the store's own time."""
    return BrokerApp(Service(driver, config, candidacy, clock))
