"""All combinations of update flags, onto every kind of job they can meet; the model says what must come out."""

from __future__ import annotations

import itertools
from typing import get_args

from taskharbor.conformance.case import Body, add
from taskharbor.conformance.twin import Twin, release, retry
from taskharbor.jobs import SECOND, JobRecord, UpdateFlags, UpdateRunAt

COMBINATIONS = [
    UpdateFlags(payload, run_at, retry_, reset)
    for payload, run_at, retry_, reset in itertools.product(
        (True, False), get_args(UpdateRunAt), (False, True), (False, True)
    )
]


def _name(flags: UpdateFlags) -> str:
    words = [
        "payload" if flags.payload else "",
        f"run_at_{flags.run_at}" if flags.run_at != "no" else "",
        "retry" if flags.retry else "",
        "reset" if flags.reset_counts else "",
    ]
    return "_".join(word for word in words if word) or "nothing"


def _original(t: Twin) -> JobRecord:
    return t.job(key="k", headers={"from": "original"}, timeout_us=1, max_attempts=9, max_stalls=8)


def _update(t: Twin, flags: UpdateFlags, shift: int) -> JobRecord:
    return t.job(
        key="k",
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


async def _failed_and_stalled_once(t: Twin) -> None:
    """Counters above zero, so that resetting them shows."""
    held = await t.lease(_original(t), lease=5)
    await t.settle(retry(held, t.now))
    await t.reserve(lease=5)
    t.advance(5)
    await t.reclaim()


def _onto_waiting(flags: UpdateFlags) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t)
        await t.enqueue(_update(t, flags, +60))
        await t.enqueue(_update(t, flags, -60))

    return body


def _onto_blocked(flags: UpdateFlags) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t)
        held = await t.lease()
        await t.enqueue(t.job(key="k", payload=b"blocked", update=UpdateFlags(payload=False, run_at="later")))
        await t.enqueue(_update(t, flags, +60))
        await t.enqueue(_update(t, UpdateFlags(payload=False), -60))
        await t.settle(retry(held, t.now + 30 * SECOND))

    return body


def _merged_at_retry(flags: UpdateFlags) -> Body:
    async def body(t: Twin) -> None:
        for shift in (+60, -60):
            t.advance(300)
            await _failed_and_stalled_once(t)
            held = await t.lease()
            await t.enqueue(_update(t, flags, shift))
            await t.settle(retry(held, t.now + 30 * SECOND))
            t.advance(300)
            await t.reserve(10, lease=1000)
            await t.call("cancel", list(t.model.jobs), now=t.now)
            await t.settle(*[release(job) for job in t.model.jobs.values() if job.token])

    return body


def _merged_at_stall(flags: UpdateFlags) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t)
        await t.reserve(lease=10)
        await t.enqueue(_update(t, flags, +60))
        t.advance(10)
        await t.reclaim()

    return body


def _merged_at_release(flags: UpdateFlags) -> Body:
    async def body(t: Twin) -> None:
        await _failed_and_stalled_once(t)
        held = await t.lease()
        await t.enqueue(_update(t, flags, -60))
        await t.settle(release(held, t.now + 30 * SECOND))

    return body


for _flags in COMBINATIONS:
    add(_onto_waiting(_flags), f"{_name(_flags)}_onto_waiting")
    add(_onto_blocked(_flags), f"{_name(_flags)}_onto_blocked")
    add(_merged_at_retry(_flags), f"{_name(_flags)}_merged_at_retry")
    add(_merged_at_stall(_flags), f"{_name(_flags)}_merged_at_stall")
    add(_merged_at_release(_flags), f"{_name(_flags)}_merged_at_release")
