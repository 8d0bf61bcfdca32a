"""Claims that sleep on the server until their queue moves.

An idle worker that hears of a job, then asks for it, pays for two ways through the network and two turns of its event loop. Here
the claim is sent right behind a command that sleeps until the queue's bell rings, on a connection of its own: the server runs it
the moment it wakes, and its answer is all that travels.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import hiredis

from taskharbor.drivers.redis.failures import code_of
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.packing import pack, pack_call
from taskharbor.drivers.redis.reserve import Claim, Claimed, call_of, claimed
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.wire import ConnectionLost, Wire
from taskharbor.errors import BackendUnavailable
from taskharbor.ids import new_id
from taskharbor.jobs import SECOND, Micros

log = logging.getLogger("taskharbor.redis")

_SURE_WITHIN = 0.005
"""Seconds an answer may take to say how the server's clock and the caller's stand to each other."""
_TRIES = 3
"""Answers to wait for where none is that quick; then the quickest has to do."""
_TRUSTED_FOR = 10.0
"""Seconds for which the two clocks are taken to run alike."""
_REST = 1.0
_LONG_REST = 60.0
"""Seconds without such claims after a server refused one, and after it refused to let one sleep."""
_TIME = pack(("TIME",))
_VIEWS = 1000


class AnswerLost(Exception):
    """The claim may have leased jobs."""


class _View(NamedTuple):
    """What a claim saw that took all there was."""

    moves: int
    due: Micros | None


class _Line:
    """One connection on which claims sleep, one after the other."""

    def __init__(self) -> None:
        self.wire: Wire | None = None
        self.rests_until = 0.0


class SleepingClaims:
    """One handle's sleeping claims."""

    def __init__(self, options: Options, store: Store) -> None:
        self._options = options
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._views: dict[tuple[str, str, tuple[str, ...] | None], _View] = {}
        self._ahead: Micros = 0
        """By how much the caller's clock is ahead of the server's."""
        self._compared_at = -math.inf
        self._idle_lines: dict[str, list[_Line]] = {}
        """By queue, those that nobody sleeps on now."""
        # A change that replicas are to have is waited for behind the call, which would sleep with it.
        self._is_offered = options.notify and not (options.wait_replicas or options.wait_aof is not None)

    def saw(self, claim: Claim, answer: Claimed, took: float) -> None:
        """What a claim brought that was asked for now, and how many seconds it took."""
        if not self._is_offered:
            return
        if answer.moves < 0:
            self._views.pop(_key(claim), None)
            return
        if len(self._views) >= _VIEWS:
            # A handle that claims for so many workers, as a broker's does, does not sleep for them.
            self._views.clear()
        self._views[_key(claim)] = _View(answer.moves, answer.due)
        if took <= _SURE_WITHIN:
            self._compare(claim.now, answer.server_time, took)

    async def claim(self, claim: Claim, timeout: float) -> Claimed | None:
        """What a claim brings once the queue has moved or something came due, or when time is up. None where that cannot be: the
        last claim left something, or the server does not let it sleep."""
        view = self._views.pop(_key(claim), None)
        if view is None:
            return None
        line = self._line(claim.queue)
        began = self._loop.time()
        if began < line.rests_until:
            self._idle_lines[claim.queue].append(line)
            return None
        try:
            wire = await self._wire(line, claim.queue)
            if began - self._compared_at > _TRUSTED_FOR:
                await self._compare_by(wire, claim.now, began)
        except (BackendUnavailable, ConnectionLost):
            return None  # Nothing was claimed.
        seconds = min(timeout, self._options.timeout / 2)
        if view.due is not None:
            seconds = min(seconds, (view.due - claim.now) / SECOND - (self._loop.time() - began))
        try:
            answers = await wire.ask_at_once(self._packed(claim, view.moves, seconds), 2)
        except ConnectionLost as error:
            raise AnswerLost from error
        except asyncio.CancelledError:
            # Best before the server has run it; who cancelled takes back what it leased otherwise.
            wire.abort("nobody waits for its answer any more")
            raise
        self._idle_lines[claim.queue].append(line)
        return self._understood(line, claim, answers)

    def _understood(self, line: _Line, claim: Claim, answers: Sequence[Any]) -> Claimed | None:
        slept, answer = answers
        if isinstance(slept, hiredis.ReplyError) or isinstance(answer, hiredis.ReplyError):
            # Whoever asks by other means learns the reason, or goes where the queue is now.
            is_forbidden = isinstance(slept, hiredis.ReplyError) and code_of(slept) == "NOPERM"
            if is_forbidden:
                log.warning(
                    "%s: this user may not use XREAD on the keys of its queues; idle workers wait by other means",
                    self._options.place,
                )
            line.rests_until = self._loop.time() + (_LONG_REST if is_forbidden else _REST)
            if line.wire is not None:
                line.wire.abort("the server refused a claim that sleeps")
        if isinstance(answer, hiredis.ReplyError):
            return None
        found = claimed(answer, claim)
        if found.moves >= 0:
            self._views[_key(claim)] = _View(found.moves, found.due)
        return found

    def _packed(self, claim: Claim, moves: int, seconds: float) -> bytes:
        milliseconds = max(1, math.ceil(seconds * 1000))  # 0 would be for ever.
        bell = self._store.keys(claim.queue)["bell"]
        sleep = pack(("XREAD", "BLOCK", milliseconds, "STREAMS", bell, f"{moves}-0"))
        return sleep + pack_call(
            call_of(self._store, claim, new_id(), sent_at=max(0, claim.now - self._ahead))
        )

    # -- clocks -------------------------------------------------------------------------------------------

    async def _compare_by(self, wire: Wire, now: Micros, began: float) -> None:
        """Ask the server for its time. The caller's was `now` when the loop's was `began`."""
        quickest = math.inf
        for _ in range(_TRIES):
            asked_at = self._loop.time()
            (answer,) = await wire.ask(_TIME, 1)
            took = self._loop.time() - asked_at
            if took < quickest and isinstance(answer, list):
                quickest = took
                seconds, micros = map(int, answer)
                self._compare(now + int((asked_at - began) * SECOND), seconds * SECOND + micros, took)
            if quickest <= _SURE_WITHIN:
                return

    def _compare(self, now: Micros, server_time: Micros, took: float) -> None:
        # Rather early than late: a job that is due by its producer's clock should be so by ours.
        self._ahead = now + int(took * SECOND) - server_time
        self._compared_at = self._loop.time()

    # -- connections --------------------------------------------------------------------------------------

    def _line(self, queue: str) -> _Line:
        lines = self._idle_lines.setdefault(queue, [])
        return lines.pop() if lines else _Line()

    async def _wire(self, line: _Line, queue: str) -> Wire:
        if line.wire is None or not line.wire.is_open:
            node = self._store.connections.node_for(self._store.keys(queue).channel)
            line.wire = await node.another_wire()
        return line.wire


def _key(claim: Claim) -> tuple[str, str, tuple[str, ...] | None]:
    return claim.queue, claim.worker, None if claim.types is None else tuple(claim.types)
