"""Options of an `https://token@broker:7433` URL. Parsing does no I/O, so a wrong option is found before any work."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

import msgspec

from taskharbor.drivers.urls import Reader, read_options, seconds, some_text
from taskharbor.errors import InvalidRequest

TOKEN = "TASKHARBOR_TOKEN"
"""Environment variable with the token, as an alternative to a token in the URL."""

_ADDRESS = re.compile(r"(\[[^]]{2,}\]|[^][:@ \\]+)(:(?P<port>\d*))?")
_HOW = "http://127.0.0.1:7433, https://token@jobs.example.com or http://one:7433,two:7433"


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
