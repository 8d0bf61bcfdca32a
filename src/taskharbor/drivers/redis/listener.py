"""Subscriptions to the channels of queues, and what Redis brings to `waiting.wait`.

Every script that may have made something runnable raises the queue's `moves`, which is its version, and publishes on its channel;
the message only says when to look. A handle has one subscribed connection, in a cluster one for each server that holds a queue
waited for. It comes back by itself after an outage and then wakes all waiters: messages of that time were not heard. It is probed
from time to time, because a connection that a firewall forgot is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import Server, SharedConnection, pack
from taskharbor.drivers.redis.errors import code_of
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Micros

log = logging.getLogger("taskharbor.redis")

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""


class Listener:
    """One handle's source of `waiting.wait`."""

    trusts_notifications = True

    def __init__(self, store: Store) -> None:
        self.notifications = Notifications()
        self.emptied: dict[str, str] = {}
        """By queue, its moves as a claim saw them that took all there was: nothing older is left to be woken for."""
        self._store = store
        self._subscribers: dict[Server, _Subscriber] = {}
        self._subscriber_of: dict[str, _Subscriber] = {}
        if store.cluster is not None:
            store.cluster.on_change = self._move

    async def close(self) -> None:
        tasks = [subscriber.task for subscriber in self._subscribers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def listen(self, queues: Sequence[str]) -> float | None:
        options = self._store.options
        if not options.notify:
            return options.poll
        confirmed = [queue in self._subscriber(queue).confirmed for queue in queues]
        return None if all(confirmed) else options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        answers = await self._store.ask_all([self._store.call("look", queue, since) for queue in queues])
        moves = [str(moves) for moves, _ in answers]
        seen = (version or "").split(",")
        if len(seen) == len(moves):
            seen = [self.emptied.pop(queue, one) for queue, one in zip(queues, seen, strict=True)]
        return Look(
            ",".join(moves), moves != seen, min((due for _, due in answers if due >= 0), default=None)
        )

    def _subscriber(self, queue: str) -> _Subscriber:
        subscriber = self._subscriber_of.get(queue)
        if subscriber is None:
            channel = self._store.keys(queue).channel
            server = self._store.server_for(channel)
            subscriber = self._subscribers.get(server)
            if subscriber is None:
                subscriber = self._subscribers[server] = _Subscriber(server, self.notifications)
            self._subscriber_of[queue] = subscriber
            subscriber.add(queue, channel)
        return subscriber

    def _move(self) -> None:
        """Queues may have moved to other nodes: subscribe where they are now."""
        for queue, subscriber in list(self._subscriber_of.items()):
            channel = self._store.keys(queue).channel
            try:
                is_moved = self._store.server_for(channel) is not subscriber.server
            except TaskHarborError:
                continue
            if is_moved:
                subscriber.remove(queue, channel)
                del self._subscriber_of[queue]
                self._subscriber(queue)
                self.notifications.notify((queue,))
        for server, subscriber in list(self._subscribers.items()):
            if not subscriber.queues:
                subscriber.task.cancel()
                del self._subscribers[server]


class _Subscriber:
    """One subscribed connection to one server."""

    def __init__(self, server: Server, notifications: Notifications) -> None:
        self.server = server
        self.queues: dict[bytes, str] = {}
        """By channel."""
        self.confirmed: set[str] = set()
        """The queues of which every message is heard now."""
        self._notifications = notifications
        self._connection: SharedConnection | None = None
        self._is_lost = asyncio.Event()
        self._is_alive = False
        self.task = asyncio.create_task(keep_connected(self._listen_once, self._on_lost))

    def add(self, queue: str, channel: str) -> None:
        self.queues[channel.encode()] = queue
        self._send("SUBSCRIBE", [channel])

    def remove(self, queue: str, channel: str) -> None:
        del self.queues[channel.encode()]
        self.confirmed.discard(queue)
        self._send("UNSUBSCRIBE", [channel])

    def _send(self, command: str, channels: Iterable[str | bytes]) -> None:
        if self._connection is not None and self._connection.is_open:
            self._connection.tell(pack((command, *channels)))

    def _on_lost(self) -> None:
        self.confirmed.clear()
        self._notifications.notify(self.queues.values())

    async def _listen_once(self) -> None:
        """Listen until the connection breaks."""
        self._is_lost.clear()
        connection = await self.server.another_connection()
        try:
            self._connection = connection
            connection.on_message = self._receive
            connection.on_lost = self._is_lost.set
            if self.queues:
                self._send("SUBSCRIBE", self.queues)
            while connection.is_open and not await set_within(self._is_lost, _PROBE):
                self._is_alive = False
                self._send("PING", ())
                if await set_within(self._is_lost, _PATIENCE) or not self._is_alive:
                    return
        finally:
            self._connection = None
            connection.on_lost = lambda: None
            connection.abort("the listener lets go")

    def _receive(self, reply: Any) -> None:
        self._is_alive = True
        if isinstance(reply, ResponseError):
            if code_of(reply) == "NOPERM":
                log.warning(
                    "%s: this user may not subscribe to the channels of its queues (ACL: &<prefix>*); idle workers look by "
                    "themselves instead",
                    self.server.address,
                )
            self._is_lost.set()
        elif isinstance(reply, list) and (queue := self.queues.get(reply[1])) is not None:
            if reply[0] == b"subscribe":
                # Messages from before were not heard, so this one notifies too.
                self.confirmed.add(queue)
            self._notifications.notify((queue,))
