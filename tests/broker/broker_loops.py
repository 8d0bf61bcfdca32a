"""Waiting without sleeping: the loop goes round until it is so."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from taskharbor.testing.broker import RunningBroker

P = ParamSpec("P")
PATIENCE = 20.0
_ROUNDS = 2_000_000


async def rounds_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        for _ in range(_ROUNDS):
            if is_so():
                return
            await asyncio.sleep(0)
    raise AssertionError("it never became so")


def wait_until(broker: RunningBroker, is_so: Callable[[], bool]) -> None:
    """On the broker's own loop, so that what is looked at stands still."""
    asyncio.run_coroutine_threadsafe(rounds_until(is_so), broker.loop).result(PATIENCE)


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
