"""The operator's changes, and the upkeep that workers do on the side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.redis.library import Call, Word
from taskharbor.drivers.redis.records import STATES, encode
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros
from taskharbor.requests import new_id

_CANCEL_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobFinished}
_REQUEUE_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobNotDead, -3: KeyConflict}
_FOR_EVER = "ever"
_DEFAULTS = QueueSettings()


async def cancel(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    def call(queue: str, again: int, ids: Sequence[str]) -> Call:
        return store.call("cancel", queue, now, *ids)

    return await _each(store, job_ids, call, _CANCEL_ERRORS)


async def requeue(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    def call(queue: str, again: int, ids: Sequence[str]) -> Call:
        return store.call("requeue", queue, now, again, *ids)

    return await _each(store, job_ids, call, _REQUEUE_ERRORS)


async def _each(
    store: Store,
    job_ids: Sequence[str],
    call: Callable[[str, int, Sequence[str]], Call],
    errors: dict[int, type[JobError]],
) -> list[JobState | JobError]:
    """Ask the queue that has each job, all in one go."""
    homes = await store.located(job_ids)
    groups: dict[str, list[int]] = {}
    for n, job_id in enumerate(job_ids):
        if job_id in homes:
            groups.setdefault(homes[job_id], []).append(n)
    codes = [-1] * len(job_ids)

    def make(again: int) -> list[Call]:
        return [call(queue, again, [job_ids[n] for n in ns]) for queue, ns in groups.items()]

    if groups:
        for ns, answers in zip(groups.values(), await store.client.run(make), strict=True):
            for n, code in zip(ns, answers, strict=True):
                codes[n] = code
    return [
        STATES[code] if code >= 0 else errors[code](job_id)
        for job_id, code in zip(job_ids, codes, strict=True)
    ]


async def reclaim(store: Store, now: Micros, queue: str | None, limit: int) -> tuple[int, list[str]]:
    """How many leases were ended, and the queues in which deaths have yet to be told of."""
    names = list(await store.queues()) if queue is None else [queue]
    due = await store.client.commands([("ZCOUNT", store.keys(name)["active"], "-inf", now) for name in names])
    calls: list[Call] = []
    asked: list[str] = []
    for name, count in zip(names, due, strict=True):
        portion = min(count, limit)
        if portion > 0:
            limit -= portion
            asked.append(name)
            calls.append(store.call("reclaim", name, now, portion, new_id()))
    answers = await store.ask_all(calls) if calls else []
    untold = [name for name, (waiting, _) in zip(asked, answers, strict=True) if waiting]
    return sum(ended for _, ended in answers), untold


# -- cleaning up ------------------------------------------------------------------------------------------


async def purge(store: Store, selection: JobFilter, limit: int) -> int:
    if selection.worker is not None:
        # A job that ended is nobody's.
        return 0
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    names = list(await store.queues()) if selection.queue is None else [selection.queue]
    removed = 0
    for name in names:
        for state in sorted(states):
            removed += await _purge(store, name, state, selection, limit - removed)
    return removed


async def _purge(store: Store, queue: str, state: JobState, selection: JobFilter, limit: int) -> int:
    before: Word = "+inf" if selection.finished_before_us is None else selection.finished_before_us
    types = b"" if selection.types is None else encode(sorted(selection.types))
    key = ("0", "") if selection.key is None else ("1", selection.key)
    removed = kept = 0
    while removed < limit:
        gone, passed_over, may_be_more = await store.ask(
            "purge", queue, 0, state.value, limit - removed, kept, before, types, *key
        )
        removed += gone
        kept += passed_over
        if not may_be_more:
            break
    return removed


async def prune(store: Store, now: Micros, limit: int) -> int:
    keeps = [
        _kept_for(keep)
        for keep in (_DEFAULTS.keep_done_us, _DEFAULTS.keep_dead_us, _DEFAULTS.keep_attempts_us)
    ]
    jobs = rows = 0
    for queue in list(await store.queues()):
        jobs_gone, rows_gone = await store.ask("prune", queue, now, limit - jobs, limit - rows, *keeps)
        jobs += jobs_gone
        rows += rows_gone
    return jobs + rows


# -- settings ---------------------------------------------------------------------------------------------


async def configure(store: Store, queue: str, settings: QueueSettings, now: Micros) -> None:
    values: list[Word] = ["paused", int(settings.paused)]
    if settings.max_inflight is not None:
        values += ("max_inflight", settings.max_inflight)
    if settings.failure_queue is not None:
        values += ("failure_queue", settings.failure_queue)
    values += ("keep_done_us", _kept_for(settings.keep_done_us))
    values += ("keep_dead_us", _kept_for(settings.keep_dead_us))
    values += ("keep_attempts_us", _kept_for(settings.keep_attempts_us))
    await store.register([queue])
    await store.ask("configure", queue, now, *values)


def _kept_for(keep: Micros | None) -> Word:
    return _FOR_EVER if keep is None else keep


async def settings_of(store: Store, queue: str) -> QueueSettings:
    return settings_from(await store.client.command("HGETALL", store.keys(queue)["settings"]))


def settings_from(pairs: Sequence[bytes]) -> QueueSettings:
    if not pairs:
        return _DEFAULTS
    said = dict(
        zip([name.decode() for name in pairs[::2]], [value.decode() for value in pairs[1::2]], strict=True)
    )

    def keep(name: str) -> Micros | None:
        return None if said[name] == _FOR_EVER else int(said[name])

    return QueueSettings(
        paused=said["paused"] == "1",
        max_inflight=int(said["max_inflight"]) if "max_inflight" in said else None,
        failure_queue=said.get("failure_queue"),
        keep_done_us=keep("keep_done_us"),
        keep_dead_us=keep("keep_dead_us"),
        keep_attempts_us=keep("keep_attempts_us"),
    )
