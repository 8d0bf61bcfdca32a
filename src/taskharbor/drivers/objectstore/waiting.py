"""Waiting until something may have become runnable.

Who shares this process is heard through the doorbell. What other processes do is seen by looking at the queue's object now
and then, which costs a conditional read; what comes due by time alone is known from the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from taskharbor.drivers.memory.bell import Waiter
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.doorbell import Place
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.jobs import SECOND, Micros

Seen: TypeAlias = dict[Place, tuple[int, int]]
"""Per shard: how often it had stirred, and how often time alone had made something runnable on this handle."""

_NEVER = (0, 0)


async def wait(store: OpenStore, seen: Seen, queues: Sequence[str], now: Micros, timeout: float) -> bool:
    loop = asyncio.get_running_loop()
    began = loop.time()
    cells = store.cells_of(dict.fromkeys(queues))
    places = [(cell.queue, cell.shard) for cell in cells]
    before = {place: seen.get(place, _NEVER) for place in places}
    while True:
        waiter = Waiter()
        store.doorbell.enter(waiter, queues)
        try:
            rung = store.doorbell.stirs(places)
            if any(stirs > before[place][0] for place, stirs in rung.items()):
                seen.update(
                    {place: (max(rung[place], before[place][0]), before[place][1]) for place in places}
                )
                # A loop of waits that never have to wait must still let others run.
                await asyncio.sleep(0)
                return True
            looks = await asyncio.gather(*(cell.look(_look) for cell in cells))
            found = {place: look[0] for place, look in zip(places, looks, strict=True)}
            due = min((look[1] for look in looks if look[1] is not None), default=None)
            left = began + timeout - loop.time()
            comes_due = due is not None and (due - now) / SECOND - (loop.time() - began) <= max(left, 0.0)
            if found != before:
                seen.update(found)
                return True
            pause = max(left, 0.0)
            if due is not None and comes_due:
                pause = max((due - now) / SECOND - (loop.time() - began), 0.0)
            is_last = store.options.poll is None or pause <= store.options.poll
            if store.options.poll is not None:
                pause = min(pause, store.options.poll)
            await asyncio.wait((waiter.future,), timeout=pause)
            if waiter.future.done():
                continue
            if is_last:
                # A last question to the bell: it may have rung while the time ran out.
                rung = store.doorbell.stirs(places)
                return comes_due or any(stirs > before[place][0] for place, stirs in rung.items())
        finally:
            store.doorbell.leave(waiter, queues)


def _look(state: QueueState, brought: Brought) -> tuple[tuple[int, int], Micros | None]:
    return (state.stirs, state.promotions), state.next_due((state.name,))
