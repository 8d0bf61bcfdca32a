"""Routes, and the operations of the JSON API: place, request, answer, and the function that does the work.

The table of operations makes the routes, the checks of bodies and queries, and the OpenAPI document, so they cannot differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker.gate import Needs, Place
from taskharbor.broker.problems import Problem, invalid
from taskharbor.broker.replays import Replays, request_name
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import EVERYBODY, Caller
from taskharbor.drivers.operations import Scope
from taskharbor.jobs import Micros

JSON = "application/json"
MOST_PARAMETERS = 200
REQUEST_NAME = "TaskHarbor-Request"
"""Header: a name that nobody else gives to a request. Who asks again under the same name gets the same answer."""

_encode = msgspec.json.Encoder().encode


class Call(msgspec.Struct):
    """One request, read and checked."""

    service: Service
    request: Request
    caller: Caller
    names: dict[str, str]
    """From the path."""
    query: Any = None
    body: Any = None


class Reply(msgspec.Struct):
    """An answer with another status than the operation's own."""

    status: int
    body: Any


Handle: TypeAlias = Callable[[Call], Awaitable[Any]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    name: str
    """Unique; the OpenAPI operationId."""
    summary: str
    tag: str
    handle: Handle
    scope: Scope = "read"
    is_public: bool = False
    on_standby: bool = False
    body: Any = None
    """The struct that a body is decoded into; None: there is none."""
    body_choices: tuple[Any, ...] = ()
    """Where the body is one of several structs, `handle` decodes it itself."""
    is_body_optional: bool = False
    query: Any = None
    answer: Any = None
    answers: tuple[tuple[int, Any], ...] = ()
    """Successes with another status or another body."""
    status: int = 200
    problems: tuple[int, ...] = ()
    """Beyond those that every operation may give."""
    still_holds: Callable[[Any, Micros], bool] | None = None
    """Where a caller may give its request a name and ask again under it: whether an answer that was kept is still good."""


OPERATIONS: list[Operation] = []
"""Every operation, as the modules with their handlers register them."""


def route(method: str, path: str, summary: str, *, name: str = "", **more: Any) -> Callable[[Handle], Handle]:
    """Registers a handler. Its name and the type of its answer are the operation's, unless other ones are given."""

    def register(handle: Handle) -> Handle:
        answer = more.get("answer") or get_type_hints(handle)["return"]
        fields = {"name": name or handle.__name__, "handle": handle, **more, "answer": answer}
        OPERATIONS.append(Operation(method=method, path=path, summary=summary, **fields))
        return handle

    return register


def place(operation: Operation, service: Service, replays: Replays) -> Place:
    """Everything that can be decided before a request comes is decided here."""
    decode = None if operation.body is None else msgspec.json.Decoder(operation.body).decode
    takes_body = decode is not None or bool(operation.body_choices)
    lists = _list_fields(operation.query)
    handle, query_type, status = operation.handle, operation.query, operation.status

    async def endpoint(request: Request, names: dict[str, str]) -> Response:
        call = Call(service, request, request.scope.get("taskharbor.caller", EVERYBODY), names)
        query = request.scope["query_string"]
        if query_type is not None:
            call.query = decoded_query(query, query_type, lists)
        elif query:
            raise invalid("this path takes no query")
        data = b""
        if takes_body:
            data = await request.body()
            if not data and operation.is_body_optional:
                data = b"{}"
            else:
                check_media_type(request)
            call.body = data if decode is None else decoded(decode, data)
        elif request.headers.get("content-length", "0") != "0":
            raise invalid("this path takes no body")
        given = request.headers.get(REQUEST_NAME) if operation.still_holds is not None else None
        if given is None:
            answer = await handle(call)
        else:
            answer = await _handle_once(operation, call, data, given, replays)
        if isinstance(answer, Reply):
            return Response(_encode(answer.body), answer.status, media_type=JSON)
        return Response(_encode(answer), status, media_type=JSON)

    needs = Needs(operation.scope, operation.is_public, operation.on_standby)
    return Place(operation.method, operation.path, needs, endpoint)


async def _handle_once(operation: Operation, call: Call, data: bytes, given: str, replays: Replays) -> Any:
    """The answer that this very request was given before, where it still holds; else a new one."""
    assert operation.still_holds is not None
    name = request_name(call.caller.name, given)
    assert name is not None
    what = f"{operation.name} (body {hashlib.blake2b(data, digest_size=4).hexdigest()})"
    replay = await replays.once(name, what, lambda: operation.handle(call))
    if replay.is_repeated and not operation.still_holds(replay.answer, call.service.now()):
        replays.forget(name)
        replay = await replays.once(name, what, lambda: operation.handle(call))
    replays.weigh(name, len(_encode(replay.answer)))
    return replay.answer


def check_batch(length: int, most: int) -> None:
    if length > most:
        raise Problem(
            413,
            "too_many_items",
            f"{length} items in one request: at most {most} are accepted",
            hint="send them in several requests",
        )


def check_media_type(request: Request) -> None:
    """A page of another site can post plain text and forms without asking first, but not this."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Problem(
            415,
            "unsupported_media_type",
            "the body must be JSON",
            hint=f"send the header Content-Type: {JSON}",
        )


def decoded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except RecursionError:
        raise Problem(422, "too_deep", "the body is nested too deep") from None
    except UnicodeDecodeError:
        raise Problem(400, "bad_json", "the body is not UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise Problem(400, "bad_json", f"the body is not valid JSON: {error}") from None


def decoded_query(query: bytes, wanted: Any, lists: frozenset[str]) -> Any:
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
