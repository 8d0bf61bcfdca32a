"""Subscriptions to the channels of queues, and the source for `waiting.wait`.

Every function that may have made something runnable raises the queue's `moves`, which is its version, and publishes on its
channel. The message only says when to look. A handle has one subscribed connection; a cluster carries messages to all nodes.
After an outage the handle subscribes again and wakes all waiters, because messages of that time were lost. The connection is
probed from time to time: if a firewall forgot it, it is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import SharedConnection, pack
from taskharbor.drivers.redis.errors import code_of
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within
from taskharbor.jobs import Micros

log = logging.getLogger("taskharbor.redis")

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""


class ChannelListener:
    """One handle's source for `waiting.wait`."""

    trusts_notifications = True

    def __init__(self, store: RedisStore) -> None:
        self.notifications = Notifications()
        self.emptied: dict[str, str] = {}
        """The number of each queue's moves, as seen by a claim that left no job. Older changes need not wake anybody."""
        self.confirmed: set[str] = set()
        """The queues whose messages all arrive now."""
        self._store = store
        self._queues: dict[str, str] = {}
        """Queues by channel."""
        self._connection: SharedConnection | None = None
        self._is_alive = False
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.confirmed.clear()

    def listen(self, queues: Sequence[str]) -> float | None:
        options = self._store.options
        if not options.notify:
            return options.poll
        added = {self._store.keys(queue).channel: queue for queue in queues}.items() - self._queues.items()
        if added:
            self._queues.update(added)
            self._send("SUBSCRIBE", dict(added))
        if self._task is None and self._store.is_open:
            self._task = asyncio.create_task(keep_connected(self._listen_once, self._on_lost))
        return None if self.confirmed.issuperset(queues) else options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        answers = (await self._store.ask_queues("look", since, dict.fromkeys(queues, ()))).values()
        moves = [str(moves) for moves, _ in answers]
        seen = (version or "").split(",")
        if len(seen) == len(moves):
            seen = [self.emptied.pop(queue, one) for queue, one in zip(queues, seen, strict=True)]
        next_due = min((due for _, due in answers if due >= 0), default=None)
        return Look(",".join(moves), moves != seen, next_due)

    def _send(self, command: str, channels: Iterable[str] = ()) -> None:
        if self._connection is not None:
            self._connection.tell(pack((command, *channels)))

    def _on_lost(self) -> None:
        self.confirmed.clear()
        self.notifications.notify(self._queues.values())

    async def _listen_once(self) -> None:
        """Listen until the connection breaks. In a cluster: to the node that holds the first queue."""
        server = self._store.server_for(next(iter(self._queues)))
        self._connection = connection = await server.another_connection()
        try:
            connection.on_message = self._receive
            self._send("SUBSCRIBE", self._queues)
            while not await set_within(connection.lost, _PROBE):
                self._is_alive = False
                self._send("PING")
                if await set_within(connection.lost, _PATIENCE) or not self._is_alive:
                    return
        finally:
            self._connection = None
            connection.abort("the listener lets go")

    def _receive(self, reply: Any) -> None:
        self._is_alive = True
        if isinstance(reply, ResponseError):
            if code_of(reply) == "NOPERM":
                log.warning(
                    "%s: this user may not subscribe to the channels of its queues (ACL: &<prefix>*); idle workers look by "
                    "themselves instead",
                    self._store.options.place,
                )
            if self._connection is not None:
                self._connection.abort(str(reply))
        elif isinstance(reply, list) and (queue := self._queues.get(reply[1].decode())) is not None:
            if reply[0] == b"subscribe":
                # Messages from before the subscription were lost, so its confirmation notifies too.
                self.confirmed.add(queue)
            self.notifications.notify((queue,))
