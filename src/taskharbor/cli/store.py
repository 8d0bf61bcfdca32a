"""The store that a command works on: a client on the chosen URL, or a clear word about why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

from taskharbor.cli.options import Settings
from taskharbor.cli.problems import BadInput, Problem
from taskharbor.client import Client

_SECRET = re.compile("pass|secret|token|key|credential|sig", re.IGNORECASE)


@contextmanager
def open_client(settings: Settings, *, creating: bool = False) -> Iterator[Client]:
    """A client for the time of a command. Only commands that add something may make a new database file."""
    if creating and settings.url == "memory://":
        raise BadInput(
            "memory:// is a new store inside this process: it ends with the command",
            hint="name another store with --url or TASKHARBOR_URL",
        )
    if not creating:
        require_store(settings)
    with closing(Client(settings.url)) as client:
        yield client


def require_store(settings: Settings) -> None:
    """Looking must not create: an empty new database would answer a wrong --url with "no jobs"."""
    file = store_file(settings.url)
    if file is None or file.exists():
        return
    if settings.url_is_default:
        raise Problem(
            f"there is no {file} in {Path.cwd()}",
            hint="go to your app's folder, or name the store with --url or TASKHARBOR_URL; "
            "the first `taskharbor enqueue` makes one",
            kind="NoStore",
        )
    raise Problem(
        f"there is no database {file} (from {shown_url(settings.url)})",
        hint="sqlite:///name.db is relative to the current folder, sqlite:////path/name.db is absolute",
        kind="NoStore",
    )


def store_file(url: str) -> Path | None:
    """The file that an SQLite URL names; None for every other store."""
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite" or not rest.startswith("/"):
        return None
    return Path(unquote(rest[1:].partition("?")[0]))


def shown_url(url: str) -> str:
    """The URL without what is secret in it: passwords, tokens, keys."""
    base, question, query = url.partition("?")
    scheme, separator, rest = base.partition("://")
    authority, slash, path = rest.partition("/")
    account, at, place = authority.rpartition("@")
    user, colon, _ = account.partition(":")
    if at and (colon or scheme in ("http", "https")):
        account = f"{user}:***" if colon else "***"
    options = [
        f"{option.partition('=')[0]}=***" if _SECRET.search(option.partition("=")[0]) else option
        for option in query.split("&")
    ]
    return f"{scheme}{separator}{account}{at}{place}{slash}{path}{question}{'&'.join(options)}"
