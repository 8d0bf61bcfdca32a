"""The Redis driver: `redis://host:6379/0`. Needs the extra `taskharbor[redis]`.

In the order in which a call passes through them:

- `options`: reads the URL.
- `driver`: the contract, notifications for waiters, and advice on the servers' settings.
- `enqueue`, `leases`, `operate`, `log`: one module per kind of call.
- `records`: stored jobs as records.
- `store`: the keys of queues, calls whose answer was lost, sentinels and clusters.
- `connection`: one server and the connections to it, by redis-py.
- `library` and `lua/`: the functions that run on the server.
- `errors`: TaskHarbor's errors for the errors of Redis.
"""

from taskharbor.drivers.redis.driver import RedisDriver

__all__ = ["RedisDriver"]
