"""The Redis driver: `redis://host:6379/0`. Needs the extra `taskharbor[redis]`.

In the order a call passes through them: `driver` (the contract); `enqueue`, `reserve` with `blocking_claims`, `settle` with
`failure_queue`, `operate`, `inspect`, `log` and `bulk` (one module per kind of call); `records` (the stored bytes); `store` and
`keys`; `client` (lost answers); `sentinel` and `cluster` (which server); `connection` (redis-py); `library` and `lua/` (what the
server runs). `listener` waits for notifications, `options` reads URLs, `failures` translates errors.
"""

from taskharbor.drivers.redis.driver import RedisDriver

__all__ = ["RedisDriver"]
