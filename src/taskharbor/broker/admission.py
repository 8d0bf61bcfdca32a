"""Takes a request to its handler: the checks before it, the handler of its path, and the answer.

One pass over the headers, before the body is read, checks host, origin, caller and scopes, rate, leadership, and the number of
calls under way. The body is counted while it is read, so a body that is too large is refused before it is in memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from taskharbor.broker.error_responses import Problem, invalid, not_leader, problem_of
from taskharbor.broker.request_response import ClientGone, Exchange, too_large
from taskharbor.broker.runtime import Service
from taskharbor.broker.tokens import Caller, find_caller
from taskharbor.drivers.operations import Scope as TokenScope
from taskharbor.errors import BackendUnavailable, TaskHarborError

log = logging.getLogger("taskharbor.broker")
access = logging.getLogger("taskharbor.broker.access")

CALLER = "taskharbor.caller"
"""The key in the ASGI scope under which a handler finds the `Caller`."""

KEPT_BUCKETS = 10_000
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
WRONG_TOKENS_PER_SECOND = 5.0
WRONG_TOKENS_AT_ONCE = 20.0
_WRONG_TOKEN = (
    "send Authorization: Bearer SECRET, with the part after the last colon of a line in the broker's token file; "
    "a changed file counts after a restart"
)

_IF_TWICE = {b"host": b"", b"origin": b"null", b"authorization": b""}
"""Values of headers that come twice: another program may have used either of the two."""

Endpoint: TypeAlias = Callable[[Request, dict[str, str]], Awaitable[Response]]
"""A function of a request and the names in its path that returns the answer."""


class ServedPath(msgspec.Struct, frozen=True):
    """One method of one path, and the conditions for its endpoint. `{name}` in the path stands for one part of it."""

    method: str
    path: str
    scope: TokenScope = "read"
    is_public: bool = False
    """Answered to anybody, without a token, and while stopping."""
    on_standby: bool = False
    """Answered by a broker that does not lead."""


class BrokerApp:
    """The broker as an ASGI application, which never answers with an exception.

    `service` is what runs inside; the server starts and ends it by the lifespan protocol.
    """

    def __init__(self, paths: Iterable[tuple[ServedPath, Endpoint]], service: Service) -> None:
        config = service.config
        self._routes = Routes(paths)
        self.service = service
        self._config = config
        self._hosts = host_names((*config.host_names, urlsplit(config.advertise or "").hostname or ""))
        self._rates = None if config.rate is None else Rates(config.rate, config.burst or 2 * config.rate)
        self._wrong_tokens = Rates(WRONG_TOKENS_PER_SECOND, WRONG_TOKENS_AT_ONCE)
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
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

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(receive, send, self._config)
        began = time.perf_counter()
        self._under_way += 1
        try:
            endpoint, names = self._admit(scope)
            response = await endpoint(Request(scope, exchange.receive), names)
            await response(scope, exchange.receive, exchange.send)
        except Problem as problem:
            await exchange.give(problem)
        except TaskHarborError as error:
            await exchange.give(self._problem(error))
        except ClientGone:
            pass
        except Exception as error:
            # Only kind and place: a message may repeat values of the request.
            trace = "".join(traceback.format_tb(error.__traceback__))
            kind, path = type(error).__name__, _printable(scope["path"])
            log.error("%s in %s %s\n%s", kind, scope["method"], path, trace)
            await exchange.give(self._problem(error))
        finally:
            self._under_way -= 1
        if self._config.access_log:
            self._log_access(scope, exchange.status, time.perf_counter() - began)

    def _problem(self, error: Exception) -> Problem:
        leads = self.service.leads
        if leads is not None and isinstance(error, BackendUnavailable):
            if not leads.is_leader:
                return not_leader(self.service.leader_url)
            leads.look_now()
        return problem_of(error if isinstance(error, TaskHarborError) else TaskHarborError())

    def _admit(self, scope: Scope) -> tuple[Endpoint, dict[str, str]]:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers[name] = _IF_TWICE.get(name, value) if name in headers else value
        host, origin, authorization = map(headers.get, _IF_TWICE)
        length = headers.get(b"content-length")
        server = scope.get("server")
        if not is_known_host(host, self._hosts, server[0] if server else None):
            raise Problem("unknown_host", "the Host header names a host that this broker does not know")
        is_change = scope["method"] not in SAFE_METHODS
        if is_change and origin is not None and not is_same_origin(origin, host or b""):
            raise Problem("bad_origin", "a page of another origin sent this request")
        (served, endpoint), names = self._routes.find(scope)
        if not served.is_public:
            caller = self._authenticate(scope, authorization)
            scope[CALLER] = caller
            self._limit(caller)
            if served.scope not in caller.scopes:
                hint = f"use a token with the scope {' or '.join(dict.fromkeys((served.scope, 'admin')))}"
                raise Problem("forbidden", f"the token {caller.name} has no scope {served.scope}", hint=hint)
            if not served.on_standby and not self.service.is_leading:
                raise not_leader(self.service.leader_url)
        if length is not None and (not length.isdigit() or int(length[:20]) > self._config.max_body_bytes):
            raise too_large(self._config.max_body_bytes)
        return endpoint, names

    def _authenticate(self, scope: Scope, authorization: bytes | None) -> Caller:
        caller = find_caller(self._config.tokens, authorization)
        if caller is not None:
            return caller
        client = scope.get("client")
        pause = self._wrong_tokens.take(client[0] if client else "") if authorization is not None else 0.0
        if pause:
            raise Problem("rate_limited", "too many wrong tokens came from this address", retry_after=pause)
        wrong, hint = "no token was sent", ""
        if authorization is not None:
            wrong, hint = "the token is not one of this broker's", _WRONG_TOKEN
        raise Problem("unauthenticated", wrong, hint=hint, WWW_Authenticate='Bearer realm="taskharbor"')

    def _limit(self, caller: Caller) -> None:
        if self._rates is not None and (pause := self._rates.take(caller.name)):
            detail = f"the token {caller.name} has used up its {self._config.rate:g} requests per second"
            hint = "send more jobs per request, and fewer requests"
            raise Problem("rate_limited", detail, hint=hint, retry_after=pause)
        if self.service.stopping.is_set():
            raise Problem("stopping", "this broker is stopping", retry_after=1, Connection="close")
        if self._under_way > self._config.max_requests:
            detail = f"{self._config.max_requests} requests are under way already"
            raise Problem("too_many_requests", detail, retry_after=1)

    def _log_access(self, scope: Scope, status: int | None, seconds: float) -> None:
        caller: Caller | None = scope.get(CALLER)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        access.info(
            "%s %s%s %s %.1f ms %s",
            scope["method"],
            _printable(scope["path"]),
            f"?{_printable('&'.join(name for name, _ in query))}" if query else "",
            status or "gone",
            seconds * 1000,
            caller.name if caller else "-",
        )


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


# -- rates: how often somebody may call ---------------------------------------------------------------------


class Rates:
    """A token bucket for each name, which fills at a steady rate and holds a burst. Anybody can invent names, so their number is
    bounded: the oldest are forgotten."""

    def __init__(self, rate: float, burst: float, time: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._time = time
        self._buckets: dict[str, tuple[float, float]] = {}
        """The tokens that are left in each bucket, and since when."""

    def take(self, name: str) -> float:
        """Take one token. Returns 0 if there was one, else the seconds until there is."""
        now = self._time()
        if name not in self._buckets and len(self._buckets) >= KEPT_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        is_there = left >= 1
        self._buckets[name] = (left - 1 if is_there else left, now)
        return 0.0 if is_there else (1 - left) / self._rate


# -- hosts: whether a request means this broker, and whether a foreign page sent it -------------------------
# A browser on the broker's machine can reach loopback. A page that made its own name resolve to 127.0.0.1 shows itself by the
# Host header, one that posts across sites by the Origin header.

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def split_host(text: str) -> tuple[str, str]:
    """`name:port`, `[::1]:port` or either without the port; the name in lower case, without brackets or a final dot."""
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        return name.lower(), rest.removeprefix(":")
    name, _, port = text.partition(":")
    return name.lower().removesuffix("."), port


class Routes:
    """The table of paths. A plain path is found by one look-up; paths with names are tried one after the other."""

    def __init__(self, paths: Iterable[tuple[ServedPath, Endpoint]]) -> None:
        by_path: dict[str, dict[str, tuple[ServedPath, Endpoint]]] = {}
        for served, endpoint in paths:
            by_path.setdefault(served.path, {})[served.method] = (served, endpoint)
        self._plain = {path: methods for path, methods in by_path.items() if "{" not in path}
        self._patterns = [
            (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), methods)
            for path, methods in by_path.items()
            if "{" in path
        ]

    def find(self, scope: Scope) -> tuple[tuple[ServedPath, Endpoint], dict[str, str]]:
        """Return the path that serves a request, and the names in it. Raises `Problem` if there is none."""
        names: dict[str, str] = {}
        methods = self._plain.get(scope["path"])
        if methods is None:
            # The path as it was sent: a slash within a name is %2F there, and a plain slash in the decoded path.
            raw = scope.get("raw_path")
            path = scope["path"] if raw is None else raw.decode("latin-1")
            for pattern, candidates in self._patterns:
                if (match := pattern.fullmatch(path)) is not None:
                    methods = candidates
                    names = match.groupdict() if raw is None else _unquoted(match.groupdict())
                    break
            else:
                raise Problem("no_such_path", "there is nothing at this path")
        served = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if served is None:
            allowed = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
            raise Problem("method_not_allowed", f"this path takes {allowed}", Allow=allowed)
        return served, names


def _unquoted(names: dict[str, str]) -> dict[str, str]:
    try:
        return {name: unquote(value, errors="strict") for name, value in names.items()}
    except UnicodeDecodeError:
        raise invalid("the path is not percent-encoded UTF-8") from None


def host_names(names: Iterable[str]) -> frozenset[str]:
    """Return the names under which clients may know this broker: these, and those of loopback."""
    return LOOPBACK_NAMES | {name.lower().strip("[]").removesuffix(".") for name in names if name}


def is_known_host(header: bytes | None, names: frozenset[str], local_address: str | None) -> bool:
    """Return True if the Host header has one of these names or `local_address`, the address that the client connected to. A web
    page cannot give itself a plain address as its name."""
    name, _ = split_host((header or b"").decode("latin-1"))
    return name in names or name == local_address


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Return True if a page of the host sent the request. `null` and unreadable origins are not."""
    scheme, _, rest = origin.decode("latin-1").partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None:
        return False
    name, given = split_host(rest)
    host_name, host_port = split_host(host.decode("latin-1"))
    return name == host_name and (given or port) == (host_port or port)
