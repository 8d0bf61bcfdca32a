"""Cursors of the attempt log: one place per stream (see `drivers.contract.LogStream`), and the ranges between two cursors."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from taskharbor.drivers.contract import Driver, LogState, LogStream
from taskharbor.errors import InvalidRequest, TaskHarborError


class HistoryGone(TaskHarborError):
    """Retention removed rows of the attempt log that a reader had not seen yet."""


class StoreReplaced(TaskHarborError):
    """The store is not the one that a reader of the attempt log has read, or was put back to an earlier time."""


# The advice for a reader that cannot go on.
ANEW = "begin anew: a stream with a fresh checkpoint, the pipeline with a new lake"


class LogCursor(msgspec.Struct, array_like=True, frozen=True):
    """The last place that was read in each stream. Of a stream without a place nothing was read, and all its rows must be there.
    With `is_open`, the reader takes such a stream from its present beginning. The cursor of the beginning is the same for every
    store."""

    store_id: str = ""
    is_open: bool = True
    places: dict[str, int] = {}

    def __str__(self) -> str:
        return _encode(self).decode()


class LogRange(msgspec.Struct, frozen=True):
    """The rows of a stream after one place up to another."""

    stream: str
    queue: str | None
    after: int
    until: int
    is_strict: bool = False
    """True if all rows must be there."""
    is_resumed: bool = False
    """True if `after` is the place of a row that was read."""


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(LogCursor).decode


def parse(text: str, log: LogState) -> LogCursor:
    try:
        cursor = _decode(text)
    except msgspec.MsgspecError:
        raise InvalidRequest(
            f"{text[:60]!r} is not a cursor of this store: pass on what `start` or `latest` gave"
        ) from None
    if cursor.store_id not in ("", log.store_id):
        raise StoreReplaced(
            f"the cursor belongs to another store, or to this one before it lost all its data: {ANEW}"
        )
    for one in log.streams:
        if not one.is_timed and (place := cursor.places.get(one.name, 0)) > one.last:
            raise StoreReplaced(
                f"the attempt log ends at {one.last}, and this reader has read up to {place}: the store was put back to an "
                f"earlier time or is another one. To read what came since, {ANEW}"
            )
    return cursor


def at_end(log: LogState) -> LogCursor:
    return LogCursor(log.store_id, False, {one.name: one.last for one in log.streams if one.last})


def ranges_between(log: LogState, first: LogCursor, last: LogCursor) -> list[LogRange]:
    found = []
    for one in log.streams:
        after, until = first.places.get(one.name, 0), last.places.get(one.name, 0)
        if after < until:
            is_resumed = one.name in first.places
            is_strict = is_resumed or not first.is_open
            found.append(LogRange(one.name, one.queue, after, until, is_strict, is_resumed))
    return found


def never_back(log: LogState, first: LogCursor, last: LogCursor) -> LogCursor:
    """Return `last`, but no place before `first`. One exception: a timed stream went back, because a replica without the last
    rows took over. Then the reader steps back with it."""
    ends = {one.name: one.last for one in log.streams}
    back = {
        name: min(place, ends.get(name, place))
        for name, place in first.places.items()
        if last.places.get(name, 0) < place
    }
    return LogCursor(last.store_id, last.is_open, {**last.places, **back}) if back else last


async def check_history(driver: Driver, ranges: Iterable[LogRange], log: LogState | None = None) -> None:
    """Raise HistoryGone where rows of a strict range were removed.

    Retention leaves its mark. Somebody who removes rows by hand does not; but then the row that the reader came to last is not
    there any more, although retention did not take it.
    """
    log = log or await driver.log_streams()
    streams: dict[str, LogStream] = {one.name: one for one in log.streams}
    for one in ranges:
        stream = streams.get(one.stream)
        if stream is None or stream.trimmed is None or not one.is_strict:
            continue
        if stream.trimmed > one.after:
            raise _gone(one, "by retention", "Keep the log longer (keep_attempts of the queues)")
        if one.is_resumed and not stream.is_dense and stream.trimmed < one.after <= stream.last:
            page = await driver.read_log(one.stream, after=one.after - 1, until=one.after, limit=1)
            if not page.attempts:
                raise _gone(one, "by hand", "Leave the log to keep_attempts of the queues")


def _gone(one: LogRange, how: str, advice: str) -> HistoryGone:
    whose = "" if one.queue is None else f" of queue {one.queue!r}"
    return HistoryGone(
        f"rows of the attempt log{whose} after {one.after} were removed {how} before this reader came to them. {advice}, or "
        f"{ANEW}"
    )


async def limited(driver: Driver, after: str, until: str, rows: int | None) -> str:
    """Return the cursor after at most `rows` rows (None: any number), and after at least one if there is one. Each stream gets
    its share of the rows."""
    log = await driver.log_streams()
    first = parse(after, log)
    last = never_back(log, first, parse(until, log))
    if last.places == first.places:
        return after
    left = ranges_between(log, first, last) if rows is not None else []
    places = {one.stream: one.after for one in left}
    dense = {one.name for one in log.streams if one.is_dense}
    while rows and left:
        share = -(-rows // len(left))
        for one in left:
            wanted, place = min(share, rows), places[one.stream]
            if one.stream in dense:
                # Only retention leaves holes, and it marks them.
                places[one.stream] = min(place + wanted, one.until)
                rows -= wanted
            elif wanted:
                page = await driver.read_log(
                    one.stream, after=place, until=one.until, limit=min(wanted, 10_000)
                )
                places[one.stream] = page.place
                rows = max(0, rows - len(page.attempts))
        left = [one for one in left if places[one.stream] < one.until]
    if not left:
        return str(last)
    begun = {name: place for name, place in places.items() if place}
    others = {name: place for name, place in last.places.items() if name not in places}
    return str(LogCursor(log.store_id, first.is_open, {**others, **begun}))
