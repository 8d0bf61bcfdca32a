"""The Redis driver: `redis://host:6379/0`. Needs the extra `taskharbor[redis]`."""

from taskharbor.drivers.redis.driver import RedisDriver

__all__ = ["RedisDriver"]
