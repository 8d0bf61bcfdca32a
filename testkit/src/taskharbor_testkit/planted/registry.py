"""How a planted bug is written down: a class whose name is the bug's and whose first line is the rule it breaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver, MemoryStore

PLANTED: dict[str, Callable[[], Driver]] = {}
"""Name -> a broken driver on a fresh store. Its clones share the store, and the bug."""

RULES: dict[str, str] = {}
"""Name -> what the bug breaks, in one line."""

Broken = TypeVar("Broken", bound=type[MemoryStore] | type[MemoryDriver])


def planted(broken: Broken) -> Broken:
    """Register a broken store, or a broken handle, under its class name in snake case."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", broken.__name__).lower()
    if name in PLANTED:
        raise ValueError(f"two planted bugs are called {name}")
    RULES[name] = (inspect.getdoc(broken) or "").splitlines()[0]
    PLANTED[name] = _factory(broken)
    return broken


def _factory(broken: type[MemoryStore] | type[MemoryDriver]) -> Callable[[], Driver]:
    if issubclass(broken, MemoryStore):
        return lambda: MemoryDriver(broken())
    return lambda: broken()
