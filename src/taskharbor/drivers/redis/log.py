"""The attempt log: one stream per queue, read as one log.

A row's number is the server's time in microseconds when it was written, so that streams merge into one order; together with its
queue's number it names the row. A cursor holds one place per queue, `number:place`, so nothing that is written late is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from taskharbor.drivers.contract import AttemptPage
from taskharbor.drivers.redis.library import Call, layout
from taskharbor.drivers.redis.records import NO_LEASE, Head, LeaseFront, decode_head, read_lease
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt, JobState, Outcome

_OUTCOMES = tuple(Outcome)
_STATES = tuple(JobState)
QUEUES = 2048
"""Rows of the first so many queues have numbers that nobody shares."""
_PORTION = 1000
_END = 2**53
"""No row has such a number."""

_ENTRY = layout("ENTRY")
_ROW = layout("ROW")
_decode_error = msgspec.msgpack.Decoder(tuple[str, str]).decode


# -- entries of a stream --------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """Rows that ended alike, as `lua/log.lua` describes them."""

    first: int
    """Number of its first row that is not gone."""
    last: int
    ended_at: int
    outcome: int
    state: int
    error: tuple[str, str] | tuple[None, None]
    lease: LeaseFront
    value: bytes
    size: int
    """How many rows, with those that are gone."""
    rows_at: int

    def rows(self) -> Iterator[tuple[int, str, int, Head]]:
        """Of each its number, the job's id, the fence and the head."""
        value, at = self.value, self.rows_at
        head, packed_head = None, b""
        for number in range(self.last - self.size + 1, self.last + 1):
            id_size, head_size, fence, _ = _ROW.unpack_from(value, at)
            id_at = at + _ROW.size
            head_at = id_at + id_size
            at = head_at + head_size
            if number < self.first:
                continue
            if head is None or value[head_at:at] != packed_head:
                packed_head = value[head_at:at]
                head = decode_head(packed_head)
            yield number, value[id_at:head_at].decode(), fence, head


def entries_from(page: Sequence[Any]) -> Iterator[Entry]:
    """From what `log_page` and `job_rows` answer."""
    gone = page[0]
    for stream_id, value in zip(page[1::2], page[2::2], strict=True):
        last = place_of(stream_id)
        ended_at, outcome, state, count, error_size, lease_size = _ENTRY.unpack_from(value)
        lease_at = _ENTRY.size + error_size
        yield Entry(
            max(last - count, gone) + 1,
            last,
            ended_at,
            outcome,
            state,
            _decode_error(value[_ENTRY.size : lease_at]) if error_size else (None, None),
            read_lease(value, lease_at) if lease_size else NO_LEASE,
            value,
            count,
            lease_at + lease_size,
        )


def page_call(store: Store, queue: str, after: int, last: int, rows: int) -> Call:
    """Asks for the entries that hold the next so many rows after one number, up to another."""
    return store.call("log_page", queue, 0, after, last, rows)


def attempts_in(entry: Entry, number: int, queue: str, after: int = 0) -> Iterator[tuple[int, int, Attempt]]:
    """Each behind its place and the queue's number, for merging."""
    error_type, error_message = entry.error
    lease = entry.lease
    for place, job_id, fence, head in entry.rows():
        if place > after:
            yield (
                place,
                number,
                Attempt(
                    seq=place * QUEUES + number % QUEUES,
                    job_id=job_id,
                    queue=queue,
                    type=head.type,
                    key=None if head.key is False else head.key,  # type: ignore[arg-type]  # a text, or False
                    priority=head.priority,
                    fence=fence,
                    worker=lease.worker,
                    created_at_us=head.created_at,
                    run_at_us=head.run_at,
                    reserved_at_us=lease.reserved_at,
                    lease_expires_at_us=lease.expires_at,
                    ended_at_us=entry.ended_at,
                    outcome=_OUTCOMES[entry.outcome],
                    state=_STATES[entry.state],
                    error_type=error_type,
                    error_message=error_message,
                    payload_size=head.payload_size,
                ),
            )


# -- reading ------------------------------------------------------------------------------------------------


async def read_attempts(store: Store, after: str | None, limit: int) -> AttemptPage:
    places = _parsed(after)
    numbers = await store.queues()
    pages = await store.ask_all(
        [page_call(store, queue, places.get(number, 0), _END, limit) for queue, number in numbers.items()]
    )
    lines = [
        _line(page, number, queue, places.get(number, 0))
        for (queue, number), page in zip(numbers.items(), pages, strict=True)
        if len(page) > 1
    ]
    rows = (lines[0] if len(lines) == 1 else list(merge(*lines, key=_in_order)))[:limit]
    for place, number, _ in rows:
        places[number] = place
    return AttemptPage([attempt for _, _, attempt in rows], _written(places))


def _line(page: Sequence[Any], number: int, queue: str, after: int) -> list[tuple[int, int, Attempt]]:
    return [row for entry in entries_from(page) for row in attempts_in(entry, number, queue, after)]


_in_order = itemgetter(0, 1)


def _parsed(cursor: str | None) -> dict[int, int]:
    """Place by number of the queue."""
    if not cursor:
        return {}
    places: dict[int, int] = {}
    for part in cursor.split(","):
        number, _, place = part.partition(":")
        if not (number.isdecimal() and place.isdecimal() and len(part) < 40):
            raise InvalidRequest(
                f"{cursor[:60]!r} is not a cursor of this log: pass on what the last page gave"
            )
        places[int(number)] = int(place)
    return places


def _written(places: dict[int, int]) -> str:
    return ",".join(f"{number}:{place}" for number, place in sorted(places.items()))


async def job_attempts(store: Store, job_id: str) -> list[Attempt]:
    homes = await store.located([job_id])
    if job_id in homes:
        queue = homes[job_id]
        found = await store.ask("job_rows", queue, 0, job_id)
        if found is not None:
            return _rows_of(job_id, found, store.numbers[queue], queue)[::-1]
    return await _rows_of_a_removed_job(store, job_id)


def _rows_of(job_id: str, page: Sequence[Any], number: int, queue: str) -> list[Attempt]:
    wanted = job_id.encode()
    return [
        attempt
        for entry in entries_from(page)
        if wanted in entry.value
        for _, _, attempt in attempts_in(entry, number, queue)
        if attempt.job_id == job_id
    ]


async def _rows_of_a_removed_job(store: Store, job_id: str) -> list[Attempt]:
    """Nothing leads to them any more, so the whole log is read."""
    found: list[Attempt] = []
    for queue, number in store.numbers.items():
        place = 0
        while len(page := await store.ask("log_page", queue, 0, place, _END, _PORTION)) > 1:
            found += _rows_of(job_id, page, number, queue)
            place = place_of(page[-2])
    return sorted(found, key=_by_seq)


def place_of(stream_id: bytes) -> int:
    """The number of an entry's last row."""
    return int(stream_id.partition(b"-")[0])


def _by_seq(attempt: Attempt) -> int:
    return attempt.seq
