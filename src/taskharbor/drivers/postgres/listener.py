"""The connection that hears NOTIFY and claims the jobs it heard of, and what PostgreSQL brings to `waiting.wait`.

The version of a queue is a snapshot: a stirring move that the snapshot does not show is a change. NOTIFY only says when to
look. The connection comes back by itself after an outage, and wakes all waiters: notifications of that time were not heard. It is
probed from time to time, because a connection that a firewall forgot is silent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import psycopg

from taskharbor.drivers.postgres.connections import Connections, Session, connect
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.rows import escaped_texts, text_array
from taskharbor.drivers.postgres.statements import call, channel, quoted
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within
from taskharbor.jobs import Micros

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""
_SNAPSHOT = re.compile(r"\d+:\d+:[\d,]*")


class Listener:
    """One handle's source of `waiting.wait`."""

    trusts_notifications = True

    def __init__(self, options: Options, connections: Connections, emptied: dict[str, str]) -> None:
        self.notifications = Notifications()
        self._options = options
        self._connections = connections
        self._emptied = emptied
        """By queue, the hint of a claim that took all there was: nothing older is left to be woken for."""
        self._task: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self.is_up = False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def listen(self, queues: Sequence[str]) -> float | None:
        if self._options.notify and self._task is None:
            self._task = asyncio.create_task(keep_connected(self._listen_once, self._on_lost))
        return None if self.is_up else self._options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        seen = version if version is not None and _SNAPSHOT.fullmatch(version) else None
        hints = escaped_texts([self._emptied.pop(queue, None) for queue in queues])
        statement = call("watch", self._options.schema, 4)
        ((snapshot, is_changed, due),) = await self._connections.run(
            lambda session: session.rows(statement, [text_array(queues), hints, seen, since])
        )
        return Look(snapshot, is_changed or seen is None, due)

    def _on_lost(self) -> None:
        self.is_up = False
        self.notifications.notify()

    async def _listen_once(self) -> None:
        """Listen until the connection breaks."""
        session = Session(await connect(self._options), self._options)
        connection = session.connection
        self._broken.clear()
        try:
            connection.add_notify_handler(lambda notify: self.notifications.notify((notify.payload,)))
            await connection.execute(f"LISTEN {quoted(channel(self._options.schema))}")
            session.is_fresh = False
            session.watch.on_unasked = lambda: self._read(session)
            session.watch.begin()
            self.is_up = True
            # Notifications from before LISTEN were not heard.
            self.notifications.notify()
            self._connections.listening = session
            self._connections.listening_is_lost = self._broken.set
            while not await set_within(self._broken, _PROBE):
                async with asyncio.timeout(_PATIENCE):
                    # Beside its claims, one after the other.
                    await session.rows("SELECT 1")
        finally:
            if self._connections.listening is session:
                self._connections.listening = None
            session.watch.on_unasked = session.watch.end
            await connection.close()

    def _read(self, session: Session) -> None:
        """Called between two claims; during one the library itself hands on notifications."""
        pgconn = session.connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self.notifications.notify((notify.extra.decode(),))
        except psycopg.Error:
            session.watch.end()
            self._broken.set()
