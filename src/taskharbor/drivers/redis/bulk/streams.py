"""The attempt log by its cursor: where it ends, how far a number of rows goes, which ranges lie between two cursors.

Within a queue rows are numbered in the order they were written, and the server writes one after the other: what a queue's
counter says is the end of its log, nothing can appear before it any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from taskharbor.bulk.contract import HistoryGone
from taskharbor.drivers.redis.bulk.cursors import Cursor, parse
from taskharbor.drivers.redis.bulk.ranges import Range
from taskharbor.drivers.redis.log import entries_from, page_call
from taskharbor.drivers.redis.publishing import control_prefix
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest

_PAGE = 1000


async def start(store: Store) -> str:
    return str(Cursor(await _epoch(store), True, {}))


async def latest(store: Store) -> str:
    return str(Cursor(await _epoch(store), False, await ends(store)))


async def ends(store: Store) -> dict[str, int]:
    """The last number of every queue that has a log."""
    return {queue: last for queue, (last, _) in (await _marks(store, await store.queues())).items() if last}


async def ranges_between(store: Store, after: str, until: str) -> list[Range]:
    """What is to be read. Raises HistoryGone where some of it is gone."""
    first, last = parse(after), parse(until)
    await _check_epoch(store, (first, last))
    ranges = [
        Range(queue, first.place(queue), place, first.is_strict(queue), queue in first.places)
        for queue, place in last.places.items()
        if first.place(queue) < place
    ]
    await check_history(store, ranges)
    return ranges


async def check_history(store: Store, ranges: Iterable[Range]) -> None:
    """Raises HistoryGone where rows of a strict range may have been removed.

    Retention writes down the highest number it removed. Who trims a stream by hand does not; but then the row that the reader
    came to last is not there any more, although retention did not take it.
    """
    strict = [one for one in ranges if one.is_strict]
    if not strict:
        return
    marks = await _marks(store, [one.queue for one in strict])
    seen = await store.ask_all(
        [page_call(store, one.queue, max(0, one.after - 1), one.after, 1) for one in strict]
    )
    for one, last_read in zip(strict, seen, strict=True):
        end, trimmed = marks[one.queue]
        if trimmed > one.after:
            raise _gone(store, one, "retention", "Keep the log longer (keep_attempts of the queues)")
        if one.is_resumed and not any(entries_from(last_read)) and trimmed < one.after <= end:
            raise _gone(
                store, one, "somebody (XTRIM, XDEL or DEL)", "Leave the log to keep_attempts of the queues"
            )


def _gone(store: Store, one: Range, who: str, advice: str) -> HistoryGone:
    return HistoryGone(
        f"{store.connections.options.place}: rows of the attempt log of queue {one.queue!r} after {one.after} were removed by "
        f"{who} before this reader came to them. {advice}, or begin with a fresh checkpoint"
    )


# -- so many rows ---------------------------------------------------------------------------------------------


async def limited(store: Store, after: str, until: str, rows: int | None) -> str:
    first, last = parse(after), parse(until)
    await _check_epoch(store, (first, last))
    places = await _never_back(store, first, last)
    ahead = {queue: place for queue, place in places.items() if place > first.place(queue)}
    if rows is not None and ahead:
        taken = await _taken(store, first, ahead, rows)
        if taken is not None:
            reached = {queue: place for queue, place in places.items() if queue not in ahead}
            begun = {queue: first.places[queue] for queue in ahead if queue in first.places}
            return str(Cursor(first.epoch, first.is_open, reached | begun | taken))
    if places == last.places:
        return until
    return str(Cursor(last.epoch, last.is_open, places))


async def _never_back(store: Store, first: Cursor, last: Cursor) -> dict[str, int]:
    """Where to end in every queue: never before where the reader is.

    Unless the server itself has gone back: a replica that lacked the last rows was promoted. Those rows are gone, and all that
    are written since are new.
    """
    places = dict(last.places)
    behind = [queue for queue, place in first.places.items() if last.place(queue) < place]
    if behind:
        marks = await _marks(store, behind)
        places |= {queue: min(first.place(queue), marks[queue][0]) for queue in behind}
    return {queue: place for queue, place in places.items() if place}


async def _taken(store: Store, first: Cursor, ahead: dict[str, int], rows: int) -> dict[str, int] | None:
    """The places after so many rows, oldest first whatever their queue. None where there are no more than that."""
    heads: list[tuple[int, str]] = []
    pages: dict[str, list[int]] = {}
    portion = min(rows + 1, _PAGE)

    async def fill(queues: Sequence[str], after: dict[str, int]) -> None:
        asked = [page_call(store, queue, after[queue], ahead[queue], portion) for queue in queues]
        for queue, found in zip(queues, await store.ask_all(asked), strict=True):
            places = [
                place
                for entry in entries_from(found)
                for place in range(max(entry.first, after[queue] + 1), min(entry.last, ahead[queue]) + 1)
            ]
            pages[queue] = places[::-1]
            if places:
                heappush(heads, (pages[queue].pop(), queue))

    await fill(list(ahead), {queue: first.place(queue) for queue in ahead})
    taken: dict[str, int] = {}
    for _ in range(rows):
        if not heads:
            return None
        place, queue = heappop(heads)
        taken[queue] = place
        if pages[queue]:
            heappush(heads, (pages[queue].pop(), queue))
        else:
            await fill([queue], taken)
    return taken if heads else None


# -- small looks ----------------------------------------------------------------------------------------------


async def _marks(store: Store, queues: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Of each queue the number of its last row, and of the last that retention removed."""
    names = list(queues)
    found = await store.connections.commands(
        [("HMGET", store.keys(queue)["meta"], "row", "trimmed") for queue in names]
    )
    return {
        queue: (int(row or 0), int(trimmed or 0)) for queue, (row, trimmed) in zip(names, found, strict=True)
    }


async def _epoch(store: Store) -> str:
    key = f"{control_prefix(store.prefix)}epoch"
    _, epoch = await store.connections.commands([("SET", key, secrets.token_hex(4), "NX"), ("GET", key)])
    return str(epoch.decode())


async def _check_epoch(store: Store, cursors: Iterable[Cursor]) -> None:
    epoch = await _epoch(store)
    if any(cursor.epoch != epoch for cursor in cursors):
        raise InvalidRequest(
            f"{store.connections.options.place}: the cursor belongs to another store, or to this one before it lost all its "
            "data. Begin with a fresh checkpoint"
        )
