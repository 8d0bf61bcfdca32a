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

from taskharbor.broker.config import Rates, Shares
from taskharbor.broker.error_responses import Problem, invalid, not_leader, problem_of
from taskharbor.broker.request_response import ClientGone, Exchange, too_large
from taskharbor.broker.runtime import Service
from taskharbor.broker.tokens import Caller, find_caller
from taskharbor.drivers.operations import Scope as TokenScope
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.printable import printable
from taskharbor.worker.logs import log_trace

log = logging.getLogger("taskharbor.broker")
access = logging.getLogger("taskharbor.broker.access")

# The key in the ASGI scope under which a handler finds the `Caller`.
CALLER = "taskharbor.caller"
# The key in the ASGI scope of the server's function that cuts the connection.
ABORT = "taskharbor.abort"

# The largest body of a call that carries no jobs. A list of very many short names takes far more memory than its bytes.
MOST_SMALL_BYTES = 4 * 1_048_576
LINES_PER_SECOND = 10.0
# Lines of the log about refused requests and failures: anybody can cause them.
LINES_AT_ONCE = 200.0
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
WRONG_TOKENS_PER_SECOND = 5.0
WRONG_TOKENS_AT_ONCE = 20.0
_WRONG_TOKEN = (
    "send Authorization: Bearer SECRET, with the part after the last colon of a line in the broker's token file; "
    "a changed file counts after a restart"
)

# Values of headers that come twice: another program may have used either of the two.
_IF_TWICE = {b"host": b"", b"origin": b"null", b"authorization": b""}

# A function of a request and the names in its path that returns the answer.
Endpoint: TypeAlias = Callable[[Request, dict[str, str]], Awaitable[Response]]


class ServedPath(msgspec.Struct, frozen=True):
    """One method of one path, and the conditions for its endpoint. `{name}` in the path stands for one part of it.

    Attributes:
        is_public: Answered to anybody, without a token, and while stopping.
        on_standby: Answered by a broker that does not lead.
    """

    method: str
    path: str
    scope: TokenScope = "read"
    is_public: bool = False
    on_standby: bool = False


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
        self._lines = Rates(LINES_PER_SECOND, LINES_AT_ONCE)
        # Lines that were left out of the log since the last one.
        self._left_out = 0
        has_tokens = bool(config.tokens)
        self._under_way = Shares.of_tokens(config.max_requests, has_tokens)
        self._bytes = Shares.of_tokens(config.max_held_bytes, has_tokens)

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
        exchange = Exchange(receive, send, self._config, scope.get(ABORT))
        began = time.perf_counter()
        try:
            endpoint, names = self._admit(scope, exchange)
            response = await endpoint(Request(scope, exchange.receive), names)
            # A change has taken effect, so its answer is given in any case.
            exchange.hold(len(response.body), may_refuse=exchange.is_reading)
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
            kind, said = type(error).__name__, "%s in %s %s"
            if self._may_log():
                log_trace(
                    log, logging.ERROR, said, kind, scope["method"], printable(scope["path"]), trace=trace
                )
            await exchange.give(self._problem(error))
        finally:
            exchange.release()
        if self._config.access_log and ((exchange.status or 500) < 400 or self._may_log()):
            self._log_access(scope, exchange.status, time.perf_counter() - began)

    def _may_log(self) -> bool:
        """Return False if lines that strangers can cause come too quickly."""
        if self._lines.take(""):
            self._left_out += 1
            return False
        if self._left_out:
            log.warning("%d lines about refused requests or failures were left out", self._left_out)
            self._left_out = 0
        return True

    def _problem(self, error: Exception) -> Problem:
        leads = self.service.leads
        if leads is not None and isinstance(error, BackendUnavailable):
            if not leads.is_leader:
                return not_leader(self.service.leader_url)
            leads.look_now()
        return problem_of(error if isinstance(error, TaskHarborError) else TaskHarborError())

    def _admit(self, scope: Scope, exchange: Exchange) -> tuple[Endpoint, dict[str, str]]:
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
            self._limit(caller, exchange)
            if served.scope not in caller.scopes:
                hint = f"use a token with the scope {' or '.join(dict.fromkeys((served.scope, 'admin')))}"
                raise Problem("forbidden", f"the token {caller.name} has no scope {served.scope}", hint=hint)
            if not served.on_standby and not self.service.is_leading:
                raise not_leader(self.service.leader_url)
        exchange.is_reading = served.scope == "read"
        most = self._config.max_body_bytes
        if served.scope in ("read", "admin"):
            most = min(most, MOST_SMALL_BYTES)
        exchange.most_bytes = most
        if length is not None and (not length.isdigit() or int(length[:20]) > most):
            raise too_large(most)
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

    def _limit(self, caller: Caller, exchange: Exchange) -> None:
        if self._rates is not None and (pause := self._rates.take(caller.name)):
            detail = f"the token {caller.name} has used up its {self._config.rate:g} requests per second"
            hint = "send more jobs per request, and fewer requests"
            raise Problem("rate_limited", detail, hint=hint, retry_after=pause)
        if self.service.stopping.is_set():
            raise Problem("stopping", "this broker is stopping", retry_after=1, Connection="close")
        if not self._under_way.take(caller.name):
            detail = f"too many requests of the token {caller.name}, or of all tokens, are under way already"
            raise Problem("too_many_requests", detail, retry_after=1)
        exchange.begin(caller.name, self._under_way, self._bytes)

    def _log_access(self, scope: Scope, status: int | None, seconds: float) -> None:
        caller: Caller | None = scope.get(CALLER)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        access.info(
            "%s %s%s %s %.1f ms %s",
            scope["method"],
            printable(scope["path"]),
            f"?{printable('&'.join(name for name, _ in query))}" if query else "",
            status or "gone",
            seconds * 1000,
            caller.name if caller else "-",
        )


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
