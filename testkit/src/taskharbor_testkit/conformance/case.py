"""The registry of named cases. A case is one coroutine over one `Twin`; its name is `file.function`."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.twin import Twin

Body: TypeAlias = Callable[[Twin], Awaitable[None]]


class Skip(Exception):
    """The backend does not claim what this case is about."""


class Case(msgspec.Struct, frozen=True):
    name: str
    body: Body
    needs_durable: bool = False
    needs_url: bool = False

    @property
    def rule(self) -> str:
        """The rule this case stands for, in one line."""
        return (inspect.getdoc(self.body) or self.name.partition(".")[2].replace("_", " ")).splitlines()[0]

    async def run(self, backend: Backend, directory: Path) -> None:
        async with backend.store(directory) as store:
            if self.needs_durable and not store.capabilities.durable:
                raise Skip("the driver is not durable")
            if self.needs_url and (store.url is None or not store.capabilities.multi_process):
                raise Skip("another process cannot open this store: let the factory return a URL to run this")
            twin = await Twin.open(store)
            await self.body(twin)
            await twin.finish()


CASES: dict[str, Case] = {}
"""Every named case, by name."""


def case(*, durable: bool = False, url: bool = False) -> Callable[[Body], Body]:
    """Register a case under the name of its file and function."""

    def register(body: Body) -> Body:
        add(body, body.__name__, durable=durable, url=url)
        return body

    return register


def add(body: Body, name: str, *, durable: bool = False, url: bool = False) -> None:
    full = f"{body.__module__.rpartition('.')[2]}.{name}"
    if full in CASES:
        raise ValueError(f"two cases are called {full}")
    CASES[full] = Case(full, body, needs_durable=durable, needs_url=url)


def run_case(one: Case, backend: Backend, directory: Path | None = None) -> None:
    """Run one case on a loop of its own. Raises Skip, or whatever the case found."""
    if directory is not None:
        asyncio.run(one.run(backend, directory))
        return
    with tempfile.TemporaryDirectory(prefix="taskharbor-conformance-") as fresh:
        asyncio.run(one.run(backend, Path(fresh)))
