"""Which handler answers a path, and what a caller needs for it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from taskharbor.broker.problems import Problem
from taskharbor.drivers.operations import Scope as TokenScope

_FOUND = "taskharbor.found"

Endpoint: TypeAlias = Callable[[Request, dict[str, str]], Awaitable[Response]]
"""A request and the names in its path -> the answer."""


class Needs(msgspec.Struct, frozen=True):
    """What must be true before a handler runs."""

    scope: TokenScope = "read"
    is_public: bool = False
    """Answered to anybody, without a token, and while stopping."""
    on_standby: bool = False
    """Answered by a broker that does not lead."""


class Place(msgspec.Struct, frozen=True):
    """One method of one path. `{name}` in the path stands for one part of it."""

    method: str
    path: str
    needs: Needs
    endpoint: Endpoint


class Routes:
    """Plain paths by one look-up; those with names in them one after the other."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._plain: dict[str, dict[str, Place]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Place]]] = []
        by_path: dict[str, dict[str, Place]] = {}
        for place in places:
            by_path.setdefault(place.path, {})[place.method] = place
        for path, methods in by_path.items():
            if "{" in path:
                pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
                self._patterns.append((pattern, methods))
            else:
                self._plain[path] = methods

    def find(self, scope: Scope) -> Needs:
        """What the request needs; its place is remembered in the scope. Raises where there is none."""
        found = scope[_FOUND] = self._find(scope["method"], scope)
        return found[0].needs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, names = scope[_FOUND]
        response = await place.endpoint(Request(scope, receive), names)
        await response(scope, receive, send)

    def _find(self, method: str, scope: Scope) -> tuple[Place, dict[str, str]]:
        names: dict[str, str] = {}
        methods = self._plain.get(scope["path"])
        if methods is None:
            # As it was sent: a slash within a name is %2F there, and a plain one in the path that was decoded.
            raw = scope.get("raw_path")
            path = scope["path"] if raw is None else raw.decode("latin-1")
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match is not None:
                    methods = candidates
                    names = match.groupdict() if raw is None else _unquoted(match.groupdict())
                    break
            else:
                raise _not_found()
        place = methods.get("GET" if method == "HEAD" else method)
        if place is None:
            raise _not_allowed(methods)
        return place, names


def _unquoted(names: dict[str, str]) -> dict[str, str]:
    try:
        return {name: unquote(value, errors="strict") for name, value in names.items()}
    except UnicodeDecodeError:
        raise Problem(422, "invalid_request", "the path is not percent-encoded UTF-8") from None


def _not_found() -> Problem:
    return Problem(
        404, "no_such_path", "there is nothing at this path", hint="GET /openapi.json lists what there is"
    )


def _not_allowed(methods: Mapping[str, Place]) -> Problem:
    allowed = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
    return Problem(405, "method_not_allowed", f"this path takes {allowed}", headers={"Allow": allowed})
