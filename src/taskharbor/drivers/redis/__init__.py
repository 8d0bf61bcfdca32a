"""The Redis driver: `redis://host:6379/0`. Needs the extra `taskharbor[redis]`.

In the order a call passes through them: `driver` (the contract); `enqueue`, `leases`, `operate`, `inspect` and `log` (one module
per kind of call); `records` (stored jobs as records); `store` (keys, lost answers); `servers` (sentinels, clusters); `connection`
(redis-py); `library` and `lua/` (what the server runs). `listener` waits for notifications, `options` reads URLs, `errors`
translates what Redis answers.
"""

from taskharbor.drivers.redis.driver import RedisDriver

__all__ = ["RedisDriver"]
