"""The connection that hears NOTIFY, and claims what it heard of.

It comes back by itself after an outage, and tells everybody who waits to look again: what was said meanwhile was not
heard. It is asked for a sign of life from time to time, because a connection that a firewall forgot is silent.
"""

from __future__ import annotations

import asyncio
import random

import psycopg

from taskharbor.doorbell import Doorbell
from taskharbor.drivers.postgres.connections import Connections, Session, connect
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
    """Who waits for a queue gives a ring; it is set when the queue stirred, or when that cannot be ruled out."""

    def __init__(self, options: Options, connections: Connections) -> None:
        self._options = options
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._rings: dict[str, set[Ring]] = {}
        self._broken = asyncio.Event()
        self.is_up = asyncio.Event()
        self._task = self._loop.create_task(self._keep_listening(), name="taskharbor listener")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, queue: str, ring: Ring) -> None:
        self._rings.setdefault(queue, set()).add(ring)

    def unwatch(self, queue: str, ring: Ring) -> None:
        rings = self._rings.get(queue)
        if rings is not None:
            rings.discard(ring)
            if not rings:
                del self._rings[queue]

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
        # Its signs of life are asked for beside its claims.
        session = Session(await connect(self._options), self._options.prepare, is_shared=True)
        connection = session.connection
        self._broken.clear()
        try:
            connection.add_notify_handler(lambda notify: self._wake(notify.payload))
            await connection.execute(f"LISTEN {quoted(channel(self._options.schema))}")
            session.is_fresh = False
            session.watch.on_unasked = lambda: self._hear(session)
            session.watch.begin()
            self.is_up.set()
            self._wake_all()
            self._connections.listening = session
            self._connections.listening_is_lost = self._broken.set
            while not self._broken.is_set():
                try:
                    async with asyncio.timeout(_PROBE):
                        await self._broken.wait()
                except TimeoutError:
                    async with asyncio.timeout(_PATIENCE):
                        await connection.execute("SELECT 1")
        finally:
            if self._connections.listening is session:
                self._connections.listening = None
            session.watch.on_unasked = session.watch.end
            await connection.close()

    def _hear(self, session: Session) -> None:
        """Called between two claims; during one the library itself hands on what it reads."""
        pgconn = session.connection.pgconn
        queues: list[str] = []
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                queues.append(notify.extra.decode())
        except psycopg.Error:
            session.watch.end()
            self._broken.set()
        # Only now: who is woken goes on at once, and claims on this very connection.
        for queue in queues:
            self._wake(queue)

    def _wake(self, queue: str) -> None:
        for ring in list(self._rings.get(queue, ())):
            ring.set()

    def _wake_all(self) -> None:
        for queue in list(self._rings):
            self._wake(queue)


class Ring:
    """Set once, for one who waits for it; who does goes on in the very call that sets it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell: Doorbell | None = None
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        if self._bell is not None:
            self._bell.ring()

    async def is_set_within(self, seconds: float) -> bool:
        if not self._is_set:
            self._bell = bell = Doorbell(self._loop)
            timer = self._loop.call_later(seconds, bell.ring)
            try:
                await bell
            finally:
                timer.cancel()
                self._bell = None
        return self._is_set
