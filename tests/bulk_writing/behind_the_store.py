"""A look at what a store keeps, past its bulk interface: what is staged, what is remembered, and time that passes."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from bulk_writing.bulk_harness import ask
from taskharbor.bulk import publish
from taskharbor.bulk.stage import FOLDER, folder_of
from taskharbor.drivers.contract import DAY, Driver
from taskharbor.drivers.postgres.options import parse_url

WRITES = ("w-old", "w-older")
"""Names of writes that the tests give; of others only a digest is known."""


class Behind(abc.ABC):
    @abc.abstractmethod
    def staged(self) -> set[str]:
        """The writes of which anything is staged."""

    @abc.abstractmethod
    def published(self) -> set[tuple[str, int]]:
        """Series and number of the marks."""

    @abc.abstractmethod
    def lose_some(self) -> None:
        """Some of what is staged goes."""

    @abc.abstractmethod
    def pass_days(self, days: int, *, write: str) -> None:
        """Age what is staged for this write."""

    @abc.abstractmethod
    def pass_days_for_marks(self, days: int) -> None:
        """Age the marks."""


class BehindPostgres(Behind):
    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._session.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    def staged(self) -> set[str]:
        return {write for (write,) in self.rows("SELECT DISTINCT write FROM staged")}

    def published(self) -> set[tuple[str, int]]:
        return {(series, number) for series, number in self.rows("SELECT series, number FROM published")}

    def lose_some(self) -> None:
        self.rows("DELETE FROM staged WHERE number = 1")

    def pass_days(self, days: int, *, write: str) -> None:
        self.rows(
            "UPDATE staged SET staged_at = staged_at - %s * interval '1 day' WHERE write = %s", days, write
        )

    def pass_days_for_marks(self, days: int) -> None:
        self.rows("UPDATE published SET published_at = published_at - %s * interval '1 day'", days)


class BehindBlobs(Behind):
    """Everything is in blobs of the store."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _names(self) -> list[str]:
        found: list[str] = ask(self._url, lambda driver: driver.list_blobs(FOLDER))
        return found

    def staged(self) -> set[str]:
        known = {folder_of(write): write for write in WRITES}
        folders = {"/".join(name.split("/")[:2]) for name in self._names()}
        return {known.get(folder, folder) for folder in folders}

    def published(self) -> set[tuple[str, int]]:
        writes = ask(self._url, publish._look)
        return {(series, mark.number) for series, mark in writes.marks.items()}

    def lose_some(self) -> None:
        names = self._names()
        ask(self._url, lambda driver: driver.drop_blobs(names[:1]))

    def pass_days(self, days: int, *, write: str) -> None:
        """The time is in the names."""

        async def age(driver: Driver) -> None:
            names = await driver.list_blobs(folder_of(write))
            for name, data in zip(names, await driver.read_blobs(names), strict=True):
                folder, _, last = name.rpartition("/")
                when, _, rest = last.partition("-")
                await driver.put_blob(f"{folder}/{int(when, 16) - days * DAY:015x}-{rest}", data or b"")
            await driver.drop_blobs(names)

        ask(self._url, age)

    def pass_days_for_marks(self, days: int) -> None:
        def age(writes: publish.Writes) -> None:
            for series, mark in writes.marks.items():
                writes.marks[series] = msgspec.structs.replace(mark, at=mark.at - days * DAY)

        ask(self._url, lambda driver: publish._change(driver, age))


@contextmanager
def behind_the_store(url: str) -> Iterator[Behind]:
    if not url.startswith("postgres"):
        yield BehindBlobs(url)
        return
    options = parse_url(url)
    with psycopg.connect(options.conninfo, autocommit=True) as session:
        session.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(options.schema)))
        yield BehindPostgres(session)
