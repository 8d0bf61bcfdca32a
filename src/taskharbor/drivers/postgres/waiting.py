"""Waiting for work: asleep until a queue stirs, a job or lease known at the start comes due, or time is up.

What may have become runnable is told by the `moves` that a snapshot does not show; NOTIFY only says when to look. So a
wake-up cannot be missed, whether or not anybody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Connections, Session
from taskharbor.drivers.postgres.listener import Listener, Ring
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import SECOND, Micros

_BEFORE_ALL: Micros = -(2**62)

Look: TypeAlias = Callable[
    [Sequence[str], Sequence[str | None], Sequence[Micros]], Awaitable[tuple[str, bool, Micros | None]]
]
"""Queues, the snapshots they were last seen in, since when -> snapshot now, whether one stirred, what comes due next."""


async def look(
    session: Session, schema: str, queues: Sequence[str], seen: Sequence[str | None], since: Sequence[Micros]
) -> tuple[str, bool, Micros | None]:
    values = [arrays.text_array(queues), arrays.escaped_texts(seen), arrays.int_array(since)]
    ((snapshot, is_stirred, due),) = await session.rows(load("inspect", schema)["watch"], values)
    return snapshot, is_stirred, due


class Watcher:
    """One handle's waits, and what it has seen."""

    def __init__(
        self, options: Options, connections: Connections, look: Look, emptied: dict[str, str]
    ) -> None:
        self._options = options
        self._connections = connections
        self._look = look
        self._emptied = emptied
        """Filled by claims: what a claim has seen nobody needs to be woken for."""
        self._listener: Listener | None = None
        self._seen: dict[str, str] = {}
        self._since: dict[str, Micros] = {}
        """Per queue, the time of the last wait that returned. What was due by then its caller has tried to claim; so a
        due job that cannot run (paused, no room) does not keep the waiter spinning."""

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    async def wait(self, queues: Sequence[str], now: Micros, timeout: float) -> bool:
        names = list(dict.fromkeys(queues))
        rung = Ring()
        listener = await self._listening()
        # Before the first look: a ring after it must not be lost.
        for queue in names:
            if listener is not None:
                listener.watch(queue, rung)
        try:
            return await self._wait(names, now, timeout, rung, listener)
        finally:
            for queue in names:
                if listener is not None:
                    listener.unwatch(queue, rung)

    async def _wait(
        self, queues: list[str], now: Micros, timeout: float, rung: Ring, listener: Listener | None
    ) -> bool:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._seen.update({queue: self._emptied.pop(queue) for queue in queues if queue in self._emptied})
        since = [self._since.get(queue, _BEFORE_ALL) for queue in queues]
        snapshot, is_stirred, due = await self._look(
            queues, [self._seen.get(queue) for queue in queues], since
        )
        is_due = due is not None and due <= now
        delay = 0.0 if is_due else timeout
        if due is not None and 0 < due - now <= timeout * SECOND:
            delay = (due - now) / SECOND
            is_due = True
        while not is_stirred and (left := start + delay - loop.time()) > 0:
            is_told = listener is not None and listener.is_up.is_set()
            if await rung.is_set_within(left if is_told else min(left, self._options.poll)):
                is_stirred = True
                # Not seen in a snapshot: what rang is still to come for the next look, unless a claim sees it first.
            elif not is_told:
                snapshot, is_stirred, _ = await self._look(
                    queues, [self._seen.get(queue, snapshot) for queue in queues], since
                )
        # Only a wait that returns has seen anything.
        self._seen.update(dict.fromkeys(queues, snapshot))
        self._since.update(dict.fromkeys(queues, now))
        return is_stirred or is_due

    async def _listening(self) -> Listener | None:
        if not self._options.notify:
            return None
        loop = asyncio.get_running_loop()
        if self._listener is not None and self._listener.loop is not loop:
            self._listener = None
        if self._listener is None:
            self._listener = Listener(self._options, self._connections)
        return self._listener
