"""Real servers for tests and benchmarks, started from what is installed and gone when their owner is.

    with PostgresServer.start() as server, Cable.to(server.url) as cable:
        harbor = Harbor(cable.url_for(server.url))
        cable.cut()

A double would only repeat what its author believes of PostgreSQL; these answer, refuse, crash and fail over like the
real thing, because they are. POSIX only.
"""

from taskharbor_testkit.servers.address import PostgresAt
from taskharbor_testkit.servers.binaries import ServerMissing, postgres_versions
from taskharbor_testkit.servers.cable import Cable
from taskharbor_testkit.servers.pgbouncer import PgBouncer
from taskharbor_testkit.servers.postgres import PostgresServer
from taskharbor_testkit.servers.process import ServerFailed
from taskharbor_testkit.servers.redis import RedisServer
from taskharbor_testkit.servers.redis_address import RedisAt
from taskharbor_testkit.servers.redis_binaries import find_redis, redis_versions
from taskharbor_testkit.servers.redis_cluster import RedisCluster
from taskharbor_testkit.servers.redis_sentinel import RedisSentinels
from taskharbor_testkit.servers.redis_shared import (
    drop_prefix,
    given_or_shared_redis,
    shared_redis,
    shared_redis_cluster,
    with_fresh_prefix,
)
from taskharbor_testkit.servers.shared import (
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
    "RedisAt",
    "RedisCluster",
    "RedisSentinels",
    "RedisServer",
    "ServerFailed",
    "ServerMissing",
    "drop_prefix",
    "drop_schema",
    "find_redis",
    "given_or_shared_postgres",
    "given_or_shared_redis",
    "postgres_versions",
    "redis_versions",
    "shared_postgres",
    "shared_redis",
    "shared_redis_cluster",
    "with_fresh_prefix",
    "with_fresh_schema",
]
