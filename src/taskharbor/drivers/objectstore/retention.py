"""Removing what has ended, from an image and from its segments: by retention, by a filter, by id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.engine import bulk, operate
from taskharbor.drivers.engine.tables import STATE_NUMBERS, Counts, Transaction, load, to_json
from taskharbor.drivers.objectstore.compaction import retire
from taskharbor.drivers.objectstore.segments import Entry, entries, holding_jobs, put_entries
from taskharbor.drivers.objectstore.shard import Loaded, Shard, find_archived, known_ids
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobState, Micros

_AT_ONCE = 8
"""Segments that a purge looks into in one step."""
_SQL = load("segments", __package__)
_ENGINE_SQL = load("operate")
_decode_numbers = msgspec.json.Decoder(list[int]).decode


async def prune(store: OpenStore, now: Micros, limit: int) -> int:
    jobs = rows = 0

    async def prune_shard(shard: Shard) -> None:
        nonlocal jobs, rows
        left = limit - jobs, limit - rows
        some_jobs, some_rows = await shard.change_with(
            lambda transaction: [entry for entry, *_ in _due(transaction, now)],
            lambda transaction, loaded: _prune(transaction, loaded, now, *left),
        )
        jobs += some_jobs
        rows += some_rows

    await store.for_each(await store.all_shards(), prune_shard)
    return jobs + rows


def _due(transaction: Transaction, now: Micros) -> list[tuple[Entry, int, Micros | None, Micros | None]]:
    found = transaction.connection.execute(_SQL["due"], {"now": now})
    return [(Entry(*row[:-3]), *row[-3:]) for row in found]


def _prune(
    transaction: Transaction, loaded: Loaded, now: Micros, most_jobs: int, most_rows: int
) -> tuple[int, int]:
    """At most so many jobs and rows; how many of each."""
    jobs = rows = 0
    for entry, queue, jobs_by, rows_by in _due(transaction, now):
        segment = loaded[entry.name]
        left = most_jobs - jobs
        if left > 0 and entry.jobs and jobs_by is not None:
            oldest_jobs = segment.oldest_jobs(entry, left + 1)
            gone = [job for job in oldest_jobs[:left] if job[0] <= jobs_by]
            if gone:
                _forget_jobs(
                    transaction, queue, [job_id for _, _, job_id, _ in gone], [one[-1] for one in gone]
                )
                entry = replace(
                    entry,
                    jobs=entry.jobs - len(gone),
                    jobs_gone_at=gone[-1][0],
                    jobs_gone_seq=gone[-1][1],
                    oldest_job=oldest_jobs[len(gone)][0] if len(oldest_jobs) > len(gone) else 0,
                )
            jobs += len(gone)
        left = most_rows - rows
        if left > 0 and entry.rows and rows_by is not None:
            oldest_rows = segment.oldest_rows(entry, left + 1)
            gone_rows = [row for row in oldest_rows[:left] if row[0] <= rows_by]
            if gone_rows:
                transaction.connection.execute(_ENGINE_SQL["trimmed"], (max(seq for _, seq in gone_rows),))
                entry = replace(
                    entry,
                    rows=entry.rows - len(gone_rows),
                    rows_gone_at=gone_rows[-1][0],
                    rows_gone_seq=gone_rows[-1][1],
                    oldest_row=oldest_rows[len(gone_rows)][0] if len(oldest_rows) > len(gone_rows) else 0,
                )
            rows += len(gone_rows)
        _put(transaction, entry)
    here = operate.prune_up_to(transaction, now, most_jobs - jobs, most_rows - rows)
    return jobs + here[0], rows + here[1]


async def purge(store: OpenStore, selection: JobFilter, limit: int) -> int:
    shards = await store.all_shards() if selection.queue is None else store.shards_of(selection.queue)
    removed = 0
    for shard in shards:
        if removed < limit:
            removed += await _purge(shard, selection, limit - removed)
    return removed


async def _purge(shard: Shard, selection: JobFilter, limit: int) -> int:
    removed = await shard.change(lambda transaction: operate.purge(transaction, selection, limit))
    if selection.states is not None and selection.states <= {JobState.DEAD}:
        return removed
    seen: set[str] = set()
    while (left := limit - removed) > 0:
        # Segments may be merged meanwhile: the one that they have become has another name.
        names = [one.name for one in await shard.look(entries) if one.jobs and one.name not in seen]
        some = frozenset(names[:_AT_ONCE])
        if not some:
            break
        seen |= some

        def needs(transaction: Transaction, some: frozenset[str] = some) -> list[Entry]:
            return [entry for entry in entries(transaction) if entry.name in some and entry.jobs]

        def step(transaction: Transaction, loaded: Loaded, left: int = left) -> int:
            wanted = left
            for entry in needs(transaction):
                found = loaded[entry.name].matching(entry, selection, left)
                _purge_from(transaction, entry, [(number, job.id, job.state) for number, job in found])
                left -= len(found)
            return wanted - left

        removed += await shard.change_with(needs, step)
    return removed


def _purge_from(transaction: Transaction, entry: Entry, jobs: Sequence[tuple[int, str, JobState]]) -> None:
    """Jobs of a segment, by number, id and state."""
    if jobs:
        (queue,) = transaction.connection.execute(_SQL["queue_number"]).fetchone()
        _forget_jobs(
            transaction,
            queue,
            [job_id for _, job_id, _ in jobs],
            [STATE_NUMBERS[state] for *_, state in jobs],
        )
        purged = [*_decode_numbers(entry.purged), *(number for number, _, _ in jobs)]
        _put(transaction, replace(entry, jobs=entry.jobs - len(jobs), purged=to_json(purged)))


def _forget_jobs(transaction: Transaction, queue: int, job_ids: list[str], states: list[int]) -> None:
    """Remove the traces that jobs in segments have in the image: counters and idempotency keys."""
    transaction.connection.execute(_SQL["forget_keys"], (to_json(job_ids),))
    counts = Counts(transaction)
    for state, jobs in Counter(states).items():
        counts.move(queue, state, None, jobs)
    counts.flush()


def _put(transaction: Transaction, entry: Entry) -> None:
    if entry.rows or entry.jobs:
        put_entries(transaction, [entry])
    else:
        retire(transaction, [entry.name])


async def remove_jobs(store: OpenStore, job_ids: Sequence[str]) -> list[JobState | JobError]:
    ids = list(job_ids)

    async def ask(shard: Shard, at: list[int]) -> list[JobState | JobError]:
        own = [ids[one] for one in at]

        def needs(transaction: Transaction) -> list[Entry]:
            here = known_ids(transaction, own)
            return holding_jobs(transaction, [job_id for job_id in own if job_id not in here])

        def step(transaction: Transaction, loaded: Loaded) -> list[JobState | JobError]:
            answers = bulk.remove(transaction, own)
            lost = [job_id for job_id, one in zip(own, answers, strict=True) if isinstance(one, JobNotFound)]
            archived = find_archived(transaction, loaded, lost)
            by_entry: dict[str, tuple[Entry, list[tuple[int, str, JobState]]]] = {}
            for job_id, (entry, number, record) in archived.items():
                by_entry.setdefault(entry.name, (entry, []))[1].append((number, job_id, record.state))
            for entry, jobs in by_entry.values():
                _purge_from(transaction, entry, jobs)
            return [
                archived[job_id][2].state if job_id in archived else answer
                for job_id, answer in zip(own, answers, strict=True)
            ]

        return await shard.change_with(needs, step)

    answers = await store.by_home(ids, ask, lambda answer: isinstance(answer, JobNotFound))
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(ids, answers, strict=True)]
