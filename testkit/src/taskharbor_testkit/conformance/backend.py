"""Fresh, empty stores for the cases, and handles on them: the part that a driver's author supplies.

Most authors pass a factory that returns a driver (or its URL) on a fresh store. An author who must start a server or
drop a database afterwards subclasses `Backend` and overrides `store`.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from taskharbor.drivers.contract import Driver, JobFilter
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest

Factory: TypeAlias = Callable[..., Driver | str]
"""Called with a fresh directory, or with nothing where it takes no argument; returns a driver or a URL."""

FRESH = "{fresh}"
"""In a URL: stands for a name that was never used, one per store."""


class Store:
    """One fresh store during one case, and every handle the case opened on it."""

    def __init__(self, first: Driver, url: str | None = None) -> None:
        self.url = url
        """The URL by which another process can open the same store; None if there is no such way."""
        self.capabilities = first.capabilities
        self._first = first
        self._handles: list[Driver] = []

    async def connect(self) -> Driver:
        """Another opened handle: another client, another worker."""
        handle = self._first.clone() if self._handles else self._first
        self._handles.append(handle)
        await handle.open()
        return handle

    async def close(self) -> None:
        """Also what a case "crashed" by letting go of it: by now nothing depends on it any more."""
        for handle in self._handles:
            with suppress(Exception):
                await handle.close()

    async def refuse_unless_empty(self) -> None:
        """The kit writes, purges and prunes: never in a store that somebody uses."""
        handle = await self.connect()
        queues = await handle.stats(now=0)
        page = await handle.list_jobs(JobFilter(), now=0, limit=1)
        if queues or page.jobs:
            names = ", ".join(sorted(stats.queue for stats in queues)) or page.jobs[0].queue
            raise InvalidRequest(
                f"the store is not empty (queues: {names}): the conformance kit writes and removes jobs and wants "
                f"a store of its own for every case; put {FRESH} into the URL, e.g. sqlite:////tmp/{FRESH}.db"
            )


class Backend:
    """Recipe for stores. `store()` gives a fresh one for the time of one case."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._takes_directory = _takes_an_argument(factory)

    @asynccontextmanager
    async def store(self, directory: Path) -> AsyncIterator[Store]:
        made = self._factory(directory) if self._takes_directory else self._factory()
        store = Store(connect(made), made) if isinstance(made, str) else Store(made)
        try:
            await store.refuse_unless_empty()
            yield store
        finally:
            await store.close()

    @classmethod
    def from_url(cls, url: str) -> Backend:
        """`{fresh}` in the URL becomes a new name for every store; without it every connection must start empty."""
        return cls(lambda: url.replace(FRESH, f"conformance-{uuid.uuid4().hex[:12]}"))


def as_backend(source: Backend | Factory | str) -> Backend:
    if isinstance(source, Backend):
        return source
    return Backend.from_url(source) if isinstance(source, str) else Backend(source)


def _takes_an_argument(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is one.empty for one in parameters)
