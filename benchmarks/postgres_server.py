"""One PostgreSQL for a whole run of the benchmarks, with its default durability, and a fresh database for every measurement.

A commit waits for the disk (fsync and synchronous_commit are on) as it does where nobody has touched the settings; only
shared_buffers is larger than the default, because everybody raises that one.
"""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from taskharbor_testkit.servers import PostgresServer

_numbers = itertools.count(1)


@functools.cache
def server() -> PostgresServer:
    started = PostgresServer.start(durable=True, settings={"shared_buffers": "512MB"})
    atexit.register(started.close)
    return started


def version_started() -> int | None:
    """None where nobody has needed it."""
    return server().version if server.cache_info().currsize else None


@contextmanager
def fresh_database() -> Iterator[str]:
    """The URL of an empty database, which is gone afterwards."""
    name = f"bench_{next(_numbers)}"
    url = server().create_database(name)
    settle_down()
    try:
        yield url
    finally:
        server().execute(f"drop database {name} with (force)")


def settle_down() -> None:
    """Write out what was changed so far, so that nobody pays for the checkpoint of whoever was measured before."""
    server().execute("checkpoint")
