"""The operator's changes, and the upkeep that workers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.inspect import list_jobs, settings_from
from taskharbor.drivers.redis.library import Call, Word
from taskharbor.drivers.redis.records import STATES
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros
from taskharbor.requests import new_id

_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobFinished, -3: KeyConflict, -4: JobNotDead}
_STAYS = 10
"""Added to the state of a job that has not ended."""
_PORTION = 1000
"""Jobs that a purge looks at in one call."""


async def cancel(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _each(store, job_ids, lambda queue, _, ids: store.call("cancel", queue, now, *ids))


async def requeue(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _each(
        store, job_ids, lambda queue, again, ids: store.call("requeue", queue, now, again, *ids)
    )


async def remove(store: Store, job_ids: Sequence[str]) -> list[JobState | JobError]:
    now = await store.time()

    def call(queue: str, _: int, ids: Sequence[str]) -> Call:
        return store.call("remove", queue, now, *[word for job_id in ids for word in (job_id, "")])

    return await _each(store, job_ids, call)


async def _each(
    store: Store, job_ids: Sequence[str], call: Callable[[str, int, Sequence[str]], Call]
) -> list[JobState | JobError]:
    """Ask the queue of each job, in one round trip, and return the answers."""
    homes = await store.located(job_ids)
    groups: dict[str, list[int]] = {}
    for n, job_id in enumerate(job_ids):
        if job_id in homes:
            groups.setdefault(homes[job_id], []).append(n)
    answers = await store.run(
        lambda again: [call(queue, again, [job_ids[n] for n in ns]) for queue, ns in groups.items()]
    )
    found: list[JobState | JobError] = [JobNotFound(job_id) for job_id in job_ids]
    for ns, codes in zip(groups.values(), answers, strict=True):
        for n, code in zip(ns, codes, strict=True):
            found[n] = _answer(job_ids[n], code)
    return found


def _answer(job_id: str, code: int) -> JobState | JobError:
    if code >= _STAYS:
        return JobError(job_id, f"the job is {STATES[code - _STAYS]} and has not ended: cancel it first")
    return STATES[code] if code >= 0 else _ERRORS[code](job_id)


async def reclaim(store: Store, now: Micros, queue: str | None, limit: int) -> int:
    names = list(await store.queues()) if queue is None else [queue]
    due = await store.commands([("ZCOUNT", store.keys(name)["active"], "-inf", now) for name in names])
    portions: dict[str, int] = {}
    for name, count in zip(names, due, strict=True):
        if portion := min(count, limit):
            limit -= portion
            portions[name] = portion
    # A repeated call may end other leases than its first try, so their dead jobs need other ids in the failure queue.
    answers = await store.run(
        lambda _: [store.call("reclaim", name, now, portion, new_id()) for name, portion in portions.items()]
    )
    for name, (untold, _) in zip(portions, answers, strict=True):
        if untold:
            await deliver(store, name)
    return sum(ended for _, ended in answers)


# -- cleaning up ------------------------------------------------------------------------------------------


async def purge(store: Store, selection: JobFilter, limit: int) -> int:
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    selection = msgspec.structs.replace(selection, states=states, until=None)
    removed = 0
    cursor: str | None = None
    while removed < limit:
        page = await list_jobs(store, selection, 0, min(limit - removed, _PORTION), cursor)
        groups: dict[str, list[Word]] = {}
        for job in page.jobs:
            # A job that was requeued meanwhile has another end, or none.
            groups.setdefault(job.queue, []).extend((job.id, job.finished_at_us or ""))
        answers = await store.ask_all([store.call("remove", name, 0, *ids) for name, ids in groups.items()])
        removed += sum(0 <= code < _STAYS for codes in answers for code in codes)
        cursor = page.cursor
        if cursor is None:
            break
    return removed


async def prune(store: Store, now: Micros, limit: int) -> int:
    keeps = [kept_for(keep) for keep in msgspec.structs.astuple(QueueSettings())[-3:]]
    jobs = rows = 0
    for queue in list(await store.queues()):
        jobs_gone, rows_gone = await store.ask("prune", queue, now, limit - jobs, limit - rows, *keeps)
        jobs += jobs_gone
        rows += rows_gone
    return jobs + rows


# -- settings ---------------------------------------------------------------------------------------------


async def configure(store: Store, queue: str, settings: QueueSettings, now: Micros) -> None:
    values: list[Word] = []
    for name, value in msgspec.structs.asdict(settings).items():
        if name.startswith("keep_"):
            values += (name, kept_for(value))
        elif value is not None:
            values += (name, int(value) if isinstance(value, bool) else value)
    await store.register([queue])
    await store.ask("configure", queue, now, *values)


def kept_for(keep: Micros | None) -> Word:
    return "ever" if keep is None else keep


async def settings_of(store: Store, queue: str) -> QueueSettings:
    return settings_from(await store.command("HGETALL", store.keys(queue)["settings"]))
