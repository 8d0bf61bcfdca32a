"""What PostgreSQL's errors mean to somebody who wants their queue back."""

from __future__ import annotations

import psycopg

from taskharbor.drivers.postgres.options import Options
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError

_CONFLICTS = ("40001", "40P01")
_SHUTDOWN = ("57P01", "57P02", "57P03", "57P05")
_READ_ONLY = "25006"

_ADVICE = {
    "25006": "the server is a standby or read-only: name the primary, or all hosts with target_session_attrs=read-write",
    "28000": "the server does not let this user in: check user, database and pg_hba.conf",
    "28P01": "the password is wrong",
    "3D000": "the database does not exist: create it first",
    "42501": "this user lacks a privilege: grant it, or let its owner run `taskharbor migrate`",
    "53100": "the server's disk is full; nothing of this call was stored",
    "53300": "the server has no connection left: lower pool_size or the number of workers, or use a pooler",
    "26000": "behind a pooler in transaction mode add prepare=off&notify=off to the URL",
    "42P05": "behind a pooler in transaction mode add prepare=off&notify=off to the URL",
    "55P03": "a lock was not to be had in time; look for a long transaction",
    "57014": "the statement ran into the server's statement_timeout",
    "57P03": "the server is starting or stopping",
}
# A connection that is refused comes without a code, only with words.
_SPOKEN = {
    "too many connections": "53300",
    "too many clients": "53300",
    "remaining connection slots": "53300",
    "password authentication failed": "28P01",
    "no pg_hba.conf entry": "28000",
    "is starting up": "57P03",
    "is shutting down": "57P03",
    "in recovery mode": "57P03",
    "read-only": "25006",
}
_MISSING = ("42P01", "42883", "3F000", "42704")
_BAD_VALUE = ("22", "23502", "23514")


def is_conflict(error: psycopg.Error) -> bool:
    """The server undid the call because it crossed another: do it again."""
    return error.sqlstate in _CONFLICTS


def is_lost(error: psycopg.Error) -> bool:
    """The connection is gone, or of no use: whether the call took effect is not known."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return state.startswith("08") or state in _SHUTDOWN or state == _READ_ONLY


def translated(error: psycopg.Error, options: Options) -> Exception:
    """The TaskHarbor error for what went wrong."""
    state = error.sqlstate or ""
    text = " ".join(str(error).split())
    if state in _MISSING:
        return SchemaMismatch(
            f"{options.place}: the schema {options.schema!r} is missing or old ({text}): run `taskharbor migrate`"
        )
    if state.startswith(_BAD_VALUE) or isinstance(error, psycopg.DataError):
        return InvalidRequest(f"a value cannot be stored in PostgreSQL: {text}")
    if not state:
        state = next((code for words, code in _SPOKEN.items() if words in text), "")
        if not state and "database" in text and "does not exist" in text:
            state = "3D000"
    advice = _ADVICE.get(state)
    message = f"{options.place}: {text} ({advice})" if advice else f"{options.place}: {text}"
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) or advice or is_lost(error):
        return BackendUnavailable(message)
    return TaskHarborError(message)
