"""A PostgreSQL by its address, whoever runs it: what tests do to a server that is theirs and to one they were given."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit


class PostgresAt:
    """A superuser's view of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def version(self) -> int:
        """The major."""
        ((number,),) = self.execute("SELECT current_setting('server_version_num')::int / 10000")
        return int(number)

    def create_database(self, name: str) -> str:
        """Returns its URL."""
        from psycopg import sql

        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{quote(name, safe='')}"))

    def execute(self, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; its rows, where it has any."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []
