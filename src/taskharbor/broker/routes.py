"""Routes of the JSON API: path, request, answer, and the function that does the work.

The table of routes makes the paths, the checks of bodies and queries, and the OpenAPI document, so they cannot differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker.gate import ServedPath
from taskharbor.broker.models import batch_item, batch_of
from taskharbor.broker.problems import Problem, invalid
from taskharbor.broker.replays import Replays, request_name
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import EVERYBODY, Caller
from taskharbor.drivers.http.protocol import REQUEST_ID
from taskharbor.drivers.operations import Scope
from taskharbor.errors import JobError
from taskharbor.jobs import Micros

JSON = "application/json"
MOST_PARAMETERS = 200

_encode = msgspec.json.Encoder().encode


class RouteCall(msgspec.Struct):
    """One request, read and checked."""

    service: Service
    request: Request
    caller: Caller
    names: dict[str, str]
    """The names from the path."""
    query: Any = None
    body: Any = None


class Reply(msgspec.Struct):
    """An answer with another status than the route's own."""

    status: int
    body: Any


Handle: TypeAlias = Callable[[RouteCall], Awaitable[Any]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path of the JSON API."""

    method: str
    path: str
    name: str
    """The unique name; the OpenAPI operationId."""
    summary: str
    tag: str
    handle: Handle
    scope: Scope = "read"
    is_public: bool = False
    on_standby: bool = False
    body: Any = None
    """The struct that a body is decoded into; None: there is none."""
    body_choices: tuple[Any, ...] = ()
    """The structs of a body that can have several forms. `handle` decodes it itself."""
    is_body_optional: bool = False
    query: Any = None
    answer: Any = None
    answers: tuple[tuple[int, Any], ...] = ()
    """Successes with another status or another body."""
    status: int = 200
    problems: tuple[int, ...] = ()
    """Statuses of problems beyond those of every route."""
    still_holds: Callable[[Any, Micros], bool] | None = None
    """Tells if a kept answer is still valid, for a route whose caller may name its request and repeat it."""


ROUTES: list[Route] = []
"""Every route, as the modules with their handlers register them."""


def route(method: str, path: str, summary: str, *, name: str = "", **more: Any) -> Callable[[Handle], Handle]:
    """Make a decorator that registers a handler. Its name and the type of its answer are the route's, unless others are given."""

    def register(handle: Handle) -> Handle:
        fields = {"name": name or handle.__name__, "handle": handle, **more}
        if "answer" not in fields:
            fields["answer"] = get_type_hints(handle)["return"]
        ROUTES.append(Route(method=method, path=path, summary=summary, **fields))
        return handle

    return register


HandleJobs: TypeAlias = Callable[[RouteCall, Sequence[tuple[str, Any]]], Awaitable[Sequence[Any]]]
"""A function for several jobs: takes pairs of a job's id and its request, and returns an answer or a `JobError` for each."""


def route_one(action: str, summary: str, handle: HandleJobs, **more: Any) -> None:
    """Register the route of an action on one job, whose id is in the path."""

    async def handle_one(call: RouteCall) -> Any:
        (answer,) = await handle(call, [(call.names["id"], call.body)])
        if isinstance(answer, JobError):
            raise answer
        return answer

    path = f"/v1/jobs/{{id}}/{action}"
    route("POST", path, summary, name=action, problems=(404, 409), **more)(handle_one)


def route_many(
    action: str, summary: str, handle: HandleJobs, items: str, *, answer: Any, **more: Any
) -> None:
    """Register the route of an action on many jobs, which are in the field `items` of the body."""

    async def handle_many(call: RouteCall) -> Any:
        asked = getattr(call.body, items)
        check_batch(len(asked), call.service.config.max_batch)
        jobs = [(one, None) if isinstance(one, str) else (one.id, one) for one in asked]
        answers = await handle(call, jobs)
        return {"results": [batch_item(job_id, one) for (job_id, _), one in zip(jobs, answers, strict=True)]}

    more = {"name": f"{action}_many", **more}
    route("POST", f"/v1/jobs/{action}", summary, answer=batch_of(answer), **more)(handle_many)


def served_path(route: Route, service: Service, replays: Replays) -> ServedPath:
    """Make the endpoint of a route. All decisions that need no request are made here."""
    decode = None if route.body is None else msgspec.json.Decoder(route.body).decode
    takes_body = decode is not None or bool(route.body_choices)
    lists = _list_fields(route.query)
    handle, query_type, status = route.handle, route.query, route.status

    async def endpoint(request: Request, names: dict[str, str]) -> Response:
        call = RouteCall(service, request, request.scope.get("taskharbor.caller", EVERYBODY), names)
        query = request.scope["query_string"]
        if query_type is not None:
            call.query = decoded_query(query, query_type, lists)
        elif query:
            raise invalid("this path takes no query")
        data = b""
        if takes_body:
            data = await request.body()
            if not data and route.is_body_optional:
                data = b"{}"
            else:
                check_media_type(request)
            call.body = data if decode is None else decoded(decode, data)
        elif request.headers.get("content-length", "0") != "0":
            raise invalid("this path takes no body")
        given = request.headers.get(REQUEST_ID) if route.still_holds is not None else None
        if given is None:
            answer = await handle(call)
        else:
            answer = await _handle_once(route, call, data, given, replays)
        if isinstance(answer, Reply):
            return Response(_encode(answer.body), answer.status, media_type=JSON)
        return Response(_encode(answer), status, media_type=JSON)

    return ServedPath(route.method, route.path, endpoint, route.scope, route.is_public, route.on_standby)


async def _handle_once(route: Route, call: RouteCall, data: bytes, given: str, replays: Replays) -> Any:
    """Return the answer that this request got before, if it still holds; else a new one."""
    still_holds = route.still_holds
    assert still_holds is not None
    name = request_name(call.caller.name, given)
    what = f"{route.name} (body {hashlib.blake2b(data, digest_size=4).hexdigest()})"
    replay = await replays.once(
        name, what, lambda: route.handle(call), lambda answer: still_holds(answer, call.service.now())
    )
    replays.weigh(name, len(_encode(replay.answer)))
    return replay.answer


def check_batch(length: int, most: int) -> None:
    """Raise `Problem` if a batch has more items than are accepted."""
    if length > most:
        raise Problem("too_many_items", f"{length} items in one request: at most {most} are accepted")


def check_media_type(request: Request) -> None:
    """Check the media type. A web page of another site can post plain text and forms without asking first, but not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Problem("unsupported_media_type", "the body must be JSON")


def decoded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """Decode a body as a model. Raises `Problem` if it does not fit."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except RecursionError:
        raise Problem("too_deep", "the body is nested too deep") from None
    except UnicodeDecodeError:
        raise Problem("bad_json", "the body is not UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise Problem("bad_json", f"the body is not valid JSON: {error}") from None


def decoded_query(query: bytes, wanted: Any, lists: frozenset[str]) -> Any:
    """Decode a query as a model; `lists` are the parameters that may be repeated. Raises `Problem` if it does not fit."""
    given: dict[str, Any] = {}
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS
        )
    except ValueError:
        raise invalid("the query cannot be read: it must be percent-encoded UTF-8") from None
    for name, value in pairs:
        if name in lists:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise invalid("a parameter that takes one value was given several times")
        else:
            given[name] = value
    try:
        return msgspec.convert(given, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None


def _list_fields(wanted: Any) -> frozenset[str]:
    fields = () if wanted is None else msgspec.structs.fields(wanted)
    return frozenset(field.encode_name for field in fields if field.default_factory is list)
