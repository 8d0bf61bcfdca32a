"""Makes the broker's application of a driver: every path with its handler, behind the gate; and describes it.

The OpenAPI 3.1 document is made from the same table and the same models that answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import taskharbor
from taskharbor.broker import job_routes, operator_routes  # noqa: F401
from taskharbor.broker.admission import BrokerApp, ServedPath
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.driver_routes import driver_paths
from taskharbor.broker.error_responses import CODES, CONTENT_TYPE, ProblemDetails
from taskharbor.broker.idempotency import LONGEST_NAME, Replays
from taskharbor.broker.routes import JSON, ROUTES, Route, endpoint_of
from taskharbor.broker.runtime import Candidacy, Service
from taskharbor.clock import Clock
from taskharbor.drivers.broker_protocol import LEADER, REQUEST_ID
from taskharbor.drivers.contract import Driver


def make_app(
    driver: Driver,
    config: BrokerConfig | None = None,
    candidacy: Candidacy | None = None,
    clock: Clock | None = None,
) -> BrokerApp:
    """Make an application over any driver.

    Args:
        driver: The driver to serve. The application opens it.
        config: Limits and tokens. None: the defaults.
        candidacy: Makes this broker a candidate for leadership. None: it always answers.
        clock: A clock instead of the store's own time.
    """
    service = Service(driver, config, candidacy, clock)
    replays = Replays()
    paths = [(route, endpoint_of(route, service, replays)) for route in ROUTES]
    document = ServedPath("GET", "/openapi.json", on_standby=True)
    return BrokerApp([*paths, (document, _serve_document), *driver_paths(service)], service)


async def _serve_document(request: Request, names: dict[str, str]) -> Response:
    return Response(_encoded_document(), media_type=JSON)


@functools.cache
def _encoded_document() -> bytes:
    return msgspec.json.encode(openapi_document(ROUTES))


# -- the description ----------------------------------------------------------------------------------------

_ALWAYS = (401, 403, 421, 422, 429, 503)
_WITH_BODY = (400, 408, 413, 415)
_HEADERS = dict.fromkeys((429, 503), ("Retry-After", "Seconds."))
_HEADERS[421] = (LEADER, "The leader's URL, where one is known.")

_REQUEST_NAME_PARAMETER = {
    "name": REQUEST_ID,
    "in": "header",
    "required": False,
    "description": "A name of your own for this request. Asked again under it within a minute, the broker gives the same answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME},
}

DESCRIPTION = (
    "A leased job queue behind HTTP. Times are RFC 3339 in UTC, durations are seconds. Every answer that is not a success is "
    "application/problem+json with a stable code. The broker's own clock is the time: no request carries one."
)


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    used = [
        model
        for route in routes
        for model in (*route.bodies, *([route.query] if route.query else []), *chain(*route.answers.values()))
    ]
    types = list(dict.fromkeys([ProblemDetails, *used]))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _described(route, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TaskHarbor broker", "version": taskharbor.__version__, "description": DESCRIPTION},
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "The secret part of a token."}
            },
        },
    }


def _described(route: Route, schemas: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "responses": _responses(route, schemas),
    }
    if not route.is_public:
        described["security"] = [{"token": []}]
        needed = f"Needs a token with the scope {route.scope}."
        described["description"] = "Any token may call this." if route.scope == "read" else needed
    text = {"type": "string", "minLength": 1, "maxLength": 200}
    names = re.findall(r"\{(\w+)\}", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    query = {} if route.query is None else components[route.query.__name__]["properties"]
    parameters += [{"name": name, "in": "query", "required": False, "schema": query[name]} for name in query]
    if route.still_holds is not None:
        parameters.append(_REQUEST_NAME_PARAMETER)
    if parameters:
        described["parameters"] = parameters
    if route.bodies:
        content = _content(JSON, [schemas[body] for body in route.bodies])
        described["requestBody"] = {"required": not route.is_body_optional, **content}
    return described


def _responses(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            **_content(JSON, [schemas[answer] for answer in answers]),
        }
        for status, answers in route.answers.items()
    }
    problems = {*route.problems, *((421, 422) if route.is_public else _ALWAYS)}
    problems |= {*(_WITH_BODY if route.bodies else ()), *((404,) if route.path.startswith("/v1/") else ())}
    for status in sorted(problems - route.answers.keys()):
        codes = [code for code, (of_code, _) in CODES.items() if of_code == status]
        response = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
            **_content(CONTENT_TYPE, [schemas[ProblemDetails]]),
        }
        if status in _HEADERS:
            name, meaning = _HEADERS[status]
            response["headers"] = {name: {"schema": {"type": "string"}, "description": meaning}}
        responses[str(status)] = response
    return responses


def _content(media_type: str, schemas: Sequence[Any]) -> dict[str, Any]:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"content": {media_type: {"schema": schema}}}
