"""Sends one call to a broker: options of the URL, open connections, repeated tries, and the leader among several brokers.

A call without an answer may have taken effect. It is repeated under the same name, so a broker that has carried it out gives the
same answer again.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import aiohttp
import msgspec
from yarl import URL

from taskharbor import errors
from taskharbor.drivers.broker_protocol import HEARD, LEADER, MSGPACK, PATH, REQUEST_ID, encode, read_answer
from taskharbor.drivers.operations import Operation
from taskharbor.drivers.urls import Reader, read_options, seconds, some_text
from taskharbor.errors import BackendUnavailable, Forbidden, InvalidRequest, SchemaMismatch, TaskHarborError

TOKEN = "TASKHARBOR_TOKEN"
"""Environment variable with the token, as an alternative to a token in the URL."""

_ADDRESS = re.compile(r"(\[[^]]{2,}\]|[^][:@ \\]+)(:(?P<port>\d*))?")
_HOW = "http://127.0.0.1:7433, https://token@jobs.example.com or http://one:7433,two:7433"

LONGEST_PAUSE = 5.0


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of brokers and the options of connections."""

    bases: tuple[str, ...]
    """The addresses of the brokers, without a path: `http://host:7433`."""
    place: str
    """The addresses for messages, without the token."""
    token: str | None = None
    ca: str | None = None
    """File with the certificates of the authorities that the client trusts; without it, the system's."""
    timeout: float = 30.0
    """Seconds after which a call without an answer counts as lost."""
    connect_timeout: float = 5.0

    def __repr__(self) -> str:
        return f"HttpOptions({self.place!r})"


def parse_url(url: str) -> HttpOptions:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise _not_understood()
    if "#" in rest:
        raise InvalidRequest("the URL of a broker has no part after #: write a # in a token as %23")
    address, _, query = rest.partition("?")
    account, _, place = address.rpartition("@")
    hosts, _, path = place.partition("/")
    own = read_options(query, _OWN, "broker")
    if "ca" in own and scheme == "http":
        raise InvalidRequest("ca needs https://, which uses TLS")
    path = path.rstrip("/")
    addresses = [_address(host) for host in hosts.split(",")]
    if ":" in account:
        # Not quoted, because a part of it is a secret.
        raise InvalidRequest("a broker wants a token and no user: write https://token@host, with : as %3A")
    token = unquote(account) or os.environ.get(TOKEN) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidRequest(f"the token for {','.join(addresses)} has characters that no token has")
    bases = [f"{scheme}://{host}/{path}".rstrip("/") for host in addresses]
    return msgspec.convert(own | {"bases": bases, "place": ",".join(addresses), "token": token}, HttpOptions)


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise _not_understood()
    return text.removesuffix(":")


def _not_understood() -> InvalidRequest:
    # The URL may hold a token that was not escaped, so it is not quoted.
    return InvalidRequest(
        f"the URL of the broker cannot be understood: write it like {_HOW}, special characters as %xx"
    )


_OWN: dict[str, Reader] = {"ca": some_text, "timeout": seconds, "connect_timeout": seconds}


@dataclass(eq=False)
class NoAnswer(Exception):
    """This broker did not answer the call. Another may, or this one on another connection or after a pause."""

    reason: str
    leader: str | None = None
    """The broker that can answer, if it is known."""
    is_leaderless: bool = False
    """True if no broker leads at the moment, as far as this one knows."""
    pause: float | None = None
    """The seconds after which this broker will answer."""
    is_cut: bool = False
    """True if the connection broke after the call may have reached the broker."""


_read = msgspec.json.Decoder(dict[str, Any]).decode


def refusal(
    base: str, status: int, headers: Mapping[str, str], body: bytes, *, has_token: bool = False
) -> Exception:
    """Return `NoAnswer`, or the error for the caller. `has_token`: a token was sent."""
    try:
        document = _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not every server on the way gives a document.
        document = {}
    code, detail, hint = (str(document.get(name, "")) for name in ("code", "detail", "hint"))
    said = f"{detail} ({hint})" if hint and detail else detail or f"status {status}"
    if status == 421:
        if code == "not_leader":
            leader = headers.get(LEADER)
            return NoAnswer(said, leader, is_leaderless=leader is None)
        return InvalidRequest(f"the broker {base} refuses the call: {said}")
    if status == 429:
        return NoAnswer(f"the broker {base} refuses the call: {said}", pause=_pause(headers))
    if status == 401:
        wrong = f"wants a token and got none: put it into the URL (https://token@host) or into {TOKEN}"
        if has_token:
            check = f"check the one in the URL or in {TOKEN} against the broker's token file"
            wrong = f"refuses the token, which is not one of its own: {check}"
        return InvalidRequest(f"the broker {base} {wrong}")
    if status == 403:
        return Forbidden(f"the broker {base} forbids the call: {said}")
    if status == 404 and code in ("", "no_such_path"):
        return InvalidRequest(
            f"{base} is no broker, or one of another version: start `taskharbor broker` there, of the version that is used here"
        )
    if code == "job_damaged":
        return errors.JobDamaged(detail)
    if code == "schema_mismatch":
        return SchemaMismatch(f"the broker {base}: {said}")
    if status in (400, 408, 409, 413, 415, 422):
        # The driver's message about bad input is passed on unchanged.
        return InvalidRequest(detail if code == "invalid_request" else f"broker {base}: {said}")
    if status >= 500:
        return NoAnswer(f"{base}: {said}")
    return TaskHarborError(f"the broker {base} gave an answer that nobody understands: {said}")


def _pause(headers: Mapping[str, str]) -> float:
    try:
        return min(max(float(headers.get("Retry-After", "1")), 0.05), LONGEST_PAUSE)
    except ValueError:
        return 1.0


A = TypeVar("A")

_MOST_MOVES = 3
"""The most changes of the leader that one call follows."""
_MOST_PAUSES = 3
_ELECTION_PAUSES = (0.1, 0.4, 1.0)
"""Seconds before all brokers are asked again, if they answer but none leads. A broker that has just started leads in a moment."""
_MOST_HEARD = 32
_LARGE = 1 << 20
_KEEP_ALIVE = 60.0


@lru_cache
def _url(base: str, operation: str) -> URL:
    return URL(f"{base}{PATH}{operation}")


class Brokers:
    """One handle's connections. Used from one event loop."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._current = options.bases[0]
        """The broker that answered last: the leader, if there is one."""
        self._name = secrets.token_hex(8)
        self._numbers = count()
        self._heard: list[str] = []
        """Names of calls whose answers have arrived. No broker has been told yet."""

    async def open(self) -> None:
        if self._session is not None:
            return
        headers = {"Content-Type": MSGPACK}
        if self._options.token is not None:
            headers["Authorization"] = f"Bearer {self._options.token}"
        is_secret = self._options.bases[0].startswith("https:")
        try:
            tls = ssl.create_default_context(cafile=self._options.ca) if is_secret else True
        except OSError as error:
            raise InvalidRequest(f"ca={self._options.ca}: cannot be read as certificates ({error})") from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # A caller that makes many calls at once wants them under way at once.
                limit=0,
                keepalive_timeout=_KEEP_ALIVE,
                ssl=tls,
            ),
            headers=headers,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def not_open(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"the driver for {self._options.place} is not open: await open() first, or use `async with`"
        )

    def new_name(self) -> str:
        """Return a name for a call that may be repeated."""
        return f"{self._name}-{next(self._numbers):x}"

    async def ask(
        self, call: Operation[A], body: bytes | None = None, *, name: str | None = None, patience: float = 0.0
    ) -> A:
        """The answer of the first broker that gives one. `patience`: seconds that the broker may take on purpose.

        `body`: the call, encoded already.
        """
        if self._session is None:
            raise self.not_open()
        data = encode(call) if body is None else body
        headers: dict[str, str] | None = None
        if call.changes:
            headers = {REQUEST_ID: name or self.new_name()}
            if self._heard:
                headers[HEARD] = " ".join(self._heard)
                self._heard.clear()
        answer = await self._somewhere(partial(self._send, self._session, call.name, data, headers, patience))
        if headers is not None and len(self._heard) < _MOST_HEARD:
            self._heard.append(headers[REQUEST_ID])
        try:
            return cast("A", read_answer(call, answer))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequest(
                f"the broker at {self._current} answers in another way: use the same version of TaskHarbor at both ends"
            ) from None

    async def _somewhere(self, send: Callable[[str], Awaitable[bytes]]) -> bytes:
        """Try each broker once. A broken connection, or a broker that names a leader, gives one more try."""
        bases, base = self._options.bases, self._current
        untried = [other for other in bases if other != base]
        moves = pauses = elections = 0
        is_reconnected = is_leaderless = False
        reasons: list[str] = []
        while True:
            try:
                answer = await send(base)
            except NoAnswer as no:
                if no.pause is not None:
                    pauses += 1
                    if pauses > _MOST_PAUSES:
                        raise BackendUnavailable(no.reason) from None
                    await asyncio.sleep(no.pause)
                    continue
                reasons.append(no.reason)
                if no.is_cut and not is_reconnected:
                    # A broker may close an idle connection at the moment at which it is used again.
                    is_reconnected = True
                    continue
                is_leaderless |= no.is_leaderless
                if no.leader is not None and moves < _MOST_MOVES:
                    leader = self._checked(no.leader)
                    if leader != base:
                        moves += 1
                        base = leader
                        continue
            else:
                self._current = base
                return answer
            untried = [other for other in untried if other != base]
            if not untried and is_leaderless and elections < len(_ELECTION_PAUSES):
                await asyncio.sleep(_ELECTION_PAUSES[elections])
                elections += 1
                is_leaderless = False
                reasons.clear()
                untried = list(bases)
            if not untried:
                # The next call begins with another broker.
                self._current = bases[(bases.index(base) + 1) % len(bases)] if base in bases else bases[0]
                told = "; ".join(dict.fromkeys(reasons))
                raise BackendUnavailable(f"no broker answers at {self._options.place}: {told}")
            base = untried.pop(0)

    def _checked(self, leader: str) -> str:
        """Check the address of a leader before the token is sent there: never over an unencrypted connection if the URL was
        encrypted."""
        leader = leader.rstrip("/")
        scheme = self._options.bases[0].partition(":")[0]
        if leader.partition("://")[0] != scheme:
            raise InvalidRequest(
                f"the leader is said to be at {leader}, but {scheme}:// was asked for: start all brokers with --advertise {scheme}://..."
            )
        return leader

    async def _send(
        self,
        session: aiohttp.ClientSession,
        operation: str,
        body: bytes,
        headers: dict[str, str] | None,
        patience: float,
        base: str,
    ) -> bytes:
        options = self._options
        seconds = options.timeout + patience
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=options.connect_timeout)
        try:
            async with session.post(
                _url(base, operation),
                data=body if len(body) < _LARGE else io.BytesIO(body),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        except aiohttp.ClientConnectorCertificateError as error:
            raise BackendUnavailable(
                f"nobody vouches for the broker {base} ({error.certificate_error}): "
                "give the file with its authority's certificate as ?ca=/path/to/ca.pem"
            ) from None
        except aiohttp.ClientConnectorSSLError as error:
            reason = f"no TLS there ({_why(error)}); a broker without a certificate is at http://"
            raise NoAnswer(f"{base}: {reason}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NoAnswer(f"{base}: {_why(error)}") from None
        except TimeoutError:
            raise NoAnswer(f"{base}: no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{base}: {_why(error)}", is_cut=True) from None
        if response.status == 200:
            return answer
        has_token = options.token is not None
        raise refusal(base, response.status, response.headers, answer, has_token=has_token)


def _why(error: BaseException) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before the answer came"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was cut in the middle of the answer"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
