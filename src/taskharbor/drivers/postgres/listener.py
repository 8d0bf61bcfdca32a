"""The connection that hears NOTIFY.

It comes back by itself after an outage, and tells everybody who waits to look again: what was said meanwhile was not
heard. It is asked for a sign of life from time to time, because a connection that a firewall forgot is silent.
"""

from __future__ import annotations

import asyncio
import random

import psycopg
from psycopg import AsyncConnection

from taskharbor.drivers.postgres.connections import Row, connect
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.statements import quoted
from taskharbor.errors import TaskHarborError

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two signs of life, and for one of them to come."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


def channel(schema: str) -> str:
    return f"taskharbor:{schema}"


class Listener:
    """Who waits for a queue gives an event; it is set when the queue stirred, or when that cannot be ruled out."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._events: dict[str, set[asyncio.Event]] = {}
        self._is_reading = False
        self._broken = asyncio.Event()
        self.is_up = asyncio.Event()
        self._task = self._loop.create_task(self._keep_listening(), name="taskharbor listener")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, queue: str, event: asyncio.Event) -> None:
        self._events.setdefault(queue, set()).add(event)

    def unwatch(self, queue: str, event: asyncio.Event) -> None:
        events = self._events.get(queue)
        if events is not None:
            events.discard(event)
            if not events:
                del self._events[queue]

    async def _keep_listening(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._listen_once()
                pause = _FIRST_PAUSE
            except (psycopg.Error, TaskHarborError, OSError, TimeoutError):
                pass
            self.is_up.clear()
            self._wake_all()
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _listen_once(self) -> None:
        """Listen until the connection breaks."""
        connection = await connect(self._options)
        descriptor = connection.fileno()
        try:
            connection.add_notify_handler(lambda notify: self._wake(notify.payload))
            await connection.execute(f"LISTEN {quoted(channel(self._options.schema))}")
            self._broken.clear()
            self.is_up.set()
            self._wake_all()
            while not self._broken.is_set():
                self._loop.add_reader(descriptor, self._hear, connection, descriptor)
                self._is_reading = True
                try:
                    async with asyncio.timeout(_PROBE):
                        await self._broken.wait()
                except TimeoutError:
                    self._stop_reading(descriptor)
                    async with asyncio.timeout(_PATIENCE):
                        await connection.execute("SELECT 1")
        finally:
            self._stop_reading(descriptor)
            await connection.close()

    def _stop_reading(self, descriptor: int) -> None:
        """Only while it is ours: the library closes a broken socket, and another may have its number by now."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(descriptor)

    def _hear(self, connection: AsyncConnection[Row], descriptor: int) -> None:
        try:
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                self._wake(notify.extra.decode())
        except psycopg.Error:
            self._stop_reading(descriptor)
            self._broken.set()

    def _wake(self, queue: str) -> None:
        for event in self._events.get(queue, ()):
            event.set()

    def _wake_all(self) -> None:
        for events in self._events.values():
            for event in events:
                event.set()
