"""The registry of named cases. A case is a public coroutine of a module in `cases`; its name is `module.function`.

A `parametrised` coroutine makes many cases: one for each row of a table.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeAlias

import msgspec

from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.twin import Twin

P = ParamSpec("P")
Body: TypeAlias = Callable[[Twin], Awaitable[None]]


class Skip(Exception):
    """The backend does not claim what this case is about."""


class Case(msgspec.Struct, frozen=True):
    name: str
    body: Body

    async def run(self, backend: Backend, directory: Path) -> None:
        async with backend.store(directory) as store:
            twin = await Twin.open(store)
            await self.body(twin)
            await twin.finish()


CASES: dict[str, Case] = {}
"""Every named case, by name."""


def collect(module: ModuleType) -> None:
    """Register every public coroutine of a module of cases."""
    for name, body in vars(module).items():
        is_own = inspect.iscoroutinefunction(body) and body.__module__ == module.__name__
        if is_own and not name.startswith("_"):
            _add(module.__name__, name, body)


def parametrised(
    body: Callable[Concatenate[Twin, P], Awaitable[None]],
) -> Callable[Concatenate[str, P], None]:
    """A function that registers a case: it takes the name of the case, then the arguments of the body."""

    def register(name: str, /, *args: P.args, **kwargs: P.kwargs) -> None:
        _add(body.__module__, name, lambda t: body(t, *args, **kwargs))

    return register


def _add(module: str, name: str, body: Body) -> None:
    full = f"{module.rpartition('.')[2]}.{name}"
    if full in CASES:
        raise ValueError(f"two cases are called {full}")
    CASES[full] = Case(full, body)


def run_case(one: Case, backend: Backend, directory: Path) -> None:
    """Run one case on a loop of its own. Raises Skip, or the mismatch that the case found."""
    asyncio.run(one.run(backend, directory))
