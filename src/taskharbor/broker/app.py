"""Makes the broker's application of a driver: every path with its handler, behind the gate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker import job_routes, operator_routes  # noqa: F401
from taskharbor.broker.calls import driver_places
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.gate import BrokerApp, Needs, Place
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


def make_app(
    driver: Driver,
    config: BrokerConfig | None = None,
    candidacy: Candidacy | None = None,
    clock: Clock | None = None,
) -> BrokerApp:
    """An application over any driver. `clock`: instead of the store's own time."""
    service = Service(driver, config, candidacy, clock)
    return BrokerApp([*_places(service), *driver_places(service)], service)
