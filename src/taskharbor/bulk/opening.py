"""From a URL to a store that reads and writes by the million."""

from __future__ import annotations

from taskharbor.bulk.contract import BulkStore
from taskharbor.bulk.generic import GenericStore
from taskharbor.drivers.registry import connect


def open_store(url: str) -> BulkStore:
    """The driver's own bulk store, or the generic one over the driver contract. No I/O yet: connections are made when needed.

    Raises what `connect` raises: an unknown scheme, a missing extra, options the driver does not know.
    """
    driver = connect(url)
    own = type(driver).bulk_store(url)
    return GenericStore(url, driver) if own is None else own
