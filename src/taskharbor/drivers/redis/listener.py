"""The connections that hear of new jobs: one per handle, in a cluster one for each node that holds a queue waited for.

A line comes back by itself after an outage and then wakes everybody: what was said meanwhile was not heard. It is asked for a
sign of life from time to time, because a connection that a firewall forgot is silent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import hiredis

from taskharbor.drivers.redis.failures import code_of
from taskharbor.drivers.redis.node import Node
from taskharbor.drivers.redis.packing import pack
from taskharbor.drivers.redis.wire import Wire
from taskharbor.errors import TaskHarborError

log = logging.getLogger("taskharbor.redis")

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two signs of life, and for one of them to come."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_PING = pack(("PING",))

_serials = itertools.count(1)


class Listener:
    """Tells `on_word(channel, number)` of everything said, and `on_doubt(channels)` when something may have been missed."""

    def __init__(
        self,
        node_for: Callable[[str], Node],
        on_word: Callable[[str, int | None], None],
        on_doubt: Callable[[Iterable[str]], None],
    ) -> None:
        self._node_for = node_for
        self._on_word = on_word
        self._on_doubt = on_doubt
        self._lines: dict[Node, _Line] = {}
        self._line_of: dict[str, _Line] = {}

    def follow(self, channel: str) -> _Line:
        """From now on, until the listener is closed. Nothing is missed once `serial` says so."""
        line = self._line_of.get(channel)
        if line is None:
            line = self._line_of[channel] = self._line(self._node_for(channel))
            line.add(channel)
        return line

    def serial(self, channel: str) -> int | None:
        """A number that stays the same as long as every word on the channel is heard; None while none is."""
        line = self._line_of.get(channel)
        return None if line is None else line.confirmed.get(channel)

    async def settled(self, channels: Iterable[str], seconds: float) -> None:
        """Return when all of them are heard, or a connection turned out to be down, or time is up."""
        lines = {self.follow(channel) for channel in channels}
        late = [line.settled() for line in lines if not line.is_settled]
        if late and seconds > 0:
            await asyncio.wait(late, timeout=seconds)

    def move(self) -> None:
        """Queues may have moved to other nodes: listen where they are now."""
        for channel, line in list(self._line_of.items()):
            try:
                node = self._node_for(channel)
            except TaskHarborError:
                continue
            if node is not line.node:
                line.leave(channel)
                del self._line_of[channel]
                self.follow(channel)
                self._on_doubt([channel])
        for node, line in list(self._lines.items()):
            if not line.channels:
                del self._lines[node]
                line.end()

    async def close(self) -> None:
        lines, self._lines = list(self._lines.values()), {}
        self._line_of.clear()
        for line in lines:
            line.end()
        await asyncio.gather(*(line.task for line in lines), return_exceptions=True)

    def _line(self, node: Node) -> _Line:
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _Line(node, self._on_word, self._on_doubt)
        return line


class _Line:
    """One subscribed connection to one server."""

    def __init__(
        self,
        node: Node,
        on_word: Callable[[str, int | None], None],
        on_doubt: Callable[[Iterable[str]], None],
    ) -> None:
        self.node = node
        self.channels: dict[str, bytes] = {}
        self.confirmed: dict[str, int] = {}
        self._names: dict[bytes, str] = {}
        self._on_word = on_word
        self._on_doubt = on_doubt
        self._wire: Wire | None = None
        self._is_lost = asyncio.Event()
        self._has_failed = False
        self._heard_at = 0.0
        self._settled: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.task = self._loop.create_task(self._keep_up(), name="taskharbor listener")

    def add(self, channel: str) -> None:
        raw = channel.encode()
        self.channels[channel] = raw
        self._names[raw] = channel
        if self._wire is not None and self._wire.is_open:
            self._wire.tell(pack(("SUBSCRIBE", raw)))

    def leave(self, channel: str) -> None:
        raw = self.channels.pop(channel)
        del self._names[raw]
        self.confirmed.pop(channel, None)
        if self._wire is not None and self._wire.is_open:
            self._wire.tell(pack(("UNSUBSCRIBE", raw)))

    def end(self) -> None:
        self.task.cancel()

    @property
    def is_settled(self) -> bool:
        return self._has_failed or len(self.confirmed) == len(self.channels)

    def settled(self) -> asyncio.Future[None]:
        if self._settled is None or self._settled.done():
            self._settled = self._loop.create_future()
        return self._settled

    def _settle(self) -> None:
        if self._settled is not None and not self._settled.done() and self.is_settled:
            self._settled.set_result(None)

    async def _keep_up(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._listen_once()
                pause = _FIRST_PAUSE
            except (TaskHarborError, OSError):
                pass
            self.confirmed.clear()
            self._has_failed = True
            self._settle()
            self._on_doubt(list(self.channels))
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _listen_once(self) -> None:
        """Listen until the connection breaks."""
        self._is_lost.clear()
        wire = await self.node.another_wire()
        try:
            self._wire = wire
            wire.on_message = self._hear
            wire.on_lost = self._is_lost.set
            if self.channels:
                wire.tell(pack(("SUBSCRIBE", *self.channels.values())))
            while wire.is_open:
                if await _comes(self._is_lost, _PROBE):
                    return
                asked_at = self._loop.time()
                wire.tell(_PING)
                if await _comes(self._is_lost, _PATIENCE) or self._heard_at < asked_at:
                    return
        finally:
            self._wire = None
            wire.on_lost = lambda: None
            wire.abort("the listener lets go")

    def _hear(self, reply: Any) -> None:
        self._heard_at = self._loop.time()
        if isinstance(reply, hiredis.ReplyError):
            self._refused(reply)
            return
        if not isinstance(reply, list):
            return
        kind, raw = reply[0], reply[1]
        channel = self._names.get(raw)
        if channel is None:
            return
        if kind == b"message":
            said = reply[2]
            self._on_word(channel, int(said) if said.isdigit() else None)
        elif kind == b"subscribe":
            self.confirmed[channel] = next(_serials)
            self._has_failed = False
            self._settle()
            # What was said before was not heard.
            self._on_doubt([channel])

    def _refused(self, error: hiredis.ReplyError) -> None:
        if code_of(error) == "NOPERM":
            log.warning(
                "%s: this user may not subscribe to the channels of its queues (ACL: &<prefix>*); idle workers look by "
                "themselves instead",
                self.node.address,
            )
        self._is_lost.set()


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
