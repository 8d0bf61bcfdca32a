"""One transaction of the caller's, in the words of each library: what the tests of transactional enqueue are run over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import django
import psycopg
from django.conf import settings
from django.db import connection as django_connection
from django.db import connections as django_connections
from django.db import transaction as django_transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker


class Caller:
    """A program with one connection. Everything is synchronous here; asynchronous libraries run on a loop of their own."""

    how_to_begin: ClassVar[str] = r"connection\.transaction\(\)"
    """The advice for a connection in autocommit mode."""
    transaction: Any
    """The argument of `within`."""
    engine: Any = None
    """SQLAlchemy's."""

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url
        self.connect()

    def connect(self) -> None:
        raise NotImplementedError

    def run(self, answer: Any) -> Any:
        """What the library answers: a coroutine, if it is asynchronous."""
        return answer

    def begin(self) -> None:
        """Most libraries begin by themselves."""

    def commit(self) -> None:
        self.run(self.transaction.commit())

    def rollback(self) -> None:
        self.run(self.transaction.rollback())

    def execute(self, statement: str) -> None:
        self.run(self.transaction.execute(text(statement) if self.engine else statement))

    def set_autocommit(self) -> None:
        if self.engine:
            options = {"isolation_level": "AUTOCOMMIT"}
            self.run(self.transaction.connection(execution_options=options))
        else:
            self.run(self.transaction.set_autocommit(True))

    def close(self) -> None:
        self.run(self.transaction.close())
        if self.engine:
            self.run(self.engine.dispose())

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

    def run(self, answer: Any) -> Any:
        return self.runner.run(answer)

    def close(self) -> None:
        super().close()
        self.runner.close()

    def within(self, enqueue: Callable[[Any], Any]) -> Any:
        async def enqueued() -> Any:
            return await enqueue(self.transaction)

        return self.run(enqueued())


class PsycopgCaller(Caller):
    def connect(self) -> None:
        self.transaction = psycopg.connect(self.server_url)


class PsycopgAsyncCaller(AsyncCaller):
    def connect(self) -> None:
        self.transaction = self.run(psycopg.AsyncConnection.connect(self.server_url))


class SQLAlchemySessionCaller(Caller):
    how_to_begin = "AUTOCOMMIT"

    def connect(self) -> None:
        self.engine = create_engine(sqlalchemy_url(self.server_url))
        self.transaction = Session(self.engine)


class SQLAlchemyScopedCaller(SQLAlchemySessionCaller):
    """As Flask-SQLAlchemy has it."""

    def connect(self) -> None:
        super().connect()
        self.transaction = scoped_session(sessionmaker(self.engine))


class SQLAlchemyConnectionCaller(SQLAlchemySessionCaller):
    def connect(self) -> None:
        super().connect()
        self.transaction = self.engine.connect()


class SQLAlchemyAsyncSessionCaller(AsyncCaller):
    how_to_begin = "AUTOCOMMIT"

    def connect(self) -> None:
        self.engine = create_async_engine(sqlalchemy_url(self.server_url))
        self.transaction = AsyncSession(self.engine)


class SQLAlchemyAsyncConnectionCaller(SQLAlchemyAsyncSessionCaller):
    def connect(self) -> None:
        super().connect()
        self.transaction = self.run(self.engine.connect().start())


class DjangoCaller(Caller):
    how_to_begin = r"transaction\.atomic\(\)"

    def connect(self) -> None:
        configure_django(self.server_url)
        self.transaction = django_connection
        self.block: Any = None

    def begin(self) -> None:
        self.block = django_transaction.atomic()
        self.block.__enter__()

    def commit(self) -> None:
        block, self.block = self.block, None
        block.__exit__(None, None, None)

    def rollback(self) -> None:
        django_transaction.set_rollback(True)
        self.commit()

    def execute(self, statement: str) -> None:
        with self.transaction.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        if self.block is not None:
            self.rollback()
        super().close()


class DjangoNamedCaller(DjangoCaller):
    def connect(self) -> None:
        super().connect()
        self.transaction = django_connections["default"]


CALLERS: dict[str, type[Caller]] = {
    "psycopg": PsycopgCaller,
    "psycopg-async": PsycopgAsyncCaller,
    "sqlalchemy-session": SQLAlchemySessionCaller,
    "sqlalchemy-scoped-session": SQLAlchemyScopedCaller,
    "sqlalchemy-connection": SQLAlchemyConnectionCaller,
    "sqlalchemy-async-session": SQLAlchemyAsyncSessionCaller,
    "sqlalchemy-async-connection": SQLAlchemyAsyncConnectionCaller,
    "django": DjangoCaller,
    "django-named": DjangoNamedCaller,
}


def sqlalchemy_url(server_url: str) -> str:
    return "postgresql+psycopg://" + server_url.partition("://")[2]


def configure_django(server_url: str) -> None:
    """Once a process: the server is shared by all its tests."""
    if settings.configured:
        return
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    given = {names[name]: str(value) for name, value in conninfo_to_dict(server_url).items() if name in names}
    database = {"ENGINE": "django.db.backends.postgresql"} | given
    elsewhere = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database, "elsewhere": elsewhere}, USE_TZ=True)
    django.setup()
