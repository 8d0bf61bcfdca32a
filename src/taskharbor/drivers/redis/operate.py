"""The operator's changes and the upkeep that workers do; then what only reads: jobs, listings and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import itemgetter

import msgspec

from taskharbor.drivers.contract import JobFilter, JobShare, Page, QueueSettings, QueueStats
from taskharbor.drivers.records import STATES, FieldNames, changed_fields, loaded
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.leases import ask_items, job_error
from taskharbor.drivers.redis.library import Word
from taskharbor.drivers.redis.records import END, READY, read_pair, record_from, seq_of
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.errors import JobError
from taskharbor.jobs import TERMINAL_STATES, JobRecord, JobState, Micros
from taskharbor.requests import new_id, new_token

_STAYS = 10
"""Added to the state of a job that has not ended."""
_PORTION = 1000
"""The most jobs of a queue that a listing or a purge reads in one call."""


async def cancel(
    store: RedisStore, job_ids: Sequence[str], now: Micros, only_waiting: bool
) -> list[JobState | JobError]:
    return await _each(store, "cancel", job_ids, now, int(only_waiting))


async def cancel_keys(
    store: RedisStore, keys: Sequence[str], queue: str, now: Micros, only_waiting: bool
) -> list[int]:
    counts: list[int]
    _, *counts = await store.ask("cancel_keys", queue, now, new_token(), int(only_waiting), *keys)
    return counts


async def requeue(
    store: RedisStore, job_ids: Sequence[str], now: Micros, run_at: Micros | None, keep_counts: bool
) -> list[JobState | JobError]:
    return await _each(store, "requeue", job_ids, now, now if run_at is None else run_at, int(keep_counts))


async def remove(store: RedisStore, job_ids: Sequence[str]) -> list[JobState | JobError]:
    return await _each(store, "remove", job_ids, await store.time(), behind_id=("",))


async def _each(
    store: RedisStore,
    function: str,
    job_ids: Sequence[str],
    now: Micros,
    *first: Word,
    behind_id: tuple[Word, ...] = (),
) -> list[JobState | JobError]:
    homes = await store.located(job_ids)
    queues = [homes.get(job_id) for job_id in job_ids]
    words = [(job_id, *behind_id) for job_id in job_ids]
    codes = await ask_items(store, function, now, words, queues, lambda items: chain(first, *items))
    return [_answer(job_id, code) for job_id, code in zip(job_ids, codes, strict=True)]


def _answer(job_id: str, code: int) -> JobState | JobError:
    if code >= _STAYS:
        return JobError(job_id, f"the job is {STATES[code - _STAYS]} and has not ended: cancel it first")
    return STATES[code] if code >= 0 else job_error(job_id, code)


async def reclaim(store: RedisStore, now: Micros, queue: str | None, limit: int) -> int:
    names = list(await store.queues()) if queue is None else [queue]
    due = await store.commands([("ZCOUNT", store.keys(name)["active"], "-inf", now) for name in names])
    portions: dict[str, tuple[Word, ...]] = {}
    for name, count in zip(names, due, strict=True):
        if portion := min(count, limit):
            limit -= portion
            portions[name] = portion, new_id()
    answers = await store.ask_queues("reclaim", now, portions)
    for name, (untold, _) in answers.items():
        if untold:
            await deliver(store, name)
    return sum(ended for _, ended in answers.values())


# -- cleaning up ------------------------------------------------------------------------------------------


async def purge(store: RedisStore, selection: JobFilter, limit: int) -> int:
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    selection = msgspec.structs.replace(selection, states=states, until=None)
    removed = 0
    cursor: str | None = None
    while removed < limit:
        page = await list_jobs(store, selection, 0, min(limit - removed, _PORTION), cursor)
        # A job that was requeued meanwhile has another end, or none.
        words = [(job.id, job.finished_at_us or "") for job in page.jobs]
        queues = [job.queue for job in page.jobs]
        codes = await ask_items(store, "remove", 0, words, queues, chain.from_iterable)
        removed += sum(0 <= code < _STAYS for code in codes)
        if (cursor := page.cursor) is None:
            break
    return removed


async def prune_queues(store: RedisStore, now: Micros, limit: int) -> int:
    default = msgspec.structs.asdict(QueueSettings())
    keeps = [default[name] for name in ("keep_done_us", "keep_dead_us", "keep_attempts_us")]
    jobs = rows = 0
    for queue in list(await store.queues()):
        jobs_gone, rows_gone = await store.ask("prune", queue, now, limit - jobs, limit - rows, *keeps)
        jobs += jobs_gone
        rows += rows_gone
    return jobs + rows


# -- settings ---------------------------------------------------------------------------------------------


async def configure(
    store: RedisStore, queue: str, settings: QueueSettings, now: Micros, fields: FieldNames, declares: bool
) -> None:
    values: list[Word] = []
    for name in changed_fields(fields, False):
        value = getattr(settings, name)
        if value is None:
            value = "ever" if name.startswith("keep_") else ""
        values += (name, int(value) if isinstance(value, bool) else value)
    await store.register([queue])
    declaration = f"+{settings.declaration}" if declares else ""
    await store.ask("configure", queue, now, new_token(), declaration, *values)


async def settings(store: RedisStore, queue: str) -> QueueSettings:
    return settings_from(await store.command("HGETALL", store.keys(queue)["settings"]))


def settings_from(pairs: Sequence[bytes]) -> QueueSettings:
    values = {
        name.decode(): None if name.startswith(b"keep_") and value == b"ever" else value.decode()
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
    }
    # Redis has texts only. The types are those of the settings.
    return msgspec.convert(values, QueueSettings, strict=False)


# -- single jobs ------------------------------------------------------------------------------------------


async def get(store: RedisStore, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    found: dict[str, JobRecord] = {}
    asked: set[str] = set()
    while True:
        names = store.numbers.keys() - asked
        asked |= names
        wanted = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in found]
        answers = await store.ask_queues("find", 0, dict.fromkeys(names, wanted))
        for name, values in answers.items():
            for job_id, value in zip(wanted, values, strict=True):
                if value is not None:
                    found[job_id] = loaded(job_id, record_from, job_id, name, value, now)
        # Another process may have made queues that this handle does not know.
        if len(found) == len(set(job_ids)) or (await store.queues()).keys() <= asked:
            return [found.get(job_id) for job_id in job_ids]


# -- listings ---------------------------------------------------------------------------------------------


async def list_jobs(
    store: RedisStore, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    end = (0, 0) if selection.until is None else read_pair(selection.until, ".")
    seq, last = (END, 0) if cursor is None else read_pair(cursor, ".")
    numbers = {n: number for n, number in (await store.queues()).items() if selection.queue in (None, n)}
    # Among jobs with the same number, jobs of the queue with the higher number come first.
    below = {queue: seq + (number < last) for queue, number in numbers.items()}
    wanted = _wanted(selection)
    if wanted is None:
        below = {}
    found: list[tuple[tuple[int, int], JobRecord]] = []
    certain = found
    # One more than the limit shows whether anything follows.
    portion = min(limit + 1, _PORTION)
    while below and len(certain) <= limit:
        words = {queue: (bound, portion, wanted or "") for queue, bound in below.items()}
        below, read_to = {}, end
        for queue, (following, *pairs) in (await store.ask_queues("page", 0, words)).items():
            for job_id, value in zip(pairs[::2], pairs[1::2], strict=True):
                record = loaded(job_id.decode(), record_from, job_id.decode(), queue, value, now)
                if _matches(record, selection):
                    found.append(((seq_of(value), numbers[queue]), record))
            if following and (following, numbers[queue]) > end:
                below[queue] = following
                read_to = max(read_to, (following, numbers[queue]))
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


async def split_jobs(store: RedisStore, queue: str | None, parts: int) -> list[JobShare]:
    queues = {name: n for name, n in (await store.queues()).items() if queue in (None, name)}
    sizes = await store.commands([("ZCARD", store.keys(name)["jobs"]) for name in queues])
    shares: list[JobShare] = []
    for (name, number), size in zip(queues.items(), sizes, strict=True):
        cuts = max(1, round(parts * size / sum(sizes))) if size else 0
        key, ranks = store.keys(name)["jobs"], sorted({size * n // cuts for n in range(1, cuts)} - {0})
        found = await store.commands([("ZRANGE", key, -rank, -rank, "WITHSCORES") for rank in ranks])
        edges = [None, *(f"{int(pair[1])}.{number}" for pair in found if pair), None]
        if size:
            shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(edges)]
    return shares


# -- statistics -------------------------------------------------------------------------------------------


async def stats(store: RedisStore, now: Micros, queue: str | None) -> list[QueueStats]:
    names = sorted(await store.queues()) if queue is None else [queue]
    answers = await store.ask_queues("stats", now, dict.fromkeys(names, ()))
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
        for name, (is_known, said, counts, totals, head) in answers.items()
        if is_known or queue is not None
    ]
