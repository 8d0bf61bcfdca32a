"""One transaction of the caller's, in the words of each library: what the tests of transactional enqueue are run over."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict


class Caller(ABC):
    """A program with one connection. Everything is synchronous here; asynchronous libraries run on a loop of their own."""

    name: ClassVar[str]

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url

    @property
    @abstractmethod
    def transaction(self) -> Any:
        """What is given to `within`."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def rollback(self) -> None: ...

    @abstractmethod
    def execute(self, statement: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

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
        super().__init__(server_url)
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def within(self, enqueue: Callable[[Any], Any]) -> Any:
        async def enqueued() -> Any:
            answer = enqueue(self.transaction)
            assert inspect.iscoroutine(answer)
            return await answer

        return self.run(enqueued())

    def close(self) -> None:
        self.run(self.close_async())
        self.runner.close()

    @abstractmethod
    async def close_async(self) -> None: ...


class PsycopgCaller(Caller):
    name = "psycopg"

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self.connection = psycopg.connect(server_url)

    @property
    def transaction(self) -> Any:
        return self.connection

    def begin(self) -> None:
        pass

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()

    def execute(self, statement: Any) -> None:
        self.connection.execute(statement)

    def close(self) -> None:
        self.connection.close()


class PsycopgAsyncCaller(AsyncCaller):
    name = "psycopg-async"

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self.connection = self.run(psycopg.AsyncConnection.connect(server_url))

    @property
    def transaction(self) -> Any:
        return self.connection

    def begin(self) -> None:
        pass

    def commit(self) -> None:
        self.run(self.connection.commit())

    def rollback(self) -> None:
        self.run(self.connection.rollback())

    def execute(self, statement: str) -> None:
        self.run(self.connection.execute(statement))

    async def close_async(self) -> None:
        await self.connection.close()


class SQLAlchemySessionCaller(Caller):
    name = "sqlalchemy-session"

    def __init__(self, server_url: str) -> None:
        from sqlalchemy import create_engine

        super().__init__(server_url)
        self.engine = create_engine(sqlalchemy_url(server_url))
        self.session = self.make()

    def make(self) -> Any:
        from sqlalchemy.orm import Session

        return Session(self.engine)

    @property
    def transaction(self) -> Any:
        return self.session

    def begin(self) -> None:
        self.session.begin()

    def commit(self) -> None:
        self.session.commit()

    def rollback(self) -> None:
        self.session.rollback()

    def execute(self, statement: str) -> None:
        from sqlalchemy import text

        self.session.execute(text(statement))

    def close(self) -> None:
        self.session.close()
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

    def __init__(self, server_url: str) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        super().__init__(server_url)
        self.engine = create_async_engine(sqlalchemy_url(server_url))
        self.session = self.run(self.make())

    async def make(self) -> Any:
        from sqlalchemy.ext.asyncio import AsyncSession

        return AsyncSession(self.engine)

    @property
    def transaction(self) -> Any:
        return self.session

    def begin(self) -> None:
        async def begin() -> None:
            await self.session.begin()

        self.run(begin())

    def commit(self) -> None:
        self.run(self.session.commit())

    def rollback(self) -> None:
        self.run(self.session.rollback())

    def execute(self, statement: str) -> None:
        from sqlalchemy import text

        self.run(self.session.execute(text(statement)))

    async def close_async(self) -> None:
        await self.session.close()
        await self.engine.dispose()


class SQLAlchemyAsyncConnectionCaller(SQLAlchemyAsyncSessionCaller):
    name = "sqlalchemy-async-connection"

    async def make(self) -> Any:
        return await self.engine.connect()


class DjangoCaller(Caller):
    name = "django"

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        configure_django(server_url)
        from django.db import connection

        self.connection = connection
        self.block: Any = None

    @property
    def transaction(self) -> Any:
        return self.connection

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
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        if self.block is not None:
            self.rollback()
        self.connection.close()


class DjangoNamedCaller(DjangoCaller):
    name = "django-named"

    @property
    def transaction(self) -> Any:
        from django.db import connections

        return connections["default"]


CALLERS: list[type[Caller]] = [
    PsycopgCaller,
    PsycopgAsyncCaller,
    SQLAlchemySessionCaller,
    SQLAlchemyConnectionCaller,
    SQLAlchemyAsyncSessionCaller,
    SQLAlchemyAsyncConnectionCaller,
    DjangoCaller,
]
VARIANTS: list[type[Caller]] = [SQLAlchemyScopedCaller, DjangoNamedCaller]
"""Other ways to the same connections."""


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
