"""All combinations of update flags, onto every kind of job they can meet; the model says what must come out.

Jobs of different keys do not touch each other, so one case tries several combinations at once, each on a key of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias, get_args

from taskharbor.jobs import SECOND, JobRecord, UpdateFlags, UpdateRunAt
from taskharbor_testkit.conformance.case import Body, add
from taskharbor_testkit.conformance.twin import Twin, release, retry

Combinations: TypeAlias = Sequence[UpdateFlags]

COMBINATIONS = [
    UpdateFlags(payload, run_at, retry_, reset)
    for run_at, payload, retry_, reset in itertools.product(
        get_args(UpdateRunAt), (True, False), (False, True), (False, True)
    )
]


def _update(t: Twin, key: str, flags: UpdateFlags, shift: int) -> JobRecord:
    return t.job(
        key=key,
        type="sms",
        payload=b"updated",
        codec="msgpack",
        headers={"from": "update"},
        priority=4,
        timeout_us=2,
        run_at_us=t.now + shift * SECOND,
        max_attempts=19,
        max_stalls=18,
        backoff_min_us=7,
        backoff_max_us=77,
        update=flags,
    )


def _updates(t: Twin, combinations: Combinations, shift: int) -> list[JobRecord]:
    return [_update(t, f"k{n}", flags, shift) for n, flags in enumerate(combinations)]


async def _failed_and_stalled_once(t: Twin, count: int) -> None:
    """Counters above zero, so that resetting them shows."""
    originals = [
        t.job(key=f"k{n}", headers={"from": "original"}, timeout_us=1, max_attempts=9, max_stalls=8)
        for n in range(count)
    ]
    await t.enqueue(*originals)
    held = await t.reserve(count, lease=5)
    await t.settle(*[retry(job, t.now) for job in held])
    await t.reserve(count, lease=5)
    t.advance(5)
    await t.reclaim()


def _onto_waiting(combinations: Combinations) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t, len(combinations))
        await t.enqueue(*_updates(t, combinations, +60))
        await t.enqueue(*_updates(t, combinations, -60))

    return body


def _onto_blocked(combinations: Combinations) -> Body:
    async def body(t: Twin) -> None:
        count = len(combinations)
        await _failed_and_stalled_once(t, count)
        held = await t.reserve(count)
        first = UpdateFlags(payload=False, run_at="later")
        await t.enqueue(*[t.job(key=f"k{n}", payload=b"blocked", update=first) for n in range(count)])
        await t.enqueue(*_updates(t, combinations, +60))
        await t.enqueue(*_updates(t, [UpdateFlags(payload=False)] * count, -60))
        await t.settle(*[retry(job, t.now + 30 * SECOND) for job in held])

    return body


def _merged_at_retry(combinations: Combinations) -> Body:
    async def body(t: Twin) -> None:
        for shift in (+60, -60):
            t.advance(300)
            await _failed_and_stalled_once(t, len(combinations))
            held = await t.reserve(len(combinations))
            await t.enqueue(*_updates(t, combinations, shift))
            await t.settle(*[retry(job, t.now + 30 * SECOND) for job in held])
            t.advance(300)
            await t.reserve(2 * len(combinations), lease=1000)
            await t.call("cancel", list(t.model.jobs), now=t.now)
            await t.settle(*[release(job) for job in t.model.jobs.values() if job.token])

    return body


def _merged_at_stall(combinations: Combinations) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t, len(combinations))
        await t.reserve(len(combinations), lease=10)
        await t.enqueue(*_updates(t, combinations, +60))
        t.advance(10)
        await t.reclaim()

    return body


def _merged_at_release(combinations: Combinations) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t, len(combinations))
        held = await t.reserve(len(combinations))
        await t.enqueue(*_updates(t, combinations, -60))
        await t.settle(*[release(job, t.now + 30 * SECOND) for job in held])

    return body


MEETINGS: dict[str, Callable[[Combinations], Body]] = {
    "onto_waiting": _onto_waiting,
    "onto_blocked": _onto_blocked,
    "merged_at_retry": _merged_at_retry,
    "merged_at_stall": _merged_at_stall,
    "merged_at_release": _merged_at_release,
}

for _meeting, _body_of in MEETINGS.items():
    for _run_at, _alike in itertools.groupby(COMBINATIONS, lambda flags: flags.run_at):
        add(_body_of(list(_alike)), f"{_meeting}_with_run_at_{_run_at}")
