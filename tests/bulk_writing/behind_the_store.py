"""A look at what a store keeps, past its own interface: what is staged, what is remembered, and time that passes."""

from __future__ import annotations

import abc
import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
import psycopg
from psycopg import sql
from redis import Redis

from taskharbor.drivers.objectstore.bulk.writes import WritesState, writes_cell
from taskharbor.drivers.objectstore.encoding import opened
from taskharbor.drivers.objectstore.envelope import unseal
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.objectstore.naming import unescaped
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.jobs import SECOND

DAY = 86_400

T = TypeVar("T")


class Behind(abc.ABC):
    @abc.abstractmethod
    def staged(self) -> set[str]:
        """The writes of which anything is staged."""

    @abc.abstractmethod
    def published(self) -> set[tuple[str, int]]:
        """Series and number of what is remembered."""

    @abc.abstractmethod
    def lose_some(self) -> None:
        """Some of what is staged goes."""

    @abc.abstractmethod
    def pass_days(self, days: int, *, write: str) -> None:
        """For what is staged for this write."""

    @abc.abstractmethod
    def pass_days_for_marks(self, days: int) -> None:
        """For what is remembered."""

    @abc.abstractmethod
    def idempotency_keys(self) -> int: ...


class BehindTables(Behind):
    @abc.abstractmethod
    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]: ...

    def staged(self) -> set[str]:
        return {write for (write,) in self.rows("SELECT DISTINCT write FROM staged")}

    def published(self) -> set[tuple[str, int]]:
        return {(series, number) for series, number in self.rows("SELECT series, number FROM published")}

    def lose_some(self) -> None:
        self.rows("DELETE FROM staged WHERE number = 1")

    def idempotency_keys(self) -> int:
        ((count,),) = self.rows("SELECT count(*) FROM idempotency")
        return int(count)


class BehindSQLite(BehindTables):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def pass_days(self, days: int, *, write: str) -> None:
        self.rows("UPDATE staged SET staged_at = staged_at - 86400000000 * ? WHERE write = ?", days, write)

    def pass_days_for_marks(self, days: int) -> None:
        self.rows("UPDATE published SET published_at = published_at - 86400000000 * ?", days)


class BehindPostgres(BehindTables):
    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._session.execute(statement, values)  # type: ignore[call-overload]  # not a literal
        return cursor.fetchall() if cursor.description else []

    def pass_days(self, days: int, *, write: str) -> None:
        self.rows(
            "UPDATE staged SET staged_at = staged_at - %s * interval '1 day' WHERE write = %s", days, write
        )

    def pass_days_for_marks(self, days: int) -> None:
        self.rows("UPDATE published SET published_at = published_at - %s * interval '1 day'", days)


class BehindRedis(Behind):
    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def keys(self, ending: str) -> list[str]:
        found = self._client.scan_iter(match=f"{self._prefix}{{*}}:{ending}", count=1000)
        return [key.decode() for key in found]

    def staged(self) -> set[str]:
        records = {key.partition(":writing:")[2] for key in self.keys("writing:*")}
        lists = {key.partition(":staged:")[2].partition(":")[0] for key in self.keys("staged:*")}
        return records | lists

    def published(self) -> set[tuple[str, int]]:
        return {
            (key.partition(":written:")[2], int((self._client.get(key) or b"").partition(b":")[0]))
            for key in self.keys("written:*")
        }

    def lose_some(self) -> None:
        for key in self.keys("staged:*"):
            self._client.ltrim(key, 0, -5)

    def pass_days(self, days: int, *, write: str) -> None:
        self._pass_days(days, [*self.keys(f"staged:{write}:*"), *self.keys(f"writing:{write}")])

    def pass_days_for_marks(self, days: int) -> None:
        self._pass_days(days, self.keys("written:*"))

    def _pass_days(self, days: int, keys: list[str]) -> None:
        for key in keys:
            left = self._client.ttl(key)
            assert left > 0, f"{key} would stay for ever"
            # With a time to live that is over, a key is gone at once.
            self._client.expire(key, left - days * DAY)

    def idempotency_keys(self) -> int:
        return sum(self._client.hlen(key) for key in self.keys("accepted"))


class BehindFiles(Behind):
    """An object store in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _staged(self) -> list[Path]:
        return [path for path in sorted((self._folder / "staging").rglob("*")) if path.is_file()]

    def staged(self) -> set[str]:
        folders = {path.relative_to(self._folder).parts[1] for path in self._staged()}
        return {unescaped(name) or name for name in folders}

    def published(self) -> set[tuple[str, int]]:
        marks = self._writes(lambda state: dict(state.content.marks))
        return {(series, mark.number) for series, mark in marks.items()}

    def lose_some(self) -> None:
        self._staged()[0].unlink()

    def pass_days(self, days: int, *, write: str) -> None:
        """The time is in the names."""
        for path in self._staged():
            if write == unescaped(path.relative_to(self._folder).parts[1]):
                when, _, rest = path.name.partition("-")
                path.rename(path.with_name(f"{int(when, 16) - days * DAY * SECOND:015x}-{rest}"))

    def pass_days_for_marks(self, days: int) -> None:
        def age(state: WritesState) -> None:
            marks = state.content.marks
            for series, mark in marks.items():
                marks[series] = msgspec.structs.replace(mark, at=mark.at - days * DAY * SECOND)
            state.touched = True

        self._writes(age, is_change=True)

    def _writes(self, step: Callable[[WritesState], T], *, is_change: bool = False) -> T:
        async def run() -> T:
            blobs = LocalFiles(str(self._folder))
            cell = writes_cell(blobs)
            try:
                return await (cell.change(step) if is_change else cell.look(step))
            finally:
                await cell.close()
                await blobs.close()

        return asyncio.run(run())

    def idempotency_keys(self) -> int:
        async def count() -> int:
            blobs = LocalFiles(str(self._folder))
            names = [name for name in await blobs.names("queues") if name.endswith("/state")]
            found = [await blobs.read(name) for name in names]
            await blobs.close()
            return sum(len(opened(unseal(one.data, "")[1], "")[0].accepted) for one in found if one)

        return asyncio.run(count())


@contextmanager
def behind_the_store(url: str) -> Iterator[Behind]:
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        yield BehindSQLite(connection)
        connection.close()
    elif url.startswith("file"):
        yield BehindFiles(Path(urlsplit(url).path))
    elif url.startswith("redis"):
        prefix = dict(parse_qsl(urlsplit(url).query))["prefix"]
        with Redis.from_url(url.partition("?")[0]) as client:
            yield BehindRedis(client, prefix)
    else:
        options = parse_url(url)
        with psycopg.connect(options.conninfo, autocommit=True) as session:
            session.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(options.schema)))
            yield BehindPostgres(session)
