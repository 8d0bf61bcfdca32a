"""The attempt log: one stream per queue, read as one log.

A row's number is the server's time in microseconds when it was written, so that streams merge into one order; together with its
queue's number it names the row. A cursor holds one place per queue, `number:place`, so nothing that is written late is skipped.
"""

from __future__ import annotations

from heapq import merge
from struct import Struct as Layout

import msgspec

from taskharbor.drivers.contract import AttemptPage
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.stored import read_fronts
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt, JobState, Outcome

_OUTCOMES = tuple(Outcome)
_STATES = tuple(JobState)
QUEUES = 2048
"""Rows of the first so many queues have numbers that nobody shares."""
_PORTION = 1000


ROW = Layout(">QBBHI")
_decode_error = msgspec.msgpack.Decoder(tuple[str, str]).decode


def attempt_from(place: int, number: int, queue: str, row: bytes) -> Attempt:
    """From a row as `lua/log.lua` describes it."""
    ended_at, outcome, state, id_size, error_size = ROW.unpack_from(row)
    error_at = ROW.size + id_size
    job_at = error_at + error_size
    error_type, error_message = _decode_error(row[error_at:job_at]) if error_size else (None, None)
    job = read_fronts(row, job_at, has_token=False)
    head = job.head
    return Attempt(
        seq=place * QUEUES + number % QUEUES,
        job_id=row[ROW.size : error_at].decode(),
        queue=queue,
        type=head.type,
        key=None if head.key is False else head.key,  # type: ignore[arg-type]  # a text, or False
        priority=head.priority,
        fence=job.fence,
        worker=job.worker,
        created_at_us=head.created_at,
        run_at_us=head.run_at,
        reserved_at_us=job.reserved_at,
        lease_expires_at_us=job.expires_at,
        ended_at_us=ended_at,
        outcome=_OUTCOMES[outcome],
        state=_STATES[state],
        error_type=error_type,
        error_message=error_message,
        payload_size=head.payload_size,
    )


def place_of(stream_id: bytes) -> int:
    return int(stream_id.partition(b"-")[0])


# -- reading ------------------------------------------------------------------------------------------------


async def read_attempts(store: Store, after: str | None, limit: int) -> AttemptPage:
    if limit < 1:
        raise InvalidRequest(f"limit is {limit}: a page holds at least one row")
    places = _parsed(after)
    numbers = await store.queues()
    portions = await store.connections.commands(
        [
            ("XRANGE", store.keys(queue)["attempts"], f"({places.get(number, 0)}", "+", "COUNT", limit)
            for queue, number in numbers.items()
        ]
    )
    lines = [
        [(place_of(stream_id), number, queue, fields[1]) for stream_id, fields in portion]
        for (queue, number), portion in zip(numbers.items(), portions, strict=True)
        if portion
    ]
    rows = lines[0] if len(lines) == 1 else list(merge(*lines))[:limit]
    for place, number, _, _ in rows:
        places[number] = place
    return AttemptPage([attempt_from(*row) for row in rows], _written(places))


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
            number = store.numbers[queue]
            rows = zip(map(place_of, found[::2]), found[1::2], strict=True)
            return [attempt_from(place, number, queue, row) for place, row in rows][::-1]
    return await _rows_of_a_removed_job(store, job_id)


async def _rows_of_a_removed_job(store: Store, job_id: str) -> list[Attempt]:
    """Nothing leads to them any more, so the whole log is read."""
    found: list[Attempt] = []
    for queue, number in store.numbers.items():
        place = 0
        while rows := await store.connections.command(
            "XRANGE", store.keys(queue)["attempts"], f"({place}", "+", "COUNT", _PORTION
        ):
            wanted = job_id.encode()
            found += [
                attempt
                for stream_id, fields in rows
                if wanted in fields[1]
                and (attempt := attempt_from(place_of(stream_id), number, queue, fields[1])).job_id == job_id
            ]
            place = place_of(rows[-1][0])
    return sorted(found, key=_by_seq)


def _by_seq(attempt: Attempt) -> int:
    return attempt.seq
