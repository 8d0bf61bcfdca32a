"""Real servers for tests and benchmarks, started from installed programs or wheels, and gone when their owner is.

    with PostgresServer.start() as server, FaultProxy.to(server.url) as proxy:
        harbor = Harbor(proxy.url_for(server.url))
        proxy.cut()

A double would only repeat what its author believes of PostgreSQL; these answer, refuse, crash and fail over like the
real thing, because they are. POSIX only.

`discovery` finds programs; `process` runs them, and `reaper` ends them after a crash of the tests. `postgres` (with PgBouncer),
`redis`, `redis_groups` (Cluster, Sentinel), `s3` (with `s3_program`) and `broker` (our own) are the servers. `proxy` stands
between a client and a server, and reads what passes by `protocols`.
"""

from taskharbor_testkit.servers.discovery import ServerMissing, postgres_versions
from taskharbor_testkit.servers.postgres import (
    PgBouncer,
    PostgresAt,
    PostgresServer,
    drop_schema,
    given_or_shared_postgres,
    shared_postgres,
    with_fresh_schema,
)
from taskharbor_testkit.servers.proxy import FaultProxy
from taskharbor_testkit.servers.redis import (
    RedisAt,
    RedisServer,
    drop_prefix,
    given_or_shared_redis,
    shared_redis,
    with_fresh_prefix,
)
from taskharbor_testkit.servers.redis_groups import RedisCluster, RedisSentinels, shared_redis_cluster

__all__ = [
    "FaultProxy",
    "PgBouncer",
    "PostgresAt",
    "PostgresServer",
    "RedisAt",
    "RedisCluster",
    "RedisSentinels",
    "RedisServer",
    "ServerMissing",
    "drop_prefix",
    "drop_schema",
    "given_or_shared_postgres",
    "given_or_shared_redis",
    "postgres_versions",
    "shared_postgres",
    "shared_redis",
    "shared_redis_cluster",
    "with_fresh_prefix",
    "with_fresh_schema",
]
