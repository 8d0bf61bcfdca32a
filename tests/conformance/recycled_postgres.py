"""Fresh stores for the kit in a fraction of the time.

The kit asks for hundreds of them, one after the other. Making a schema costs a fifth of a second, truncating its tables a
twentieth, deleting their few rows a hundredth: so a schema is used again as soon as nobody is on it any more, and truncated
before many dead rows have come together.
"""

import atexit
from functools import cache
from urllib.parse import parse_qsl, urlsplit

import psycopg
from psycopg import sql

from taskharbor_testkit import servers

TABLES = (
    *("queues", "jobs", "finished", "dead", "idempotency", "attempts", "moves", "swept", "repeated"),
    *("staged", "published", "blobs"),
)
DAYS = """
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %s AND relispartition AND relkind = 'r' AND relname ~ '_[0-9]+$'
"""


DELETIONS = 40
"""As many cases leave their dead rows."""


class Recycler:
    """Empty schemas on one server."""

    def __init__(self, server: servers.PostgresAt) -> None:
        self._url = server.url
        self._connection = psycopg.connect(server.url, autocommit=True, options="-c lock_timeout=200ms")
        atexit.register(self._connection.close)
        self._used: list[str] = []
        self._turns = 0

    def fresh_url(self) -> str:
        for url in self._used[-1:]:
            if self._is_emptied(dict(parse_qsl(urlsplit(url).query))["schema"]):
                return url
        self._used.append(servers.with_fresh_schema(self._url))
        return self._used[-1]

    def _is_emptied(self, schema: str) -> bool:
        """False where it does not exist yet, or somebody still works on it."""
        try:
            days = [name for (name,) in self._connection.execute(DAYS, (schema,))]
            with self._connection.transaction():
                for day in days[:-1] if len(days) > 1 else ():
                    # Cases live in a time of their own; the last day stays, so that nobody makes the others again.
                    if not day.startswith("attempts_"):
                        self._connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(schema, day)))
                tables = [sql.Identifier(schema, table) for table in TABLES]
                all_of_them = sql.SQL(", ").join(tables)
                forget = sql.SQL("UPDATE {} SET trimmed_xid = '0', trimmed_seq = 0")
                self._connection.execute(forget.format(sql.Identifier(schema, "epochs")))
                self._turns += 1
                if self._turns % DELETIONS == 0:
                    self._connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(all_of_them))
                else:
                    lock = sql.SQL("LOCK {} IN ACCESS EXCLUSIVE MODE").format(all_of_them)
                    delete = [sql.SQL("DELETE FROM {}").format(table) for table in tables]
                    self._connection.execute(sql.SQL("; ").join([lock, *delete]))
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
            return False
        return True


@cache
def recycler(*, oldest: bool = False) -> Recycler:
    """On the newest server to be had, or on the oldest."""
    return Recycler(
        servers.shared_postgres(min(servers.postgres_versions(), default=None))
        if oldest
        else servers.given_or_shared_postgres()
    )
