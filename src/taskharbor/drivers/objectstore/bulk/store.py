"""An object store as a bulk store."""

from __future__ import annotations

from taskharbor.drivers.objectstore.bulk.reading import ObjectStoreReading
from taskharbor.drivers.objectstore.bulk.writing import ObjectStoreWriting


class ObjectStoreBulk(ObjectStoreReading, ObjectStoreWriting):
    """One class, two concerns over one place."""
