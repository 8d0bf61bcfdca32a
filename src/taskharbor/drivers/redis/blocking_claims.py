"""Blocking claims: sent to the server ahead of time, behind an `XREAD BLOCK` on the queue's stream of notifications.

The server runs such a claim the moment something may have become runnable, so that the answer already brings the job. It claims
by the caller's clock, which the script works out from the server's. Each has a connection of its own while it blocks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from redis.exceptions import ResponseError

from taskharbor.clock import BackendClock
from taskharbor.drivers.redis.connection import ConnectionLost, Server, SharedConnection, pack
from taskharbor.drivers.redis.failures import code_of
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.reserve import Claim, Claimed, call_of, claimed
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Micros
from taskharbor.requests import new_id

log = logging.getLogger("taskharbor.redis")

_REST = 1.0
_LONG_REST = 60.0
"""Seconds without blocking claims after the server refused one, and after it refused XREAD to this user."""
_VIEWS = 1000


class AnswerLost(Exception):
    """The claim may have leased jobs."""


class _View(NamedTuple):
    """What a claim saw that took all there was."""

    moves: int
    due: Micros | None


class BlockingClaims:
    """One handle's blocking claims."""

    def __init__(self, options: Options, store: Store, server_time: Callable[[], Awaitable[Micros]]) -> None:
        self._options = options
        self._store = store
        self._server_clock = BackendClock(server_time)
        self._views: dict[tuple[str, str, tuple[str, ...] | None], _View] = {}
        self._idle: dict[str, list[SharedConnection]] = {}
        self._rests_until: dict[str, float] = {}
        # A change that replicas are to have is waited for behind the call, which would block with it.
        self._is_offered = options.notify and not options.waits

    def saw(self, claim: Claim, answer: Claimed) -> None:
        """Remember what a claim saw, for the blocking claim that follows it."""
        self._views.pop(_key(claim), None)
        if self._is_offered and answer.moves >= 0:
            if len(self._views) >= _VIEWS:
                # A handle that claims for so many workers, as a broker's does, makes no blocking claims for them.
                self._views.clear()
            self._views[_key(claim)] = _View(answer.moves, answer.due)

    async def claim(self, claim: Claim, timeout: float) -> Claimed | None:
        """Claim once the queue has moved, something came due, or time is up. None if that cannot be: the last claim left
        something, or the server refuses to block."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        view = self._views.pop(_key(claim), None)
        if view is None or began < self._rests_until.get(claim.queue, 0.0):
            return None
        try:
            if self._server_clock.is_due:
                await self._server_clock.sync()
            server = self._store.client.server_for(self._store.keys(claim.queue).channel)
            connection = await self._connection(claim.queue, server)
        except (BackendUnavailable, ConnectionLost):
            return None  # Nothing was claimed.
        elapsed = loop.time() - began
        seconds = min(timeout, self._options.timeout / 2)
        if view.due is not None:
            seconds = min(seconds, (view.due - claim.now) / SECOND - elapsed)
        # Rather too early than too late: a job that is due by its producer's clock should be so by the claim's.
        sent_at = max(0, self._server_clock.now() - int(elapsed * SECOND) - self._server_clock.error)
        milliseconds = max(1, math.ceil(seconds * 1000))  # 0 would be for ever.
        stream = self._store.keys(claim.queue)["notify"]
        block = pack(("XREAD", "BLOCK", milliseconds, "STREAMS", stream, f"{view.moves}-0"))
        call = server.packed(call_of(self._store, claim, new_id(), sent_at=sent_at))
        try:
            blocked, answer = await connection.ask(block + call, 2)
        except ConnectionLost as error:
            raise AnswerLost from error
        except asyncio.CancelledError:
            # Best before the server has run it; the caller takes back what it leased otherwise.
            connection.abort("nobody waits for its answer any more")
            raise
        if isinstance(blocked, ResponseError) or isinstance(answer, ResponseError):
            # A call by other means learns the reason, or goes where the queue is now.
            is_forbidden = isinstance(blocked, ResponseError) and code_of(blocked) == "NOPERM"
            if is_forbidden:
                log.warning(
                    "%s: this user may not use XREAD on the keys of its queues; idle workers wait by other means",
                    self._options.place,
                )
            self._rests_until[claim.queue] = loop.time() + (_LONG_REST if is_forbidden else _REST)
            connection.abort("the server refused a blocking claim")
        else:
            self._idle.setdefault(claim.queue, []).append(connection)
        if isinstance(answer, ResponseError):
            return None
        found = claimed(answer, claim)
        self.saw(claim, found)
        return found

    async def _connection(self, queue: str, server: Server) -> SharedConnection:
        idle = self._idle.get(queue, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return await server.another_connection()


def _key(claim: Claim) -> tuple[str, str, tuple[str, ...] | None]:
    return claim.queue, claim.worker, None if claim.types is None else tuple(claim.types)
