"""Waiting without sleeping: the loop goes round until it is so. And leadership as a test decides it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from broker.broker_client import Client
from taskharbor.drivers.contract import Driver
from taskharbor.testing.broker import RunningBroker, broker_thread

PATIENCE = 20.0


class Election:
    """Leadership as a test says it. (The store's own is tested where it lives.)"""

    def __init__(self, leader_url: str | None = None, *, is_leader: bool = False) -> None:
        self.is_leader = is_leader
        self.leader_url = leader_url
        self.runs = self.resigned = self.looks = 0

    async def run(self) -> None:
        self.runs += 1
        await asyncio.Event().wait()

    async def resign(self) -> None:
        self.resigned += 1
        self.is_leader = False

    def look_now(self) -> None:
        self.looks += 1


async def rounds_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


def wait_until(broker: RunningBroker, is_so: Callable[[], bool]) -> None:
    """On the broker's own loop, so that what is looked at stands still."""
    asyncio.run_coroutine_threadsafe(rounds_until(is_so), broker.loop).result(PATIENCE)


@contextmanager
def waiting_claim(
    store: str | Driver = "memory://", *, asked: dict[str, Any] | None = None, **config: Any
) -> Iterator[tuple[RunningBroker, Future[list[dict[str, Any]]], Client]]:
    """A broker, a claim that waits there, and another client."""
    with (
        ThreadPoolExecutor() as pool,
        broker_thread(store, **config) as broker,
        Client(broker.url) as waiting,
        Client(broker.url) as other,
    ):
        claimed = pool.submit(waiting.claim, wait_seconds=PATIENCE, **(asked or {}))
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        yield broker, claimed, other
