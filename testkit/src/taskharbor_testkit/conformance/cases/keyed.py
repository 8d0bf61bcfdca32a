"""Keyed jobs: for a (queue, key) at most one waits and one is inflight; the others update it or are merged into it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, get_args

from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import SECOND, JobRecord, UpdateFlags, UpdateRunAt
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import SETTLEMENTS, End, Twin, ack, discard, fail, release, retry


async def _inflight_and_blocked(t: Twin, **blocked: Any) -> tuple[JobRecord, JobRecord]:
    held = await t.lease(t.job(key="k", payload=b"old"))
    job = t.job(key="k", **({"payload": b"new"} | blocked))
    await t.stores(job)
    return held, job


async def _end(t: Twin, held: JobRecord, how: str) -> None:
    if how == "a_stall":
        t.advance(30)
        await t.reclaim()
    elif how == "an_honoured_cancel":
        await t.cancel(held.id)
        await t.settle(SETTLEMENTS["retry"](held))
    else:
        await t.settle(SETTLEMENTS[how](held))


@parametrised
async def _frees(t: Twin, how: str) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await _end(t, held, how)
    await t.shows(blocked, state="ready")
    assert (await t.lease()).id == blocked.id


@parametrised
async def _absorbs(t: Twin, how: str) -> None:
    """The survivor gets the fields that the flags name, the other reads as merged into it."""
    held, blocked = await _inflight_and_blocked(t)
    await _end(t, held, how)
    await t.shows(held, state="ready", payload=b"new")
    await t.shows(blocked, state="cancelled", merged_into=held.id, finished_at_us=t.now)
    await t.logged(blocked, outcome="merged")
    assert (await t.stats()).cancelled_total == 1


for _how in ("ack", "fail", "discard", "an_honoured_cancel"):
    _frees(f"{_how}_unblocks", _how)
for _how in ("retry", "release", "a_stall"):
    _absorbs(f"{_how}_absorbs_the_blocked_job", _how)


async def a_key_waits_once_within_a_batch(t: Twin) -> None:
    first, second = t.job(key="k"), t.job(key="k", payload=b"new")
    assert await t.enqueue(first, second) == [Enqueued(first.id), Enqueued(first.id, existed=True)]


async def an_ended_job_of_the_key_is_no_obstacle(t: Twin) -> None:
    for end in (ack, fail, discard):
        await t.settle(end(await t.lease(t.job(key="k"))))
    await t.cancel((await t.add(key="k")).id)
    job = t.job(key="k")
    await t.stores(job)
    await t.shows(job, state="ready")


async def enqueue_while_inflight_is_blocked(t: Twin) -> None:
    """A second one updates the blocked one."""
    _, blocked = await _inflight_and_blocked(t)
    await t.shows(blocked, state="blocked")
    await t.updates(t.job(key="k", payload=b"newer"), blocked)
    await t.shows(blocked, payload=b"newer")


async def enqueue_while_the_lease_is_over_is_blocked(t: Twin) -> None:
    """Inflight is inflight, valid lease or not, until somebody reclaims."""
    await t.lease(t.job(key="k"), lease=10)
    t.advance(60)
    await t.shows(await t.add(key="k"), state="blocked")


async def a_blocked_job_does_not_run_at_its_time(t: Twin) -> None:
    _, blocked = await _inflight_and_blocked(t, run_at_us=t.now + SECOND)
    t.advance(2)
    assert await t.reserve() == []
    await t.shows(blocked, state="blocked")


async def death_by_stall_unblocks(t: Twin) -> None:
    await t.lease(t.job(key="k", max_attempts=1), lease=5)
    blocked = await t.add(key="k")
    t.advance(5)
    assert (await t.lease()).id == blocked.id


async def an_unblocked_job_waits_for_its_own_run_at(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t, run_at_us=t.now + 9 * SECOND)
    await t.settle(ack(held))
    await t.shows(blocked, state="scheduled")
    t.advance(9)
    assert (await t.lease()).id == blocked.id


async def unblocking_keeps_to_key_and_queue(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t)
    other_key = await t.lease(t.job(key="k2"))
    other_queue = await t.lease(t.job(key="k", queue="other"), queue="other")
    blocked = await t.add(key="k2"), await t.add(key="k", queue="other")
    await t.settle(ack(held))
    assert await t.states(*blocked) == "blocked blocked"
    await t.settle(ack(other_key), ack(other_queue))
    assert await t.states(*blocked) == "ready ready"


async def a_stall_seen_by_reserve_absorbs_and_leases_what_it_became(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t, type="sms")
    t.advance(30)
    await t.lease(types=["sms"])
    await t.shows(held, state="inflight", payload=b"new", stalls=1)


async def a_merge_may_reset_the_counts_of_this_very_failure(t: Twin) -> None:
    """The survivor changes by its own end first, then by the flags."""
    held, _ = await _inflight_and_blocked(t, update=UpdateFlags(reset_counts=True))
    failure = retry(held, t.now)
    await t.settle(failure)
    await t.shows(held, attempts=0, stalls=0, last_error=failure.error.text)


async def the_row_of_the_end_tells_of_the_job_that_ran(t: Twin) -> None:
    """Type and payload size in the log are those of the execution, not those merged in after it."""
    held, _ = await _inflight_and_blocked(t, type="sms", payload=b"a much longer payload")
    await t.settle(retry(held, t.now))
    await t.logged(held, type="mail", payload_size=3)


async def a_survivor_that_merged_is_one_job(t: Twin) -> None:
    """After the merge the key waits once more: the next enqueue updates the survivor."""
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(release(held))
    await t.updates(t.job(key="k", payload=b"third"), held)
    assert [job.id for job in await t.reserve(10)] == [held.id]
    await t.shows(blocked, state="cancelled")


async def cancelling_the_blocked_one_leaves_the_inflight_one(t: Twin) -> None:
    """The key may block again."""
    held, blocked = await _inflight_and_blocked(t)
    assert await t.cancel(blocked.id) == ["cancelled"]
    third = t.job(key="k", payload=b"third")
    await t.stores(third)
    await t.settle(retry(held, t.now))
    await t.shows(held, payload=b"third", cancel_requested=False)
    assert await t.states(blocked, third) == "cancelled cancelled"
    await t.shows(blocked, merged_into=None)


async def updating_a_scheduled_job_may_make_it_ready(t: Twin) -> None:
    job = await t.add(key="k", run_at_us=t.now + 60 * SECOND)
    await t.updates(t.job(key="k", update=UpdateFlags(run_at="yes")), job)
    await t.shows(job, state="ready")
    assert (await t.lease()).id == job.id


async def updating_a_ready_job_may_schedule_it(t: Twin) -> None:
    job = await t.add(key="k")
    await t.updates(t.job(key="k", run_at_us=t.now + SECOND, update=UpdateFlags(run_at="later")), job)
    await t.shows(job, state="scheduled")
    assert await t.reserve() == []


async def an_update_leaves_who_the_job_is(t: Twin) -> None:
    """Without the flag for it the priority stays. Id, created_at, place of insertion and idempotency key always stay."""
    job, behind = await t.add(key="k", priority=3, idempotency_key="i"), await t.add(priority=3)
    t.advance(1)
    flags = UpdateFlags(payload=True, retry=True, reset_counts=True)
    await t.updates(t.job(key="k", priority=9, idempotency_key="j", update=flags, type="sms"), job)
    await t.shows(job, priority=3, created_at_us=job.created_at_us, idempotency_key="i")
    assert [held.id for held in await t.reserve(2)] == [job.id, behind.id]


@parametrised
async def _reprioritised(t: Twin, delay: int) -> None:
    """Up and down; the place of insertion stays, so it is first among equals that came later."""
    flags = UpdateFlags(payload=False, priority=True)
    moved, behind = await t.add(key="k", run_at_us=t.now + delay), await t.add(run_at_us=t.now + delay)
    ahead = await t.add(priority=5, run_at_us=t.now + delay)
    for priority in (9, -1, 5, 0):
        await t.updates(t.job(key="k", priority=priority, payload=b"new", update=flags), moved)
        await t.shows(moved, priority=priority, payload=b"{}", state="scheduled" if delay else "ready")
    await t.updates(t.job(key="k", priority=6, update=flags), moved)
    t.now += delay
    assert [held.id for held in await t.reserve(3)] == [moved.id, ahead.id, behind.id]


_reprioritised("an_update_may_change_the_priority_of_a_ready_job", 0)
_reprioritised("an_update_may_change_the_priority_of_a_scheduled_job", SECOND)


async def a_lower_priority_moves_a_job_back(t: Twin) -> None:
    """Type by type too, and beside a change of its time."""
    moved, other = await t.add(key="k", priority=3), await t.add(priority=1)
    await t.updates(t.job(key="k", priority=-2, update=UpdateFlags(priority=True, run_at="earlier")), moved)
    assert (await t.lease(types=["mail"])).id == other.id
    await t.settle(ack(await t.lease()))
    await t.logged(moved, priority=-2)


@parametrised
async def _blocked_reprioritised(t: Twin, end: End) -> None:
    """An update of a blocked job changes it and gathers the flag. It then runs, or is merged, with that priority."""
    held, blocked = await _inflight_and_blocked(t, update=UpdateFlags(payload=False))
    other = await t.add(priority=1)
    flags = UpdateFlags(payload=False, priority=True)
    await t.updates(t.job(key="k", priority=2, update=flags), blocked)
    await t.shows(blocked, priority=2, update=flags)
    await t.updates(t.job(key="k", priority=9, update=UpdateFlags(payload=False)), blocked)
    await t.settle(end(held))
    await t.logged(held, priority=0)
    assert [(job.priority, job.payload) for job in await t.reserve(2)] == [
        (2, b"old" if end is release else b"new"),
        (1, other.payload),
    ]


_blocked_reprioritised("a_blocked_job_may_get_another_priority", ack)
_blocked_reprioritised("a_merge_may_change_the_priority", release)


async def a_merge_without_the_flag_keeps_the_priority(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t, priority=7)
    await t.settle(release(held))
    await t.shows(held, priority=0, payload=b"new")


async def an_update_may_change_the_type_it_is_claimed_by(t: Twin) -> None:
    job = await t.add(key="k", type="mail")
    await t.updates(t.job(key="k", type="sms"), job)
    assert await t.reserve(types=["mail"]) == []
    assert (await t.lease(types=["sms"])).id == job.id


# -- all combinations of update flags; the model says what must come out -----------------------------------------

Combinations: TypeAlias = Sequence[UpdateFlags]
Meeting: TypeAlias = Callable[[Twin, Combinations], Awaitable[None]]
"""Jobs of different keys do not touch each other, so one case tries several combinations, each on its own key."""

COMBINATIONS = [
    UpdateFlags(payload, run_at, retry_, reset, priority)
    for run_at, payload, retry_, reset, priority in itertools.product(
        get_args(UpdateRunAt), (True, False), *[(False, True)] * 3
    )
]


def _updates(t: Twin, combinations: Combinations, shift: int) -> list[JobRecord]:
    fields: dict[str, Any] = {
        "type": "sms",
        "payload": b"updated",
        "codec": "msgpack",
        "headers": {"from": "update"},
        "priority": 4,
        "timeout_us": 2,
        "run_at_us": t.now + shift * SECOND,
        "max_attempts": 19,
        "max_stalls": 18,
        "backoff_min_us": 7,
        "backoff_max_us": 77,
    }
    return [t.job(key=f"k{n}", update=flags, **fields) for n, flags in enumerate(combinations)]


async def _failed_and_stalled_once(t: Twin, count: int) -> None:
    """Counters above zero, so that resetting them shows."""
    fields: dict[str, Any] = {"headers": {"from": "original"}, "timeout_us": 1}
    await t.enqueue(*[t.job(key=f"k{n}", max_attempts=9, max_stalls=8, **fields) for n in range(count)])
    held = await t.reserve(count, lease=5)
    await t.settle(*[retry(job, t.now) for job in held])
    await t.reserve(count, lease=5)
    t.advance(5)
    await t.reclaim()


async def _onto_waiting(t: Twin, combinations: Combinations) -> None:
    await _failed_and_stalled_once(t, len(combinations))
    await t.enqueue(*_updates(t, combinations, +60))
    await t.enqueue(*_updates(t, combinations, -60))


async def _onto_blocked(t: Twin, combinations: Combinations) -> None:
    count = len(combinations)
    await _failed_and_stalled_once(t, count)
    held = await t.reserve(count)
    first = UpdateFlags(payload=False, run_at="later")
    await t.enqueue(*[t.job(key=f"k{n}", payload=b"blocked", update=first) for n in range(count)])
    await t.enqueue(*_updates(t, combinations, +60))
    await t.enqueue(*_updates(t, [UpdateFlags(payload=False)] * count, -60))
    await t.settle(*[retry(job, t.now + 30 * SECOND) for job in held])


async def _merged(t: Twin, combinations: Combinations, *, at: str, shift: int) -> None:
    await _failed_and_stalled_once(t, len(combinations))
    held = await t.reserve(len(combinations), lease=10)
    await t.enqueue(*_updates(t, combinations, shift))
    later = t.now + 30 * SECOND
    if at == "stall":
        t.advance(10)
        await t.reclaim()
    else:
        await t.settle(*[retry(job, later) if at == "retry" else release(job, later) for job in held])


@parametrised
async def _meet(t: Twin, meeting: Meeting, combinations: Combinations) -> None:
    await meeting(t, combinations)


MEETINGS: dict[str, Meeting] = {
    "onto_waiting": _onto_waiting,
    "onto_blocked": _onto_blocked,
    "merged_later_at_retry": partial(_merged, at="retry", shift=+60),
    "merged_earlier_at_retry": partial(_merged, at="retry", shift=-60),
    "merged_at_stall": partial(_merged, at="stall", shift=+60),
    "merged_at_release": partial(_merged, at="release", shift=-60),
}

for _name, _meeting in MEETINGS.items():
    for _run_at, _alike in itertools.groupby(COMBINATIONS, lambda flags: flags.run_at):
        _meet(f"{_name}_with_run_at_{_run_at}", _meeting, list(_alike))
