"""SQLite as a bulk store."""

from __future__ import annotations

from taskharbor.drivers.sqlite.bulk.reading import SQLiteReading
from taskharbor.drivers.sqlite.bulk.writing import SQLiteWriting


class SQLiteBulkStore(SQLiteReading, SQLiteWriting):
    """One class, two concerns: each half opens what it needs and closes it."""
