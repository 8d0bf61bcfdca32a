"""Waiting without sleeping: the loop goes round until it is so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from broker.broker_client import Client
from taskharbor.testing.broker import RunningBroker, broker_thread

PATIENCE = 20.0


async def rounds_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


def wait_until(broker: RunningBroker, is_so: Callable[[], bool]) -> None:
    """On the broker's own loop, so that what is looked at stands still."""
    asyncio.run_coroutine_threadsafe(rounds_until(is_so), broker.loop).result(PATIENCE)


@contextmanager
def waiting_claim(
    asked: dict[str, Any] | None = None, **config: Any
) -> Iterator[tuple[RunningBroker, Future[list[dict[str, Any]]], Client]]:
    """A broker, a claim that waits there, and another client."""
    with (
        ThreadPoolExecutor() as pool,
        broker_thread("memory://", **config) as broker,
        Client(broker.url) as waiting,
        Client(broker.url) as other,
    ):
        claimed = pool.submit(waiting.claim, wait_seconds=PATIENCE, **(asked or {}))
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        yield broker, claimed, other
