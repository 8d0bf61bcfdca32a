"""What happens around a handler: recover, timeout, validate, then the user's own, then the call.

A middleware is `async def mine(job, call_next)`: do something, `return await call_next(job)`, do something. One
feature a file; `compose` makes one callable of them, once per handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from taskharbor.context import Job

Call: TypeAlias = Callable[[Job], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Job, Call], Awaitable[Any]]


def compose(middleware: Sequence[Middleware], innermost: Call) -> Call:
    """The first middleware is the outermost."""
    call = innermost
    for layer in reversed(middleware):
        call = _wrap(layer, call)
    return call


def _wrap(layer: Middleware, call_next: Call) -> Call:
    def call(job: Job) -> Awaitable[Any]:
        return layer(job, call_next)

    return call


__all__ = ["Call", "Middleware", "compose"]
