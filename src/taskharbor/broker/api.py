"""The JSON API as a whole: every operation that the modules with handlers register, and its own description."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker import claiming, health, inspection, operating, settling, submitting  # noqa: F401
from taskharbor.broker.openapi import encoded_document
from taskharbor.broker.operations import OPERATIONS, place
from taskharbor.broker.replays import Replays
from taskharbor.broker.routing import Needs, Place
from taskharbor.broker.service import Service


def places(service: Service) -> list[Place]:
    replays = Replays()

    async def openapi(request: Request, names: dict[str, str]) -> Response:
        return Response(encoded_document(tuple(OPERATIONS)), media_type="application/json")

    document = Place("GET", "/openapi.json", Needs(on_standby=True), openapi)
    return [*(place(operation, service, replays) for operation in OPERATIONS), document]
