"""PostgreSQL as a bulk store."""

from __future__ import annotations

from taskharbor.drivers.postgres.bulk.reading import PostgresReading
from taskharbor.drivers.postgres.bulk.writing import PostgresWriting


class PostgresBulkStore(PostgresReading, PostgresWriting):
    """One class, two concerns: each half opens what it needs and closes it."""
