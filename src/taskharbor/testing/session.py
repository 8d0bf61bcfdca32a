"""`HarborTesting`: the object that the pytest fixtures give to a test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from taskharbor.clock import FakeClock
from taskharbor.harbor import Harbor
from taskharbor.testing import assertions, draining, inlining

P = ParamSpec("P")
T = TypeVar("T")


def _on_harbor(function: Callable[Concatenate[Harbor, P], T]) -> Callable[Concatenate[HarborTesting, P], T]:
    """Make a method of a function whose first argument is the app under test."""

    @functools.wraps(function)
    def call(self: HarborTesting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(self.harbor, *args, **kwargs)

    return call


class HarborTesting:
    """An app on a private store, with this package's functions as methods."""

    def __init__(self, harbor: Harbor) -> None:
        self.harbor = harbor

    @property
    def clock(self) -> FakeClock:
        """The clock that stands still."""
        return draining.clock_of(self.harbor)

    def advance(self, by: timedelta | float) -> None:
        """Let time pass, by a timedelta or by seconds."""
        self.clock.advance(by)

    drain = _on_harbor(draining.drain)
    drain_async = _on_harbor(draining.drain_async)
    inline = _on_harbor(inlining.inline)
    enqueued = _on_harbor(assertions.enqueued)
    assert_enqueued = _on_harbor(assertions.assert_enqueued)
    refute_enqueued = _on_harbor(assertions.refute_enqueued)
