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
    from taskharbor.testing.draining import drain, drain_async
    from taskharbor.testing.execution import Executed
    from taskharbor.testing.inlining import inline, run_inline, run_inline_async
    from taskharbor.testing.report import DrainReport
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
    "DrainReport": "taskharbor.testing.report",
    "Executed": "taskharbor.testing.execution",
    "FakeClock": "taskharbor.clock",
    "HarborTesting": "taskharbor.testing.session",
    "assert_enqueued": "taskharbor.testing.assertions",
    "drain": "taskharbor.testing.draining",
    "drain_async": "taskharbor.testing.draining",
    "enqueued": "taskharbor.testing.assertions",
    "inline": "taskharbor.testing.inlining",
    "memory_store": "taskharbor.testing.store",
    "refute_enqueued": "taskharbor.testing.assertions",
    "run_inline": "taskharbor.testing.inlining",
    "run_inline_async": "taskharbor.testing.inlining",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
