"""Enqueueing within the caller's transaction, on whichever library's connection it runs.

One adapter a library. An adapter is imported when an object of its library is given, so none of them is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from taskharbor.drivers.contract import JoinedAsyncTransaction, JoinedTransaction
from taskharbor.drivers.postgres.options import Options
from taskharbor.errors import InvalidRequest

ACCEPTED = (
    "a psycopg Connection or AsyncConnection, a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection, "
    "or Django's connection"
)
_ADAPTERS = {
    "psycopg": "psycopg_connection",
    "psycopg_pool": "psycopg_connection",
    "sqlalchemy": "sqlalchemy_session",
    "django": "django_connection",
}


class _Adapter(Protocol):
    def join(
        self, transaction: object, options: Options
    ) -> JoinedTransaction | JoinedAsyncTransaction | None:
        """None: of this library, but nothing with a transaction."""


def join(transaction: object, options: Options) -> JoinedTransaction | JoinedAsyncTransaction:
    # By all base classes: people derive their own sessions and connections.
    for base in type(transaction).__mro__:
        adapter = _ADAPTERS.get(base.__module__.partition(".")[0])
        if adapter is not None:
            joined = cast(_Adapter, import_module(f"{__name__}.{adapter}")).join(transaction, options)
            if joined is not None:
                return joined
            break
    kind = type(transaction)
    raise InvalidRequest(
        f"a job cannot be enqueued within a {kind.__module__}.{kind.__qualname__}: give {ACCEPTED}"
    )


__all__ = ["ACCEPTED", "join"]
