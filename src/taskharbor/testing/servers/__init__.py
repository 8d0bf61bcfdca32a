"""Real servers for tests and benchmarks, started from what is installed and gone when their owner is.

    with PostgresServer.start() as server, Cable.to(server.url) as cable:
        harbor = Harbor(cable.url_for(server.url))
        cable.cut()

A double would only repeat what its author believes of PostgreSQL; these answer, refuse, crash and fail over like the
real thing, because they are. POSIX only.
"""

from taskharbor.testing.servers.address import PostgresAt
from taskharbor.testing.servers.binaries import ServerMissing, postgres_versions
from taskharbor.testing.servers.cable import Cable
from taskharbor.testing.servers.pgbouncer import PgBouncer
from taskharbor.testing.servers.postgres import PostgresServer
from taskharbor.testing.servers.process import ServerFailed
from taskharbor.testing.servers.shared import (
    drop_schema,
    given_or_shared_postgres,
    shared_postgres,
    with_fresh_schema,
)

__all__ = [
    "Cable",
    "PgBouncer",
    "PostgresAt",
    "PostgresServer",
    "ServerFailed",
    "ServerMissing",
    "drop_schema",
    "given_or_shared_postgres",
    "postgres_versions",
    "shared_postgres",
    "with_fresh_schema",
]
