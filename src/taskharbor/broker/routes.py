"""Routes of the JSON API: path, request, answer, and the function that does the work.

The table of routes makes the paths, the checks of bodies and queries, and the OpenAPI document, so they cannot differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker.admission import CALLER, Endpoint, ServedPath
from taskharbor.broker.error_responses import Problem, invalid
from taskharbor.broker.idempotency import Replays
from taskharbor.broker.models import batch_item, batch_of
from taskharbor.broker.runtime import Service
from taskharbor.broker.tokens import EVERYBODY, Caller
from taskharbor.drivers.broker_protocol import REQUEST_ID
from taskharbor.drivers.operations import Operation
from taskharbor.drivers.validation import check
from taskharbor.errors import JobError
from taskharbor.jobs import Micros

A = TypeVar("A")

JSON = "application/json"
MOST_PARAMETERS = 200

_encode = msgspec.json.Encoder().encode


class RouteCall(msgspec.Struct):
    """One request, read and checked.

    Attributes:
        names: The names from the path.
    """

    service: Service
    request: Request
    caller: Caller
    names: dict[str, str]
    query: Any = None
    body: Any = None

    async def run(self, operation: Operation[A]) -> A:
        """Check a call of the contract, and carry it out for this caller."""
        return await self.service.calls.run(self.caller, check(operation))

    def check_batch(self, length: int) -> None:
        """Raise `Problem` if a batch has more items than are accepted."""
        if length > (most := self.service.config.max_batch):
            raise Problem("too_many_items", f"{length} items in one request: at most {most} are accepted")


class Reply(msgspec.Struct):
    """An answer with another status than the route's own."""

    status: int
    body: Any


Handle: TypeAlias = Callable[[RouteCall], Awaitable[Any]]


class Route(ServedPath, frozen=True, kw_only=True):
    """One method of one path of the JSON API.

    Attributes:
        name: The unique name; the OpenAPI operationId.
        bodies: The structs that a body may be. One: the body is decoded into it. Several: `handle` decodes it itself.
        answers: The answers that are not problems, by their status. The first is usual, `Reply` gives another.
        problems: Statuses of problems beyond those of every route.
        still_holds: Tells if a kept answer is still valid, for a route whose caller may name its request and repeat it.
    """

    name: str
    summary: str
    tag: str
    handle: Handle
    bodies: tuple[Any, ...] = ()
    is_body_optional: bool = False
    query: Any = None
    answers: dict[int, tuple[Any, ...]]
    problems: tuple[int, ...] = ()
    still_holds: Callable[[Any, Micros], bool] | None = None


# Every route, as the modules with their handlers register them.
ROUTES: list[Route] = []


def route(method: str, path: str, *, answer: Any = None, **more: Any) -> Callable[[Handle], Handle]:
    """Make a decorator that registers a handler. Unless others are given, the route has the handler's name, the first sentence of
    its docstring as summary, and the type of its answer."""

    def register(handle: Handle) -> Handle:
        answers = {200: (answer or get_type_hints(handle)["return"],)}
        given = {"name": handle.__name__, "summary": first_sentence(handle), "answers": answers, **more}
        ROUTES.append(Route(method, path, handle=handle, **given))
        return handle

    return register


def first_sentence(documented: Any) -> str:
    """Return the first sentence of a docstring; empty if Python left all docstrings out."""
    return re.split(r"(?<=\.)\s", " ".join((documented.__doc__ or "").split()))[0]


# A function for several jobs: takes pairs of a job's id and its request, and returns an answer or a `JobError` for each.
HandleJobs: TypeAlias = Callable[[RouteCall, Sequence[tuple[str, Any]]], Awaitable[Sequence[Any]]]


def route_one(action: str, handle: HandleJobs, body: Any, **more: Any) -> None:
    """Register the route of an action on one job, whose id is in the path. The body's docstring has the summary."""

    async def handle_one(call: RouteCall) -> Any:
        (answer,) = await handle(call, [(call.names["id"], call.body)])
        if isinstance(answer, JobError):
            raise answer
        return answer

    more = {"name": action, "summary": first_sentence(body), "problems": (404, 409), **more}
    route("POST", f"/v1/jobs/{{id}}/{action}", bodies=(body,), **more)(handle_one)


def route_many(action: str, handle: HandleJobs, body: Any, items: str, *, answer: Any, **more: Any) -> None:
    """Register the route of an action on many jobs, which are in the field `items` of the body."""

    async def handle_many(call: RouteCall) -> Any:
        asked = getattr(call.body, items)
        call.check_batch(len(asked))
        jobs = [(one, None) if isinstance(one, str) else (one.id, one) for one in asked]
        answers = await handle(call, jobs)
        return {"results": [batch_item(job_id, one) for (job_id, _), one in zip(jobs, answers, strict=True)]}

    more = {"name": f"{action}_many", "summary": first_sentence(body), **more}
    route("POST", f"/v1/jobs/{action}", bodies=(body,), answer=batch_of(answer), **more)(handle_many)


def endpoint_of(route: Route, service: Service, replays: Replays) -> Endpoint:
    """Make the endpoint of a route. All decisions that need no request are made here."""
    decode = msgspec.json.Decoder(route.bodies[0]).decode if len(route.bodies) == 1 else None
    query_fields = () if route.query is None else msgspec.structs.fields(route.query)
    lists = {one.name for one in query_fields for kind in get_args(one.type) if get_origin(kind) is list}
    handle, still_holds, status = route.handle, route.still_holds, next(iter(route.answers))

    async def endpoint(request: Request, names: dict[str, str]) -> Response:
        call = RouteCall(service, request, request.scope.get(CALLER, EVERYBODY), names)
        query = request.scope["query_string"]
        if route.query is not None:
            call.query = decoded_query(query, route.query, lists)
        elif query:
            raise invalid("this path takes no query")
        data = b""
        if route.bodies:
            data = await request.body()
            # Without a body too: a form that a web page sends always names a type.
            if data or not route.is_body_optional or "content-type" in request.headers:
                checked_media_type(request, JSON)
            if route.is_body_optional:
                data = data or b"{}"
            call.body = data if decode is None else decoded(decode, data)
        elif request.headers.get("content-length", "0") != "0":
            raise invalid("this path takes no body")
        given = request.headers.get(REQUEST_ID)
        if given is None or still_holds is None:
            answer = await handle(call)
        else:
            # The answer that this request got before, if it still holds; else a new one.
            name = (call.caller.name, given)
            what = f"{route.name} (body {hashlib.blake2b(data, digest_size=4).hexdigest()})"
            answer, _ = await replays.once(
                name, what, lambda: handle(call), lambda kept: still_holds(kept, service.now())
            )
            replays.weigh(name, len(_encode(answer)))
        if isinstance(answer, Reply):
            return Response(_encode(answer.body), answer.status, media_type=JSON)
        return Response(_encode(answer), status, media_type=JSON)

    return endpoint


def checked_media_type(request: Request, *accepted: str) -> str:
    """Return the media type of a body. Raises `Problem` for any other than these: a web page of another site can post plain text
    and forms without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in accepted:
        detail = f"the body must be {' or '.join(accepted)}, and Content-Type must say so"
        hint = f"send the header Content-Type: {accepted[0]}"
        raise Problem("unsupported_media_type", detail, hint=hint)
    return kind


def decoded(decode: Callable[[bytes], Any], data: bytes, name: str = "body") -> Any:
    """Decode a body, or the part of it with this name. Raises `Problem` if it does not fit."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except RecursionError:
        raise Problem("too_deep", f"the {name} is nested too deep") from None
    except UnicodeDecodeError:
        raise Problem("bad_json", f"the {name} is not UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise Problem("bad_json", f"the {name} is not valid JSON: {error}") from None


def decoded_query(query: bytes, wanted: Any, lists: set[str]) -> Any:
    """Decode a query as a model; `lists` are the parameters that may be repeated. Raises `Problem` if it does not fit."""
    given: dict[str, Any] = {}
    try:
        text = query.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS)
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
