"""Waiting for work: asleep until a queue stirs, a job or lease known at the start comes due, or time is up.

Every script that may have made something runnable raises the queue's `moves` and says the new number on its channel. Who
remembers the number it last saw cannot miss anything, whether or not anybody listened; the channel only says when to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from taskharbor.drivers.redis.connections import Call, Connections
from taskharbor.drivers.redis.keys import Keys
from taskharbor.drivers.redis.listener import Listener
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.scripts import script
from taskharbor.jobs import SECOND, Micros

_BEFORE_ALL: Micros = -(2**52)
_ANY = 2**62
_SUBSCRIBES_WITHIN = 1.0
"""Seconds that one who waits gives a new subscription before looking without it."""


class View(NamedTuple):
    """What is known of a queue: how often it has moved, and what comes due next."""

    moves: int
    due: Micros | None
    since: Micros


class _Waiter:
    """One `wait` in progress."""

    __slots__ = ("known", "rung", "said")

    def __init__(self, known: dict[str, int], rung: asyncio.Future[bool]) -> None:
        self.known = known
        self.rung = rung
        self.said: dict[str, int] = {}
        """By channel, the number that woke it."""

    def ring(self, *, is_due: bool = True) -> None:
        if not self.rung.done():
            self.rung.set_result(is_due)


class Watcher:
    """One handle's waits, and what it has seen."""

    def __init__(self, options: Options, connections: Connections, keys: Callable[[str], Keys]) -> None:
        self._options = options
        self._connections = connections
        self._keys = keys
        self._script = script("look")
        self._listener: Listener | None = None
        self._waiters: dict[str, dict[_Waiter, None]] = {}
        self._heard: dict[str, int] = {}
        """By channel, the highest number said while nobody waited for it, or since."""
        self._seen: dict[str, int] = {}
        """By queue, the number of its moves when the last wait returned."""
        self._since: dict[str, Micros] = {}
        """By queue, the time of the last wait that returned. What was due by then its caller has tried to claim; so a
        due job that cannot run (paused, no room) does not keep the waiter spinning."""
        self._emptied: dict[str, tuple[int, View]] = {}
        """By queue, what a claim saw that took all there was: nobody needs to look again."""

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    def mark(self, queue: str) -> int | None:
        """To be taken before a claim is sent, for `emptied`."""
        return None if self._listener is None else self._listener.serial(self._keys(queue).channel)

    def emptied(self, queue: str, mark: int | None, moves: int, due: Micros | None, now: Micros) -> None:
        """A claim at `now` found less than it asked for; it saw the queue's `moves` and what comes due after `now`. It counts if
        since before the claim every word on the channel was heard."""
        if mark is not None:
            self._emptied[queue] = (mark, View(moves, due, now))

    async def wait(self, queues: Sequence[str], now: Micros, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        names = list(dict.fromkeys(queues))
        channels = {queue: self._keys(queue).channel for queue in names}
        listener = self._listening()
        if listener is not None and any(listener.serial(channel) is None for channel in channels.values()):
            await listener.settled(channels.values(), min(timeout, _SUBSCRIBES_WITHIN))
        views = {
            queue: view for queue in names if (view := self._from_claim(queue, channels[queue])) is not None
        }
        unknown = [queue for queue in names if queue not in views]
        # In this order: a word that comes after the look must not be lost.
        serials = [None if listener is None else listener.serial(channel) for channel in channels.values()]
        looked = await self._look(unknown) if unknown else {}
        is_stirred = any(view.moves != self._seen.get(queue) for queue, view in looked.items())
        views.update(looked)
        is_due = False
        for view in views.values():
            if view.due is not None and view.due - now <= (end - loop.time()) * SECOND:
                end = min(end, loop.time() + max(0, view.due - now) / SECOND)
                is_due = True
        waiter = _Waiter({channels[queue]: view.moves for queue, view in views.items()}, loop.create_future())
        if not is_stirred:
            is_stirred = self._was_said(waiter.known)
        is_told = listener is not None and all(
            serial is not None and serial == listener.serial(channel)
            for serial, channel in zip(serials, channels.values(), strict=True)
        )
        if not is_stirred:
            if is_told:
                is_stirred = await self._sleep(waiter, end)
            else:
                is_stirred = await self._poll(waiter, names, end)
        # Only a wait that returns has seen anything.
        for queue, view in views.items():
            self._seen[queue] = waiter.said.get(channels[queue], view.moves)
            self._since[queue] = now
        return is_stirred or is_due

    def _from_claim(self, queue: str, channel: str) -> View | None:
        mark, view = self._emptied.pop(queue, (None, None))
        if mark is None or self._listener is None or self._listener.serial(channel) != mark:
            return None
        return view

    def _was_said(self, known: dict[str, int]) -> bool:
        """Whether something was said that is newer than what is known. Once per word: where a server has lost its memory,
        numbers begin anew."""
        newer = [channel for channel, moves in known.items() if self._heard.get(channel, moves) > moves]
        for channel in newer:
            self._heard[channel] = known[channel]
        return bool(newer)

    async def _sleep(self, waiter: _Waiter, end: float) -> bool:
        """Whether it was woken before the end."""
        loop = asyncio.get_running_loop()
        for channel in waiter.known:
            self._waiters.setdefault(channel, {})[waiter] = None
        timer = loop.call_at(end, _give_up, waiter)
        try:
            return await waiter.rung
        finally:
            timer.cancel()
            for channel in waiter.known:
                self._waiters[channel].pop(waiter, None)

    async def _poll(self, waiter: _Waiter, queues: Sequence[str], end: float) -> bool:
        """The same for one who is not told, or not of all queues: looks now and then."""
        loop = asyncio.get_running_loop()
        while (left := end - loop.time()) > 0:
            waiter.rung = loop.create_future()
            if await self._sleep(waiter, loop.time() + min(left, self._options.poll)):
                return True
            if loop.time() < end:
                looked = await self._look(queues)
                if any(
                    view.moves != waiter.known[self._keys(queue).channel] for queue, view in looked.items()
                ):
                    return True
        return False

    async def _look(self, queues: Sequence[str]) -> dict[str, View]:
        since = [self._since.get(queue, _BEFORE_ALL) for queue in queues]
        calls = []
        for queue, instant in zip(queues, since, strict=True):
            keys = self._keys(queue)
            calls.append(Call(self._script, (keys["waiting"], keys["active"], keys["meta"]), (instant,)))
        answers = await self._connections.run(lambda _: calls)
        return {
            queue: View(moves, None if due < 0 else due, instant)
            for queue, (moves, due), instant in zip(queues, answers, since, strict=True)
        }

    # -- what is heard ------------------------------------------------------------------------------------

    def _listening(self) -> Listener | None:
        if self._listener is None and self._options.notify:
            self._listener = Listener(self._connections.node_for, self._on_word, self._on_doubt)
            self._connections.when_slots_move(self._listener.move)
        return self._listener

    def _on_word(self, channel: str, number: int | None) -> None:
        """Without a number it may be about anything, so it counts as newer than all that is known."""
        self._heard[channel] = max(self._heard.get(channel, -1), _ANY if number is None else number)
        for waiter in self._waiters.get(channel, ()):
            if number is None:
                waiter.ring()
            elif number != waiter.known[channel]:
                waiter.said[channel] = number
                waiter.ring()

    def _on_doubt(self, channels: Iterable[str]) -> None:
        for channel in channels:
            self._heard.pop(channel, None)
            for waiter in self._waiters.get(channel, ()):
                waiter.ring()


def _give_up(waiter: _Waiter) -> None:
    waiter.ring(is_due=False)
