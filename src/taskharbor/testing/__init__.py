"""Helpers for users' tests: jobs on a private store, a clock to move, and assertions about enqueued jobs.

    from taskharbor.testing import drain, assert_enqueued, memory_store

    def test_signup():
        with memory_store(harbor):
            sign_up("ada@example.org")
            assert_enqueued(harbor, send_mail, args={"to": "ada@example.org"})
            assert drain(harbor).done == 1

The modules, in the order in which a test uses them:

- `plugin`: the pytest fixtures.
- `inlining`: a private store for an app; jobs that run when they are enqueued; all of this as methods of one object.
- `assertions`: assertions about enqueued jobs.
- `draining`: runs all runnable jobs in this thread.
- `broker`: a real broker in a thread.

pytest is not needed. With it, the fixtures of `plugin` are there without an import. Names are loaded on first use, because that
plugin makes every pytest run of every user import this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskharbor.clock import FakeClock as FakeClock
    from taskharbor.testing.assertions import assert_enqueued as assert_enqueued
    from taskharbor.testing.assertions import enqueued as enqueued
    from taskharbor.testing.assertions import refute_enqueued as refute_enqueued
    from taskharbor.testing.draining import DrainReport as DrainReport
    from taskharbor.testing.draining import Executed as Executed
    from taskharbor.testing.draining import drain as drain
    from taskharbor.testing.draining import drain_async as drain_async
    from taskharbor.testing.inlining import HarborTesting as HarborTesting
    from taskharbor.testing.inlining import inline as inline
    from taskharbor.testing.inlining import memory_store as memory_store
    from taskharbor.testing.inlining import run_inline as run_inline
    from taskharbor.testing.inlining import run_inline_async as run_inline_async

_HOMES = {
    "taskharbor.clock": "FakeClock",
    "taskharbor.testing.assertions": "assert_enqueued enqueued refute_enqueued",
    "taskharbor.testing.draining": "DrainReport Executed drain drain_async",
    "taskharbor.testing.inlining": "HarborTesting inline memory_store run_inline run_inline_async",
}
_home_of = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_home_of)


def __getattr__(name: str) -> Any:
    if name not in _home_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_home_of[name]), name)
