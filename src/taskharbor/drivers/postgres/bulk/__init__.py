"""PostgreSQL as a bulk store, by COPY and Arrow. Needs pyarrow."""

from __future__ import annotations

from taskharbor.drivers.postgres.bulk.reading import PostgresReading
from taskharbor.drivers.postgres.bulk.writing import PostgresWriting


class PostgresBulkStore(PostgresReading, PostgresWriting):
    """Both halves: each opens what it needs and closes it."""
