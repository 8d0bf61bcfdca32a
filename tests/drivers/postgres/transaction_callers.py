"""One transaction of the caller's, in the words of each library: what the tests of transactional enqueue are run over."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict


class Caller:
    """A program with one connection. Everything is synchronous here; asynchronous libraries run on a loop of their own."""

    name: ClassVar[str]
    transaction: Any
    """The argument of `within`."""

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url
        self.connect()

    def connect(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        pass

    def commit(self) -> None:
        self.transaction.commit()

    def rollback(self) -> None:
        self.transaction.rollback()

    def execute(self, statement: str) -> None:
        self.transaction.execute(statement)

    def close(self) -> None:
        self.transaction.close()

    def within(self, enqueue: Callable[[Any], Any]) -> Any:
        """`enqueue` gets the transaction."""
        return enqueue(self.transaction)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Rolled back at its end."""
        self.execute("SAVEPOINT tried")
        yield
        self.execute("ROLLBACK TO SAVEPOINT tried")


class AsyncCaller(Caller):
    def __init__(self, server_url: str) -> None:
        self.runner = asyncio.Runner()
        super().__init__(server_url)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def commit(self) -> None:
        self.run(self.transaction.commit())

    def rollback(self) -> None:
        self.run(self.transaction.rollback())

    def execute(self, statement: str) -> None:
        self.run(self.transaction.execute(statement))

    def close(self) -> None:
        self.run(self.disconnect())
        self.runner.close()

    async def disconnect(self) -> None:
        await self.transaction.close()

    def within(self, enqueue: Callable[[Any], Any]) -> Any:
        async def enqueued() -> Any:
            answer = enqueue(self.transaction)
            assert inspect.iscoroutine(answer)
            return await answer

        return self.run(enqueued())


class PsycopgCaller(Caller):
    name = "psycopg"

    def connect(self) -> None:
        self.transaction = psycopg.connect(self.server_url)


class PsycopgAsyncCaller(AsyncCaller):
    name = "psycopg-async"

    def connect(self) -> None:
        self.transaction = self.run(psycopg.AsyncConnection.connect(self.server_url))


class SQLAlchemySessionCaller(Caller):
    name = "sqlalchemy-session"

    def connect(self) -> None:
        from sqlalchemy import create_engine

        self.engine = create_engine(sqlalchemy_url(self.server_url))
        self.transaction = self.make()

    def make(self) -> Any:
        from sqlalchemy.orm import Session

        return Session(self.engine)

    def begin(self) -> None:
        self.transaction.begin()

    def execute(self, statement: str) -> None:
        from sqlalchemy import text

        self.transaction.execute(text(statement))

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class SQLAlchemyScopedCaller(SQLAlchemySessionCaller):
    """As Flask-SQLAlchemy has it."""

    name = "sqlalchemy-scoped-session"

    def make(self) -> Any:
        from sqlalchemy.orm import scoped_session, sessionmaker

        return scoped_session(sessionmaker(self.engine))


class SQLAlchemyConnectionCaller(SQLAlchemySessionCaller):
    name = "sqlalchemy-connection"

    def make(self) -> Any:
        return self.engine.connect()


class SQLAlchemyAsyncSessionCaller(AsyncCaller):
    name = "sqlalchemy-async-session"

    def connect(self) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        self.engine = create_async_engine(sqlalchemy_url(self.server_url))
        self.transaction = self.run(self.make())

    async def make(self) -> Any:
        from sqlalchemy.ext.asyncio import AsyncSession

        return AsyncSession(self.engine)

    def begin(self) -> None:
        async def begin() -> None:
            await self.transaction.begin()

        self.run(begin())

    def execute(self, statement: str) -> None:
        from sqlalchemy import text

        self.run(self.transaction.execute(text(statement)))

    async def disconnect(self) -> None:
        await super().disconnect()
        await self.engine.dispose()


class SQLAlchemyAsyncConnectionCaller(SQLAlchemyAsyncSessionCaller):
    name = "sqlalchemy-async-connection"

    async def make(self) -> Any:
        return await self.engine.connect()


class DjangoCaller(Caller):
    name = "django"

    def connect(self) -> None:
        configure_django(self.server_url)
        from django.db import connection

        self.transaction = connection
        self.block: Any = None

    def begin(self) -> None:
        from django.db import transaction

        self.block = transaction.atomic()
        self.block.__enter__()

    def commit(self) -> None:
        block, self.block = self.block, None
        block.__exit__(None, None, None)

    def rollback(self) -> None:
        from django.db import transaction

        transaction.set_rollback(True)
        self.commit()

    def execute(self, statement: str) -> None:
        with self.transaction.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        if self.block is not None:
            self.rollback()
        super().close()


class DjangoNamedCaller(DjangoCaller):
    name = "django-named"

    def connect(self) -> None:
        super().connect()
        from django.db import connections

        self.transaction = connections["default"]


CALLERS: list[type[Caller]] = [
    PsycopgCaller,
    PsycopgAsyncCaller,
    SQLAlchemySessionCaller,
    SQLAlchemyConnectionCaller,
    SQLAlchemyAsyncSessionCaller,
    SQLAlchemyAsyncConnectionCaller,
    DjangoCaller,
]


def sqlalchemy_url(server_url: str) -> str:
    return "postgresql+psycopg://" + server_url.partition("://")[2]


def configure_django(server_url: str) -> None:
    """Once a process: the server is shared by all its tests."""
    import django
    from django.conf import settings

    if settings.configured:
        return
    given = conninfo_to_dict(server_url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    database = {"ENGINE": "django.db.backends.postgresql"} | {
        names[name]: str(value) for name, value in given.items() if name in names
    }
    elsewhere = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database, "elsewhere": elsewhere}, USE_TZ=True)
    django.setup()
