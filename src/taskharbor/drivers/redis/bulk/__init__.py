"""The store by the million, as Arrow: `store` is its face, `reading` and `writing` do the work. Needs pyarrow."""

from __future__ import annotations

from taskharbor.drivers.redis.bulk.store import RedisBulkStore

__all__ = ["RedisBulkStore"]
