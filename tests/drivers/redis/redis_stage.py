"""What the tests of connections share: functions of their own, and somebody who waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from taskharbor.drivers.operations import Wait
from taskharbor.drivers.redis.driver import ChannelListener
from taskharbor.drivers.redis.library import TEXT, Library, RedisCall
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import RedisStore, keys_of
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable, InvalidRequest
from worker.stage import PATIENCE, eventually

STAGE = Library(
    TEXT
    + """
define('count', {}, function(keys, args) return redis.call('INCRBY', keys[1], args[1]) end)
define('read', {'no-writes'}, function(keys, args) return redis.call('GET', keys[1]) end)
define('once', {}, function(keys, args)
  if is_again and redis.call('EXISTS', keys[1]) == 1 then return 'recognised' end
  redis.call('INCR', keys[1])
  return 'done'
end)
define('stir', {}, function(keys, args)
  return redis.call('PUBLISH', args[1], redis.call('HINCRBY', keys[1], 'moves', 1))
end)
define('read_two', {'no-writes'}, function(keys, args) return redis.call('MGET', keys[1], keys[2]) end)
define('fail', {}, function(keys, args) return redis.error_reply(args[1]) end)
define('nothing', {}, function() return 'was there' end)
define('endless', {}, function(keys, args) while true do end end)
"""
)
"""The driver's own functions, and some for tests. `count` is not safe to repeat, so that a repetition is seen. `once` recognises
on its repetition what the first try did."""


def call(function: str, key: str, *args: Any) -> list[RedisCall]:
    return [RedisCall(function, [key], args)]


@contextlib.asynccontextmanager
async def connected(url: str, options: str = "") -> AsyncIterator[RedisStore]:
    with nothing_unhandled():
        connections = RedisStore(parse_url(url + options), STAGE)
        await connections.open()
        try:
            yield connections
        finally:
            await connections.close()


async def refused(url: str) -> str:
    """Why a store cannot be opened."""
    with pytest.raises((BackendUnavailable, InvalidRequest)) as error:
        await RedisStore(parse_url(url)).open()
    return str(error.value)


async def insist(connections: RedisStore, key: str) -> int:
    """Count, as a worker does: until somebody answers. Right after a failover the servers may not agree yet."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                (answer,) = await connections.run(call("count", key, 1))
            except BackendUnavailable:
                await asyncio.sleep(0.01)
                continue
            return int(answer)


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

    def __init__(self, connections: RedisStore) -> None:
        self.listener = ChannelListener(connections)
        self._connections = connections
        self._seen: dict[tuple[str, ...], str] = {}

    async def quiet(self, *queues: str) -> None:
        """Until the handle is subscribed, unless it has no notifications, and has nothing more to say."""
        for _ in range(500):
            is_told = self.listener.listen(queues) is None or not self._connections.options.notify
            if not await self(*queues, timeout=0.02) and is_told:
                return
        raise AssertionError("it does not fall silent")

    async def asleep(self, *queues: str) -> asyncio.Task[bool]:
        """A wait that is under way. One that an earlier message ends, which took its time from node to node, is begun again."""
        waiting: asyncio.Task[bool] | None = None
        while waiting is None or waiting.done():
            await self.quiet(*queues)
            waiting = asyncio.create_task(self(*queues))
            await eventually(partial(self._is_asleep, waiting, *queues))
        return waiting

    def _is_asleep(self, waiting: asyncio.Task[bool], *queues: str) -> bool:
        """It has looked at its queues and waits for a message, or it is over."""
        shared = self._connections.server_for(keys_of("taskharbor:", queues[0]).channel)._shared
        is_awaited = self.listener.notifications.is_awaited(queues[0])
        return waiting.done() or (is_awaited and (shared is None or not shared._pending))

    async def __call__(self, *queues: str, now: int = 0, timeout: float = PATIENCE) -> bool:
        told = await wait(self.listener, Wait(list(queues), now, timeout, self._seen.get(queues)))
        self._seen[queues] = told.seen
        return told.woken
