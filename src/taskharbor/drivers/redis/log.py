"""The attempt log: one stream per queue, read as one log.

A row's number is the server's time in microseconds when it was written, so streams merge into one order. Together with its
queue's number it names the row. A cursor holds one place per queue, `number:place`, so a row that is written late is not skipped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

import msgspec

from taskharbor.drivers.contract import AttemptPage, LogPage, LogState, LogStream
from taskharbor.drivers.records import OUTCOMES, STATES
from taskharbor.drivers.redis.library import layout
from taskharbor.drivers.redis.records import END, NO_LEASE, decode_head, read_lease, read_pair
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.jobs import Attempt

QUEUES = 2048
"""The number of queues whose rows have numbers that no other row has."""
_PORTION = 1000
_LOOK = 500
"""Rows that are counted to estimate how full the entries of a stream are."""
_CUT = 8
"""The number of pieces into which each piece is cut."""
_PROBES = 256
"""Places that one call looks at."""
_MOST_PIECES = 512

_ENTRY = layout("ENTRY")
_ROW = layout("ROW")
_decode_error = msgspec.msgpack.Decoder(tuple[str, str]).decode


def _rows(
    page: Sequence[Any], queue: str, number: int, after: int = 0, until: int = END
) -> Iterator[Attempt]:
    """Return the rows behind a place up to another, from an answer of `log_page` or `job_rows`. `number` is the queue's."""
    after = max(after, page[0])
    for stream_id, value in zip(page[1::2], page[2::2], strict=True):
        last = _place_of(stream_id)
        ended_at, outcome, state, count, error_size, lease_size = _ENTRY.unpack_from(value)
        lease_at = _ENTRY.size + error_size
        error_type, message = _decode_error(value[_ENTRY.size : lease_at]) if error_size else (None, None)
        lease = read_lease(value, lease_at) if lease_size else NO_LEASE
        at = lease_at + lease_size
        for place in range(last - count + 1, last + 1):
            id_size, head_size, fence, _ = _ROW.unpack_from(value, at)
            head_at = at + _ROW.size + id_size
            job_id = value[at + _ROW.size : head_at]
            at = head_at + head_size
            if not after < place <= until:
                continue
            head = decode_head(value[head_at:at])
            yield Attempt(
                seq=place * QUEUES + number % QUEUES,
                job_id=job_id.decode(),
                queue=queue,
                type=head.type,
                key=head.key if isinstance(head.key, str) else None,
                priority=head.priority,
                fence=fence,
                worker=lease.worker,
                created_at_us=head.created_at_us,
                run_at_us=head.run_at_us,
                reserved_at_us=lease.reserved_at,
                lease_expires_at_us=lease.expires_at,
                ended_at_us=ended_at,
                outcome=OUTCOMES[outcome],
                state=STATES[state],
                error_type=error_type,
                error_message=message,
                payload_size=head.payload_size,
            )


def _place(row: Attempt) -> int:
    return row.seq // QUEUES


def _place_of(stream_id: bytes) -> int:
    """Return the number of an entry's last row."""
    return int(stream_id.partition(b"-")[0])


# -- all queues -----------------------------------------------------------------------------------------------


async def read_attempts(store: RedisStore, after: str | None, limit: int) -> AttemptPage:
    # The place for each queue number.
    places = dict(read_pair(part, ":") for part in after.split(",")) if after else {}
    numbers = await store.queues()
    begins = {queue: places.get(number, 0) for queue, number in numbers.items()}
    words = {queue: (begin, END, limit) for queue, begin in begins.items()}
    pages = await store.ask_queues("log_page", 0, words)
    lines = [_rows(page, queue, numbers[queue], begins[queue]) for queue, page in pages.items()]
    rows = list(islice(merge(*lines, key=attrgetter("seq")), limit))
    for row in rows:
        places[numbers[row.queue]] = _place(row)
    cursor = ",".join(f"{number}:{place}" for number, place in sorted(places.items()))
    return AttemptPage(rows, cursor)


async def job_attempts(store: RedisStore, job_id: str) -> list[Attempt]:
    for queue in (await store.located([job_id])).values():
        page = await store.ask("job_rows", queue, 0, job_id)
        if page is not None:
            return _rows_of(job_id, page, queue, store.numbers[queue])
    # A removed job no longer points to its rows, so the whole log is read.
    found: list[Attempt] = []
    for queue, number in store.numbers.items():
        place = 0
        while len(page := await store.ask("log_page", queue, 0, place, END, _PORTION)) > 1:
            found += _rows_of(job_id, page, queue, number)
            place = _place_of(page[-2])
    return sorted(found, key=attrgetter("seq"))


def _rows_of(job_id: str, page: Sequence[Any], queue: str, number: int) -> list[Attempt]:
    rows = (row for row in _rows(page, queue, number) if row.job_id == job_id)
    return sorted(rows, key=attrgetter("seq"))


# -- one queue, in bulk -----------------------------------------------------------------------------------------


async def log_streams(store: RedisStore) -> LogState:
    """Return a stream per queue. The server writes one row after the other, so a queue's counter is the end of its log."""
    key = f"{store.prefix}{{taskharbor}}:epoch"
    _, epoch = await store.commands([("SET", key, secrets.token_hex(4), "NX"), ("GET", key)])
    queues = list(await store.queues())
    marks = await store.commands([("HMGET", store.keys(queue)["meta"], "row", "trimmed") for queue in queues])
    streams = [
        LogStream(name=queue, queue=queue, last=int(last or 0), trimmed=int(trimmed or 0), is_timed=True)
        for queue, (last, trimmed) in zip(queues, marks, strict=True)
    ]
    return LogState(epoch.decode(), streams)


async def read_log(store: RedisStore, stream: str, after: int, until: int, limit: int) -> LogPage:
    number = store.numbers.get(stream)
    if number is None:
        number = (await store.queues()).get(stream, 0)
    page = await store.ask("log_page", stream, 0, after, until, limit)
    rows = list(islice(_rows(page, stream, number, after, until), limit))
    return LogPage(rows, _place(rows[-1]) if len(rows) == limit else until)


async def split_log(store: RedisStore, stream: str, after: int, until: int, rows: int) -> list[int]:
    """Split a log. A stream cannot tell how many rows are between two of its ids. So it is cut at equal distances of time,
    repeatedly, and pieces without rows are left out. Each remaining piece counts the same."""
    page = await store.ask("log_page", stream, 0, after, until, _LOOK)
    rows_seen = list(_rows(page, stream, 0, after, until))
    count = len(rows_seen)
    if count >= _LOOK:
        count = count * await store.command("XLEN", store.keys(stream)["attempts"]) // (len(page) // 2)
    wanted = min(_MOST_PIECES, count // rows)
    if wanted < 2:
        return []
    pieces = [(_place(rows_seen[0]) - 1, until)]
    while len(pieces) < 2 * wanted and pieces[0][1] - pieces[0][0] > _CUT:
        cuts = [[low + (high - low) * n // _CUT for n in range(_CUT + 1)] for low, high in pieces]
        finer = [piece for edges in cuts for piece in pairwise(edges)]
        firsts: list[int] = []
        for start in range(0, len(finer), _PROBES):
            lows = [low for low, _ in finer[start : start + _PROBES]]
            firsts += await store.ask("log_probe", stream, 0, *lows)
        pieces = [piece for piece, first in zip(finer, firsts, strict=True) if 0 < first <= piece[1]]
    return sorted({pieces[len(pieces) * n // wanted][0] for n in range(1, wanted)} - {after})
