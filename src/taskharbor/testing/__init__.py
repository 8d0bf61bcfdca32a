"""What users' tests import: jobs on a private store, a clock to step, and questions about what was enqueued.

    from taskharbor.testing import drain, assert_enqueued, memory_store

    def test_signup():
        with memory_store(harbor):
            sign_up("ada@example.org")
            assert_enqueued(harbor, send_mail, args={"to": "ada@example.org"})
            assert drain(harbor).done == 1

pytest is not needed; with it, the fixtures of `taskharbor.testing.plugin` are there without an import. Names are
loaded on first use, because that plugin makes every pytest run of every user import this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskharbor.clock import FakeClock
    from taskharbor.testing.assertions import assert_enqueued, enqueued, refute_enqueued
    from taskharbor.testing.draining import DrainReport, drain, drain_async
    from taskharbor.testing.execution import Executed
    from taskharbor.testing.inlining import inline, run_inline, run_inline_async
    from taskharbor.testing.session import HarborTesting
    from taskharbor.testing.store import memory_store

__all__ = [
    "DrainReport",
    "Executed",
    "FakeClock",
    "HarborTesting",
    "assert_enqueued",
    "drain",
    "drain_async",
    "enqueued",
    "inline",
    "memory_store",
    "refute_enqueued",
    "run_inline",
    "run_inline_async",
]

_HOMES = {
    "taskharbor.clock": ("FakeClock",),
    "taskharbor.testing.assertions": ("assert_enqueued", "enqueued", "refute_enqueued"),
    "taskharbor.testing.draining": ("DrainReport", "drain", "drain_async"),
    "taskharbor.testing.execution": ("Executed",),
    "taskharbor.testing.inlining": ("inline", "run_inline", "run_inline_async"),
    "taskharbor.testing.session": ("HarborTesting",),
    "taskharbor.testing.store": ("memory_store",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
