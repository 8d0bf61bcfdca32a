"""One server for all tests of a process, started by the first that asks.

Fixtures are not everywhere: the conformance kit takes a plain function that returns a URL. Tests that share a server are
kept apart by a schema each.
"""

from __future__ import annotations

import os
import secrets
import threading
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from taskharbor_testkit.servers.address import PostgresAt
from taskharbor_testkit.servers.binaries import find_postgres
from taskharbor_testkit.servers.postgres import PostgresServer

TEST_POSTGRES = "TASKHARBOR_TEST_POSTGRES"

_servers: dict[int, PostgresServer] = {}
_lock = threading.Lock()


def shared_postgres(version: int | None = None) -> PostgresServer:
    """This process's server of that major, or of the newest. Stopped at exit; do not stop it, others are on it."""
    major, _ = find_postgres(version)
    with _lock:
        if major not in _servers:
            _servers[major] = PostgresServer.start(version=major)
        return _servers[major]


def given_or_shared_postgres() -> PostgresAt:
    """The server that TASKHARBOR_TEST_POSTGRES names, or else the shared one."""
    given = os.environ.get(TEST_POSTGRES)
    return PostgresAt(given) if given else shared_postgres()


def with_fresh_schema(url: str) -> str:
    """The URL with a `schema` option that nobody has used. The driver makes the schema; `drop_schema(url)` ends it."""
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if name != "schema"]
    return urlunsplit(parts._replace(query=urlencode([*options, ("schema", f"th_{secrets.token_hex(6)}")])))


def drop_schema(url: str) -> None:
    """Drop the schema that the URL names, with everything in it."""
    from psycopg import sql

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    schema = options.pop("schema")
    server = PostgresAt(urlunsplit(parts._replace(query=urlencode(options))))
    server.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
