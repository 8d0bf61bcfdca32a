"""Reads jobs, listings and statistics, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

import msgspec

from taskharbor.drivers.contract import JobFilter, JobShare, Page, QueueSettings, QueueStats
from taskharbor.drivers.redis.records import READY, STATES, record_from, seq_of
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import TERMINAL_STATES, JobRecord, JobState, Micros

_PORTION = 1000
"""The most jobs of a queue that a listing reads in one call."""


async def get(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    found: dict[str, JobRecord] = {}
    asked: set[str] = set()
    while True:
        names = [name for name in store.numbers if name not in asked]
        asked.update(names)
        wanted = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in found]
        answers = await store.ask_all([store.call("find", name, 0, *wanted) for name in names])
        for name, values in zip(names, answers, strict=True):
            for job_id, value in zip(wanted, values, strict=True):
                if value is not None:
                    found[job_id] = record_from(job_id, name, value, now)
        # Another process may have made queues that this handle does not know.
        if len(found) == len(set(job_ids)) or (await store.queues()).keys() <= asked:
            return [found.get(job_id) for job_id in job_ids]


# -- listings ---------------------------------------------------------------------------------------------


async def list_jobs(store: Store, selection: JobFilter, now: Micros, limit: int, cursor: str | None) -> Page:
    end = (0, 0) if selection.until is None else _parsed(selection.until)
    numbers = {n: number for n, number in (await store.queues()).items() if selection.queue in (None, n)}
    bounds = dict.fromkeys(numbers, "+inf")
    if cursor is not None:
        seq, last = _parsed(cursor)
        # Among jobs with the same number, jobs of the queue with the higher number come first.
        bounds = {queue: f"{seq}" if number < last else f"({seq}" for queue, number in numbers.items()}
    wanted = _wanted(selection)
    if wanted is None:
        bounds = {}
    found: list[tuple[tuple[int, int], JobRecord]] = []
    certain = found
    # One more than the limit shows whether anything follows.
    portion = min(limit + 1, _PORTION)
    while bounds and len(certain) <= limit:
        answers = await store.ask_all(
            [store.call("page", queue, 0, bound, portion, wanted or "") for queue, bound in bounds.items()]
        )
        read_to = end
        for queue, (following, *pairs) in zip(list(bounds), answers, strict=True):
            for job_id, value in zip(pairs[::2], pairs[1::2], strict=True):
                record = record_from(job_id.decode(), queue, value, now)
                if _matches(record, selection):
                    found.append(((seq_of(value), numbers[queue]), record))
            place = (int(following[1:]), numbers[queue]) if following else end
            bounds[queue] = following.decode() if place > end else ""
            read_to = max(read_to, place)
        bounds = {queue: bound for queue, bound in bounds.items() if bound}
        # The jobs before the place to which every queue was read are complete.
        found.sort(key=itemgetter(0), reverse=True)
        certain = [one for one in found if one[0] >= read_to]
        portion = _PORTION
    page = certain[:limit]
    seq, number = page[-1][0] if page else (0, 0)
    return Page([record for _, record in page], f"{seq}.{number}" if len(certain) > limit else None)


def _wanted(selection: JobFilter) -> str | None:
    """Return the stored states that can match, a digit each; empty for all, None if nothing can match."""
    states = set(STATES) if selection.states is None else selection.states
    if selection.worker is not None:
        states &= {JobState.INFLIGHT}
    if selection.finished_before_us is not None:
        states &= TERMINAL_STATES
    # The clock decides which of the waiting jobs are due.
    digits = {max(STATES.index(state), READY) for state in states}
    return None if not digits else "" if len(digits) == len(STATES) - 1 else "".join(map(str, sorted(digits)))


def _matches(record: JobRecord, selection: JobFilter) -> bool:
    before = selection.finished_before_us
    return (
        (selection.states is None or record.state in selection.states)
        and (selection.types is None or record.type in selection.types)
        and (selection.key is None or record.key == selection.key)
        and (selection.worker is None or record.worker == selection.worker)
        and (before is None or (record.finished_at_us is not None and record.finished_at_us < before))
    )


def _parsed(cursor: str) -> tuple[int, int]:
    seq, _, number = cursor.partition(".")
    if not (seq.isdecimal() and number.isdecimal() and len(cursor) < 40):
        raise InvalidRequest(
            f"{cursor[:60]!r} is not a cursor of this store: pass on what the last page gave"
        )
    return int(seq), int(number)


async def split_jobs(store: Store, queue: str | None, parts: int) -> list[JobShare]:
    queues = {name: n for name, n in (await store.queues()).items() if queue in (None, name)}
    sizes = await store.commands([("ZCARD", store.keys(name)["jobs"]) for name in queues])
    shares: list[JobShare] = []
    for (name, number), size in zip(queues.items(), sizes, strict=True):
        cuts = max(1, round(parts * size / sum(sizes))) if size else 0
        found = await store.commands(
            [
                ("ZRANGE", store.keys(name)["jobs"], -rank, -rank, "WITHSCORES")
                for rank in sorted({size * n // cuts for n in range(1, cuts)} - {0})
            ]
        )
        edges = [None, *(f"{int(pair[1])}.{number}" for pair in found if pair), None]
        if size:
            shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(edges)]
    return shares


# -- statistics -------------------------------------------------------------------------------------------


async def stats(store: Store, now: Micros, queue: str | None) -> list[QueueStats]:
    names = sorted(await store.queues()) if queue is None else [queue]
    calls = [store.call("stats", name, now) for name in names]
    answers = await store.ask_all(calls)
    return [
        QueueStats(
            queue=name,
            counts=dict(zip(STATES, counts, strict=True)),
            done_total=int(totals[0] or 0),
            dead_total=int(totals[1] or 0),
            cancelled_total=int(totals[2] or 0),
            head_run_at_us=head,
            settings=settings_from(said),
        )
        for name, (is_known, said, counts, totals, head) in zip(names, answers, strict=True)
        if is_known or queue is not None
    ]


def settings_from(pairs: Sequence[bytes]) -> QueueSettings:
    said = dict(zip(pairs[::2], pairs[1::2], strict=True))
    values = {name.decode(): None if value == b"ever" else value.decode() for name, value in said.items()}
    # Redis has texts only. The types are those of the settings.
    return msgspec.convert(values, QueueSettings, strict=False)
