"""The store by the million, as Arrow: `store` is its face, `reading` and `writing` do the work. Needs pyarrow."""

from __future__ import annotations

from taskharbor.drivers.objectstore.bulk.store import ObjectStoreBulk

__all__ = ["ObjectStoreBulk"]
