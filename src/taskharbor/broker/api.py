"""The JSON API as a whole: every operation, in the order of the documentation."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import taskharbor.broker.claiming as claiming
import taskharbor.broker.looking as looking
import taskharbor.broker.operating as operating
import taskharbor.broker.settling as settling
import taskharbor.broker.standing as standing
import taskharbor.broker.submitting as submitting
from taskharbor.broker.openapi import encoded_document
from taskharbor.broker.operations import Operation, place
from taskharbor.broker.replays import Replays
from taskharbor.broker.routing import Needs, Place
from taskharbor.broker.service import Service

OPERATIONS: tuple[Operation, ...] = (
    *submitting.OPERATIONS,
    *claiming.OPERATIONS,
    *settling.OPERATIONS,
    *looking.OPERATIONS,
    *operating.OPERATIONS,
    *standing.OPERATIONS,
)


def places(service: Service) -> list[Place]:
    replays = Replays()
    return [*(place(operation, service, replays) for operation in OPERATIONS), _document_place()]


def _document_place() -> Place:
    async def openapi(request: Request, names: dict[str, str]) -> Response:
        return Response(encoded_document(OPERATIONS), media_type="application/json")

    return Place("GET", "/openapi.json", Needs(on_standby=True), openapi)
