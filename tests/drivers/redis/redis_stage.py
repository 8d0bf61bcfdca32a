"""What the tests of connections share: functions of their own, and a way to wait for something without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from taskharbor.drivers.operations import Wait
from taskharbor.drivers.redis.library import TEXT, Call, Library
from taskharbor.drivers.redis.listener import Listener
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.waiting import wait
from taskharbor_testkit.servers import RedisServer

T = TypeVar("T")

PATIENCE = 30.0

STAGE = Library(
    TEXT
    + """
define('count', {}, function(keys, args) return redis.call('INCRBY', keys[1], args[1]) end)
define('read', {'no-writes'}, function(keys, args) return redis.call('GET', keys[1]) end)
define('once', {}, function(keys, args)
  if args[1] == '1' and redis.call('EXISTS', keys[1]) == 1 then return 'recognised' end
  redis.call('INCR', keys[1])
  return 'done'
end)
define('stir', {}, function(keys, args)
  return redis.call('PUBLISH', args[1], redis.call('HINCRBY', keys[1], 'moves', 1))
end)
define('read_two', {'no-writes'}, function(keys, args) return redis.call('MGET', keys[1], keys[2]) end)
define('echo', {}, function(keys, args) return {args[1], #keys, false, {keys[1]}} end)
define('fail', {}, function(keys, args) return redis.error_reply(args[1]) end)
define('nothing', {}, function() return 'was there' end)
define('endless', {}, function(keys, args) while true do end end)
"""
)
"""The driver's own functions, and some for tests."""
COUNT = "count"
"""Not safe to repeat, so that a repetition is seen."""
READ = "read"
ONCE = "once"
"""Recognises on its repetition what the first try did."""


def load_stage(server: RedisServer) -> None:
    """So that the first request for a function is the one that runs it."""
    if not server.execute("FUNCTION", "LIST", "LIBRARYNAME", STAGE.name):
        server.execute("FUNCTION", "LOAD", STAGE.source)


def call(function: str, key: str, *args: Any) -> Callable[[int], list[Call]]:
    return lambda _: [Call(function, [key], args)]


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Store]:
    connections = Store(parse_url(url), STAGE)
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

    def __init__(self, connections: Store) -> None:
        self.listener = Listener(connections)
        self._seen: dict[tuple[str, ...], str] = {}

    async def __call__(self, *queues: str, now: int = 0, timeout: float = PATIENCE) -> bool:
        told = await wait(self.listener, Wait(list(queues), now, timeout, self._seen.get(queues)))
        self._seen[queues] = told.seen
        return told.woken
