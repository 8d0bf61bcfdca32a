"""The jobs of a store in stretches: of all jobs by the order they were accepted in, or of those that ended one way by their end.

Jobs are read by plain commands: a script would keep the server several times as long for the same jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from taskharbor.bulk.contract import Selection
from taskharbor.bulk.splitting import spans
from taskharbor.drivers.redis.packing import Call, Word
from taskharbor.drivers.redis.scripts import script
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobState

JOBS_PER_PART = 10_000

_PAGE, _SMALLEST_PAGE = 1000, 20
_PAGE_BYTES = 1_000_000

_ENDED = {JobState.DONE: "done", JobState.DEAD: "dead", JobState.CANCELLED: "cancelled"}
_EVERYWHERE = ("waiting_job", "active_job", "finished_job")


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """Jobs of a queue in one of its sets, above one score up to another."""

    queue: str
    set: str
    above: int | None
    until: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Stretch]).decode


def written(stretches: Sequence[Stretch]) -> str:
    return _encode(stretches).decode()


def parsed(text: object) -> list[Stretch]:
    try:
        return _decode(str(text))
    except msgspec.MsgspecError:
        raise InvalidRequest(
            f"{str(text)[:60]!r} are no stretches of jobs: pass on a part as it was planned"
        ) from None


# -- planning -------------------------------------------------------------------------------------------------


async def shared_out(store: Store, selection: Selection, parallelism: int) -> list[list[Stretch]]:
    """About `parallelism` shares of what can match, as it is now."""
    queues = [queue for queue in await store.queues() if selection.queue in (None, queue)]
    name = "jobs" if selection.state is None else _ENDED.get(selection.state, "jobs")
    asked: list[tuple[Word, ...]] = [("ZCARD", store.keys(queue)[name]) for queue in queues]
    sizes = await store.connections.commands(asked)
    shares = []
    for low, high in spans(0, sum(sizes), parallelism, JOBS_PER_PART):
        share, offset = [], 0
        for queue, size in zip(queues, sizes, strict=True):
            first, end = max(low - offset, 0), min(high - offset, size)
            if first < end:
                share.append((queue, first, end))
            offset += size
        shares.append(share)
    ranks = {(queue, rank) for share in shares for queue, *both in share for rank in both}
    edges = await _scores(store, name, ranks)
    return [
        [
            Stretch(queue, name, edges[queue, first], until)
            for queue, first, end in share
            if (until := edges[queue, end]) is not None
        ]
        for share in shares
    ]


async def _scores(store: Store, name: str, places: set[tuple[str, int]]) -> dict[tuple[str, int], int | None]:
    """The score of the last job before each rank: None before the first, and where nothing is left."""
    found: dict[tuple[str, int], int | None] = dict.fromkeys(places)
    inner = [(queue, rank) for queue, rank in places if rank]
    asked: list[tuple[Word, ...]] = []
    for queue, rank in inner:
        key = store.keys(queue)[name]
        # The set may have shrunk since it was counted.
        asked += (
            ("ZRANGE", key, rank - 1, rank - 1, "WITHSCORES"),
            ("ZRANGE", key, -1, -1, "WITHSCORES"),
        )
    answers = await store.connections.commands(asked)
    for place, at_rank, last in zip(inner, answers[::2], answers[1::2], strict=True):
        pair = at_rank or last
        if pair:
            found[place] = int(pair[1])
    return found


# -- reading --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """How far a stretch has been read. Of jobs with one score some may be before it and some behind."""

    bound: str
    seen: frozenset[bytes] = frozenset()
    """Those that were read and may have the score of the bound."""
    most: int = _SMALLEST_PAGE
    """How many jobs to ask for."""


class JobPage(NamedTuple):
    jobs: list[tuple[str, bytes]]
    """Id and stored job."""
    following: Place | None
    """Where to go on, if anything follows."""


def begin(stretch: Stretch) -> Place:
    return Place("-inf" if stretch.above is None else f"({stretch.above}")


async def page(store: Store, stretch: Stretch, place: Place, state: JobState | None) -> JobPage:
    members = Call(
        script("bulk_members"),
        (store.keys(stretch.queue)[stretch.set],),
        (place.bound, stretch.until, place.most),
    )
    (answer,) = await store.connections.run(lambda _: (members,))
    if answer is None:
        return JobPage([], None)
    last, found = answer
    ids = [job_id for job_id in found if job_id not in place.seen]
    jobs = await _stored(store, stretch, ids, state) if ids else []
    if len(found) < place.most:
        return JobPage(jobs, None)
    if not ids:
        # All of them ended in the same microsecond: only a larger page leads on.
        return JobPage(jobs, place._replace(most=2 * place.most))
    bound = last.decode()
    seen = frozenset(found) | (place.seen if bound == place.bound else frozenset())
    return JobPage(jobs, Place(bound, seen, _next_count(place.most, jobs)))


def _next_count(count: int, jobs: Sequence[tuple[str, bytes]]) -> int:
    """More at a time while they are small: a page is to be about a megabyte at most."""
    size = sum(len(value) for _, value in jobs) / max(1, len(jobs))
    return max(_SMALLEST_PAGE, min(_PAGE, 4 * count, int(_PAGE_BYTES / max(1, size))))


async def _stored(
    store: Store, stretch: Stretch, ids: Sequence[bytes], state: JobState | None
) -> list[tuple[str, bytes]]:
    keys = store.keys(stretch.queue)
    families = _families(stretch, state)
    answers = await store.connections.commands([("HMGET", keys[family], *ids) for family in families])
    values: list[bytes | None] = [next(filter(None, several), None) for several in zip(*answers, strict=True)]
    if families is _EVERYWHERE:
        # A job that went back to waiting between the first look and the second was in neither place.
        lost = [n for n, value in enumerate(values) if value is None]
        if lost:
            again = await store.ask("find", stretch.queue, 0, *[ids[n] for n in lost])
            for n, value in zip(lost, again, strict=True):
                values[n] = value
    return [(job_id.decode(), value) for job_id, value in zip(ids, values, strict=True) if value is not None]


def _families(stretch: Stretch, state: JobState | None) -> tuple[str, ...]:
    """Where jobs of the state are, whichever way one gets there."""
    if stretch.set != "jobs":
        return ("finished_job",)
    if state is None:
        return _EVERYWHERE
    return ("active_job",) if state is JobState.INFLIGHT else ("waiting_job",)
