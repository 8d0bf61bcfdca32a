"""The broker as an ASGI application: the gate, the routes, and a life that begins and ends with the server's."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from taskharbor.broker import job_routes, operator_routes  # noqa: F401
from taskharbor.broker.calls import driver_places
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.gate import Gate, Needs, Place
from taskharbor.broker.openapi import encoded_document
from taskharbor.broker.operations import JSON, OPERATIONS, place
from taskharbor.broker.replays import Replays
from taskharbor.broker.service import Candidacy, Service
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver


def _places(service: Service) -> list[Place]:
    """Every path of the JSON API, as the modules with routes register them, and its own description."""
    replays = Replays()

    async def openapi(request: Request, names: dict[str, str]) -> Response:
        return Response(encoded_document(tuple(OPERATIONS)), media_type=JSON)

    document = Place("GET", "/openapi.json", Needs(on_standby=True), openapi)
    return [*(place(operation, service, replays) for operation in OPERATIONS), document]


class BrokerApp:
    """`service` is what runs inside; the server starts and ends it by the lifespan protocol."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._gate = Gate([*_places(service), *driver_places(service)], service)

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
