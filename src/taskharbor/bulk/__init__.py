"""Whole tables in and out of a store, as Arrow: the seam between a driver and whoever moves millions of rows.

`open_store(url)` gives a driver's own `BulkStore`, or the generic one, which goes through the driver contract page by page and
works for every driver. Needs pyarrow; the rest of TaskHarbor does not import this package.
"""

from __future__ import annotations

from taskharbor.bulk.contract import BulkStore, Part, Selection, Table
from taskharbor.bulk.opening import open_store

__all__ = ["BulkStore", "Part", "Selection", "Table", "open_store"]
