"""Options of a `postgresql://host/database?option=value` URL. Parsing does no I/O, so a wrong option is found before any work.

Other options are the client library's (`sslmode`, `target_session_attrs`, `connect_timeout`, ...) and are passed to it as they
are, as is the rest of the URL: several hosts, a service, a socket directory.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
import psycopg
from psycopg import conninfo

from taskharbor.drivers.urls import Reader, seconds, switch, whole
from taskharbor.errors import InvalidRequest

DEFAULT_SCHEMA = "taskharbor"
SILENT = 1
NOTIFYING = 2
"""The mode of a move that may have made something runnable and notifies."""

_HOW = "write it like postgresql://user@host/database"
# A dead connection is silent. Without these options the kernel reports that only after hours.
_KEEPALIVES = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "connect_timeout": "10",
    "application_name": "taskharbor",
}


class PostgresOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a store and the options of its connections."""

    conninfo: str
    place: str
    """Host, port and database for messages, without user and password."""
    schema: str = DEFAULT_SCHEMA
    pool_size: int = 4
    """The most connections of a handle. One more listens while the handle waits for work."""
    pool_timeout: float = 30.0
    """Seconds to wait for a free connection before giving up."""
    notify: bool = True
    """off: no LISTEN and no NOTIFY; waiters look by themselves."""
    poll: float = 0.5
    """Seconds between two looks of a waiter without notifications (notify=off, or the listening connection is down)."""
    prepare: bool = True
    """off: no prepared statements, for poolers in transaction mode that do not know them."""
    migrate: bool = True
    """off: refuse a schema that is missing or old instead of bringing it up to date when the store is opened."""

    @property
    def stir(self) -> int:
        """The mode of a move that may have made something runnable, if it is not throttled."""
        return NOTIFYING if self.notify else SILENT

    @property
    def channel(self) -> str:
        """The channel for waiters."""
        return f"taskharbor:{self.schema}"

    def __repr__(self) -> str:
        return f"PostgresOptions({self.place!r}, schema={self.schema!r})"


def parse_url(url: str) -> PostgresOptions:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres") or not separator:
        raise InvalidRequest(f"that is not a PostgreSQL URL: {_HOW}")
    address, _, query = rest.partition("?")
    own: dict[str, Any] = {}
    others: list[tuple[str, str]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _OWN:
            own[name] = _OWN[name](name, value)
        else:
            others.append((name, value))
    try:
        given = conninfo.conninfo_to_dict(f"postgresql://{address}?{urlencode(others, quote_via=quote)}")
        if "@" in str(given.get("host")) or "@" in address.partition("/")[2]:
            raise psycopg.ProgrammingError("a part of the password was taken for the host or the database")
    except psycopg.ProgrammingError:
        # The library's message would quote the URL, and with it the password.
        names = ", ".join(name for name, _ in others if name.isidentifier()) or "none"
        raise InvalidRequest(
            f"the PostgreSQL URL cannot be understood (options given: {names}); {_HOW}, special characters as %xx; "
            f"TaskHarbor's own options are {', '.join(_OWN)}"
        ) from None
    place = f"{given.get('host') or 'local'}:{given.get('port') or 5432}/{given.get('dbname') or ''}"
    # Texts of jobs have any alphabet, whatever the environment of this process says.
    merged: dict[str, Any] = {**_KEEPALIVES, **given, "client_encoding": "utf8"}
    return PostgresOptions(conninfo=conninfo.make_conninfo(**merged), place=place, **own)


def _schema(name: str, value: str) -> str:
    if not value or "\0" in value or len(value.encode()) > 63 - len("taskharbor:"):
        raise InvalidRequest(f"{name}={value!r}: a schema has a name of 1 to 52 bytes")
    if value.startswith("pg_"):
        raise InvalidRequest(f"{name}={value!r}: names that begin with pg_ belong to PostgreSQL")
    return value


_OWN: dict[str, Reader] = {
    "schema": _schema,
    "pool_size": whole(1, 1000),
    "pool_timeout": seconds,
    "notify": switch,
    "poll": seconds,
    "prepare": switch,
    "migrate": switch,
}
