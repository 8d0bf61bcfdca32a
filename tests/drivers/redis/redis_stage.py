"""What the tests of connections share: scripts of their own, and a way to wait for something without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from taskharbor.drivers.operations import Wait
from taskharbor.drivers.redis.connections import Call, Connections
from taskharbor.drivers.redis.keys import keys_of
from taskharbor.drivers.redis.listener import Listener
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.scripts import Script, made
from taskharbor.drivers.waiting import wait

T = TypeVar("T")

PATIENCE = 30.0

COUNT = made("count", "return redis.call('INCRBY', KEYS[1], ARGV[1])")
"""Not safe to repeat, so that a repetition is seen."""
READ = made("read", "return redis.call('GET', KEYS[1])", writes=False)
ONCE = made(
    "once",
    """
    if ARGV[1] == '1' and redis.call('EXISTS', KEYS[1]) == 1 then return 'recognised' end
    redis.call('INCR', KEYS[1])
    return 'done'
    """,
)
"""Recognises on its repetition what the first try did."""


def call(script: Script, key: str, *args: Any) -> Callable[[int], list[Call]]:
    return lambda _: [Call(script, [key], args)]


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connections]:
    connections = Connections(parse_url(url))
    await connections.open()
    try:
        yield connections
    finally:
        await connections.close()


async def soon(waited_for: Awaitable[T]) -> T:
    """Nothing is asserted of how long it takes, but that it ends."""
    async with asyncio.timeout(PATIENCE):
        return await waited_for


async def until(condition: Callable[[], bool], what: str) -> None:
    """Ask until it is so, with the event loop running in between."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def nothing_unhandled() -> Iterator[None]:
    """No callback and no forgotten task of the loop ends with an exception that nobody sees."""
    loop = asyncio.get_running_loop()
    troubles: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
    if troubles:
        raise AssertionError("; ".join(f"{one['message']}: {one.get('exception')!r}" for one in troubles))


class Waits:
    """Waits through a listener of its own, and passes on what it was told."""

    def __init__(self, connections: Connections) -> None:
        self.listener = Listener(connections, partial(keys_of, connections.options.prefix))
        self._seen: dict[tuple[str, ...], str] = {}

    async def __call__(self, *queues: str, now: int = 0, timeout: float = PATIENCE) -> bool:
        told = await wait(self.listener, Wait(list(queues), now, timeout, self._seen.get(queues)))
        self._seen[queues] = told.seen
        return told.woken
