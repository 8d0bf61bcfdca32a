"""Redis as a bulk store."""

from __future__ import annotations

from taskharbor.drivers.redis.bulk.reading import RedisReading
from taskharbor.drivers.redis.bulk.writing import RedisWriting


class RedisBulkStore(RedisReading, RedisWriting):
    """One class, two concerns over one connection."""
