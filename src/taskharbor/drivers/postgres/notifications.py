"""Notifications: the throttle that decides when to NOTIFY, and the listener for `waiting.wait`.

All commits in a cluster that notify wait for each other. So only the first change after a quiet moment notifies in its own
transaction. Changes within the next few milliseconds share one notification: the first change after that sends it, or the
throttle itself. If this process dies in between, waiters find the jobs when they next look by themselves.

The version of a queue is a snapshot: a stirring move that the snapshot does not show is a change. NOTIFY only says when to look.
The listening connection also claims the jobs that it heard of. After an outage it connects again and wakes all waiters, because
notifications of that time were lost. It is probed from time to time: if a firewall forgot the connection, it is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import psycopg

from taskharbor.drivers.postgres.connections import Connections, Session, connect
from taskharbor.drivers.postgres.options import NOTIFYING, SILENT, PostgresOptions
from taskharbor.drivers.postgres.rows import escaped_texts, quoted, text_array
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Micros

_WINDOW = 0.01
_GRACE = 0.001
"""Seconds in which the next change may take over the notification of the last ones. That saves a round trip."""
_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""
_SNAPSHOT = re.compile(r"\d+:\d+:[\d,]*")


class NotifyThrottle:
    """One handle's notifications. `notify` sends one NOTIFY for each of the given queues."""

    def __init__(self, notify: Callable[[Iterable[str]], Awaitable[None]], mode: int) -> None:
        self._notify = notify
        self.mode = mode
        """The mode for changes that seldom make anything runnable. They are not throttled."""
        self._last: dict[str, float] = {}
        self._due: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def change(self, queues: set[str]) -> Iterator[int]:
        """Surround a change that makes something runnable in these queues. Yields the mode to write it with."""
        if self.mode == SILENT or len(queues) > 1:
            yield self.mode
            return
        (queue,) = queues
        instant = asyncio.get_running_loop().time()
        mode = SILENT if instant - self._last.get(queue, 0.0) < _WINDOW else NOTIFYING
        if mode == NOTIFYING:
            self._last[queue] = instant
            # The notification of this change also covers changes that are committed by now.
            self._due.discard(queue)
        try:
            yield mode
        except BaseException:
            # Other changes may have relied on its notification, and it may have been committed after all.
            self._notify_soon(queue)
            raise
        if mode == SILENT:
            self._notify_soon(queue)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _notify_soon(self, queue: str) -> None:
        self._due.add(queue)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._notify_later())

    async def _notify_later(self) -> None:
        try:
            while self._due:
                instant = asyncio.get_running_loop().time()
                due_at = {queue: self._last.get(queue, 0.0) + _WINDOW + _GRACE for queue in self._due}
                queues = {queue for queue, at in due_at.items() if at <= instant}
                if not queues:
                    await asyncio.sleep(min(due_at.values()) - instant)
                    continue
                self._due -= queues
                self._last |= dict.fromkeys(queues, instant)
                try:
                    await self._notify(queues)
                except TaskHarborError:
                    # The server is away. Waiters look by themselves, and the next notification includes these queues.
                    self._due |= queues
                    return
        finally:
            self._task = None


class Listener:
    """One handle's source for `waiting.wait`."""

    trusts_notifications = True

    def __init__(self, options: PostgresOptions, connections: Connections, emptied: dict[str, str]) -> None:
        self.notifications = Notifications()
        self._options = options
        self._connections = connections
        self._emptied = emptied
        """The hint of a claim that left no job, by queue. Older changes need not wake anybody."""
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
        ((snapshot, is_changed, due),) = await self._connections.run(
            lambda session: session.named("inspect", "watch", text_array(queues), hints, seen, since)
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
            await connection.execute(f"LISTEN {quoted(self._options.channel)}")
            session.is_fresh = False
            connection.on_unasked = lambda: self._read(session)
            connection.begin_watching()
            self.is_up = True
            # Notifications from before LISTEN were lost.
            self.notifications.notify()
            self._connections.listening = session
            self._connections.listening_is_lost = self._broken.set
            while not await set_within(self._broken, _PROBE):
                async with asyncio.timeout(_PATIENCE):
                    # On the connection that also claims, so one after the other.
                    await session.rows("SELECT 1")
        finally:
            if self._connections.listening is session:
                self._connections.listening = None
            connection.on_unasked = None
            await connection.close()

    def _read(self, session: Session) -> None:
        """Read notifications between two claims. During a claim the library itself passes them on."""
        pgconn = session.connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self.notifications.notify((notify.extra.decode(),))
        except psycopg.Error:
            session.connection.end_watching()
            self._broken.set()
