from __future__ import annotations
from taskharbor.bulk.contract import BulkStore


class PostgresReading(BulkStore): ...
