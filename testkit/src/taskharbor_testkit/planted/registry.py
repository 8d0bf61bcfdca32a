"""The list of planted bugs. A bug is a subclass of the reference model: its class name, in snake case, is the bug's name,
and the first line of its docstring is the rule it breaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from taskharbor_testkit.model import Model, ModelDriver

PLANTED: dict[str, Callable[[], ModelDriver]] = {}
"""Name -> a broken driver on a fresh store. Its clones share the store and the bug."""

RULES: dict[str, str] = {}
"""Name -> the rule that the bug breaks, in one line."""


class Bug(Model):
    """A bug in the store. Each subclass registers itself, unless its name begins with an underscore."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(cls, lambda: ModelDriver(cls()))


class HandleBug(ModelDriver):
    """A bug in a handle on the store."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(cls, cls)


def _register(broken: type, factory: Callable[[], ModelDriver]) -> None:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", broken.__name__).lower()
    if name.startswith("_"):
        return
    if name in PLANTED:
        raise ValueError(f"two planted bugs are called {name}")
    RULES[name] = (inspect.getdoc(broken) or "").splitlines()[0]
    PLANTED[name] = factory
