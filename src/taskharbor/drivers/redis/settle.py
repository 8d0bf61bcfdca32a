"""Ending and extending leases, hundreds in one round trip."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar, assert_never

from taskharbor.drivers.contract import Ack, Discard, Extension, Fail, Release, Retry, Settlement
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.library import Word
from taskharbor.drivers.redis.records import NONCE_LENGTH, encode
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import JobError, JobNotFound, JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import Failure, Lease, Micros
from taskharbor.requests import new_id

A = TypeVar("A", int, int | bytes)
T = TypeVar("T", Settlement, Extension)

_OK = 0
_NOT_FOUND = 1
_ERRORS: dict[int, type[JobError]] = {
    _NOT_FOUND: JobNotFound,
    2: JobNotInflight,
    3: LeaseMismatch,
    4: LeaseExpired,
}
_FIRST_PROGRESS = 5
"""Where it begins among the arguments of its script."""
_token = attrgetter("token")


async def settle(store: Store, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    untold: list[str] = []

    async def ask(groups: dict[str, list[int]]) -> dict[int, int]:
        told = {queue: _told([settlements[n] for n in ns]) for queue, ns in groups.items()}
        failure_id = new_id()
        # Each queue's deaths are named apart.
        answers = await store.run(
            lambda again: [
                store.call("settle", queue, now, again, f"{failure_id}.{n}" if n else failure_id, *args)
                for n, (queue, args) in enumerate(told.items())
            ]
        )
        codes: dict[int, int] = {}
        for (queue, ns), (waiting, digits) in zip(groups.items(), answers, strict=True):
            if waiting:
                untold.append(queue)
            # No digits: all went well.
            codes.update(zip(ns, (digit - 48 for digit in digits), strict=False))
        return codes

    codes = await _where_they_are(store, settlements, ask, _NOT_FOUND)
    for queue in untold:
        await deliver(store, queue)
    errors = {n: _ERRORS[code] for n, code in codes.items() if code != _OK}
    return [errors[n](one.job_id) if n in errors else None for n, one in enumerate(settlements)]


async def _where_they_are(
    store: Store,
    items: Sequence[T],
    ask: Callable[[dict[str, list[int]]], Awaitable[dict[int, A]]],
    missing: A,
) -> dict[int, A]:
    """Ask each item's queue, as its token names it. What is not there is looked for everywhere: who gives a wrong token is
    still told what is wrong with it."""
    groups: dict[str, list[int]] = {}
    for n, item in enumerate(items):
        groups.setdefault(item.token[NONCE_LENGTH:], []).append(n)
    answers = await ask(groups)
    lost = [n for n, answer in answers.items() if answer == missing]
    if lost:
        homes = await store.located([items[n].job_id for n in lost])
        groups = {}
        for n in lost:
            home = homes.get(items[n].job_id)
            if home is not None and home != items[n].token[NONCE_LENGTH:]:
                del answers[n]
                groups.setdefault(home, []).append(n)
        if groups:
            answers.update(await ask(groups))
    return answers


def _told(settlements: Sequence[Settlement]) -> list[Word]:
    leases: list[Word] = []
    others: list[tuple[Any, ...]] = []
    results: list[bytes] = []
    place = 0
    # One claim's leases have one token, and mostly end together.
    for token, run in groupby(settlements, _token):
        ids: list[Word] = []
        for one in run:
            place += 1
            ids.append(one.job_id)
            if type(one) is not Ack or one.result is not None:
                others.append((place, *_other(one, results)))
        leases += (token[:NONCE_LENGTH], len(ids), *ids)
    # The first result stands last, so that its place does not depend on how many there are.
    return [encode(others) if others else b"", place, *leases, *reversed(results)]


def _other(settlement: Settlement, results: list[bytes]) -> tuple[Any, ...]:
    """What the server must know of one that is not a plain ack. Binary values go apart: its packer knows text only."""
    match settlement:
        case Ack(result=result):
            results.append(result or b"")
            return (0, len(results) - 1)
        case Retry(run_at_us=run_at, attempts=attempts, error=error):
            return (1, run_at, attempts, *_error(error))
        case Fail(attempts=attempts, error=error):
            return (2, attempts, *_error(error))
        case Release(run_at_us=run_at_or_none):
            return (3, False if run_at_or_none is None else run_at_or_none)
        case Discard(reason=reason):
            return (4, False) if reason is None else (4, *_error(reason))
        case _:
            assert_never(settlement)


def _error(error: Failure) -> tuple[str, str, str]:
    return error.type, error.message, error.text


async def extend_lease(
    store: Store, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    async def ask(groups: dict[str, list[int]]) -> dict[int, int | bytes]:
        calls = [
            store.call("extend", queue, now, lease_for, *_beats([extensions[n] for n in ns]))
            for queue, ns in groups.items()
        ]
        answers = await store.ask_all(calls)
        return {
            n: answer
            for ns, several in zip(groups.values(), answers, strict=True)
            for n, answer in zip(ns, several, strict=True)
        }

    answers = await _where_they_are(store, extensions, ask, b"%d" % _NOT_FOUND)
    return [_lease(one, answers[n]) for n, one in enumerate(extensions)]


def _beats(extensions: Sequence[Extension]) -> list[Word]:
    progress = [one.progress for one in extensions if one.progress is not None]
    places = iter(range(_FIRST_PROGRESS, _FIRST_PROGRESS + len(progress)))
    beats = [
        (one.job_id, one.token[:NONCE_LENGTH], False if one.progress is None else next(places))
        for one in extensions
    ]
    return [encode(beats), *progress]


def _lease(extension: Extension, answer: int | bytes) -> Lease | JobError:
    if isinstance(answer, bytes):
        return _ERRORS[int(answer)](extension.job_id)
    return Lease(extension.job_id, extension.token, abs(answer), answer < 0)
