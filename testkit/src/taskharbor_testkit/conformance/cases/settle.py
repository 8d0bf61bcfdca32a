"""Ending leases: the effect of each settlement, batches that are judged item by item, and the failure queue."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from taskharbor import errors
from taskharbor.drivers.contract import EXPIRED_ERROR, FAILURE_TYPE, FailurePayload, JobFilter, Settlement
from taskharbor.jobs import SECOND, Failure
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.conformance.twin import (
    BOOM,
    SETTLEMENTS,
    START,
    End,
    Twin,
    ack,
    discard,
    fail,
    release,
    retry,
    with_token,
)

NO_LEASE = dict.fromkeys(("token", "worker", "expires_at_us", "reserved_at_us"))
NOW, LATER = START + SECOND, START + 6 * SECOND
FAILED = {"last_error": BOOM.text, "failed_at_us": NOW}
SCHEDULED = {"state": "scheduled", "run_at_us": LATER}


@parametrised
async def _effect(t: Twin, /, end: End, **wanted: Any) -> None:
    """A job is leased at START and settled at NOW, and its record then has these values."""
    held = await t.lease(t.job())
    t.advance(1)
    assert await t.settle(end(held)) == [None]
    await t.shows(held, **wanted, **NO_LEASE)


_effect("ack_ends_the_job_done", ack, state="done", finished_at_us=NOW, attempts=0, stalls=0, last_error=None)
_effect("ack_stores_the_result", lambda job: ack(job, b"\x00result"), result=b"\x00result")
_effect("ack_without_result_stores_none", ack, result=None)
_effect("ack_with_an_empty_result_stores_it", lambda job: ack(job, b""), result=b"")
_effect("retry_later_is_scheduled", lambda job: retry(job, LATER), **SCHEDULED)
_effect("retry_records_the_failure", lambda job: retry(job, LATER), finished_at_us=None, **FAILED)
_effect("retry_at_once_is_ready", lambda job: retry(job, NOW), state="ready", stalls=0)
_effect("retry_stores_the_number_it_is_given", lambda job: retry(job, NOW, attempts=17), attempts=17)
_effect("fail_ends_the_job_dead", lambda job: fail(job, attempts=3), state="dead", attempts=3)
_effect("fail_records_the_failure", fail, finished_at_us=NOW, **FAILED)
_effect("release_gives_back_unspent", release, state="ready", attempts=0, stalls=0, run_at_us=START, fence=1)
_effect("release_records_no_failure", release, last_error=None, failed_at_us=None, finished_at_us=None)
_effect("release_until_later_is_scheduled", lambda job: release(job, LATER), **SCHEDULED)
_effect("release_until_now_is_ready", lambda job: release(job, NOW), state="ready", run_at_us=NOW)
_effect("discard_ends_the_job_cancelled", discard, state="cancelled", finished_at_us=NOW, last_error=None)
_effect("discard_says_why", lambda job: discard(job, BOOM), last_error=BOOM.text, failed_at_us=None)
_effect("an_error_may_be_a_word", lambda job: fail(job, error=Failure("Gone", "")), last_error="Gone")
LONG = Failure("E" * 300, "m" * 60_000, "t" * 60_000)
_effect("a_long_error_is_kept", lambda job: retry(job, LATER, error=LONG), last_error=LONG.text)


async def ack_keeps_the_failures_before_it(t: Twin) -> None:
    held = await t.lease(t.job())
    t.advance(1)
    await t.settle(retry(held, t.now))
    t.advance(1)
    await t.settle(ack(await t.lease()))
    await t.shows(held, attempts=1, **FAILED)


async def every_end_of_a_lease_clears_progress_and_cancel_request(t: Twin) -> None:
    for settlement in [release, *SETTLEMENTS.values()]:
        held = await t.keep(await t.lease(t.job(priority=1)), b"50%")
        if settlement is not release:
            await t.cancel(held.id)
        await t.settle(settlement(held))
        await t.shows(held, progress=None, cancel_requested=False, lease=None)


_SUCCEED_AGAIN = {("ack", "ack"), ("ack", "fail"), ("fail", "fail"), ("discard", "discard")}


@parametrised
async def _after(t: Twin, first: str, second: str) -> None:
    """Terminal idempotence, whatever the token; any other settlement of an ended job is refused."""
    held = await t.lease(t.job())
    await t.settle(ack(held, b"first") if first == "ack" else SETTLEMENTS[first](held))
    t.advance(100)
    if (first, second) not in _SUCCEED_AGAIN:
        await t.refuses(errors.JobNotInflight, SETTLEMENTS[second](held))
        return
    async with t.unchanged():
        assert await t.settle(SETTLEMENTS[second](held)) == [None]
        assert await t.settle(SETTLEMENTS[second](with_token(held, "whatever"))) == [None]


@parametrised
async def _twice_in_a_batch(t: Twin, first: str, second: str) -> None:
    held = await t.lease(t.job())
    answers = await t.settle(SETTLEMENTS[first](held), SETTLEMENTS[second](held))
    assert answers[0] is None
    assert len(await t.rows(held.id)) == 1
    wanted = type(None) if (first, second) in _SUCCEED_AGAIN else errors.JobNotInflight
    assert type(answers[1]) is wanted


for _first in ("ack", "fail", "discard"):
    for _second in SETTLEMENTS:
        _end = "succeeds_again" if (_first, _second) in _SUCCEED_AGAIN else "is_not_inflight"
        _after(f"{_second}_after_{_first}_{_end}", _first, _second)
for _pair in ("ack ack", "retry retry", "release ack", "fail retry", "ack fail"):
    _twice_in_a_batch(f"{_pair.replace(' ', '_then_')}_in_one_batch_counts_once", *_pair.split())


async def discard_succeeds_on_a_job_cancelled_while_waiting(t: Twin) -> None:
    job = await t.add()
    await t.cancel(job.id)
    async with t.unchanged():
        assert await t.settle(discard(with_token(job, "none"))) == [None]


async def a_batch_is_judged_item_by_item(t: Twin) -> None:
    """An error in one place neither stops nor changes the others."""
    a, b, c, d, e, f = jobs = await t.hold(6)
    wrong, unknown = ack(with_token(b, "wrong")), ack(t.job(token="unknown"))
    later = t.now + SECOND
    answers = await t.settle(ack(a), wrong, retry(c, later), unknown, fail(d), release(e), discard(f))
    assert [type(answers[1]), type(answers[3])] == [errors.LeaseMismatch, errors.JobNotFound]
    assert answers.count(None) == 5
    assert await t.states(*jobs) == "done inflight scheduled dead ready cancelled"
    rows = (await t.driver.read_attempts()).attempts
    assert {row.outcome for row in rows} == {"done", "retried", "dead", "released", "cancelled"}


async def a_large_batch_is_settled_whole(t: Twin) -> None:
    assert await t.settle(*map(ack, await t.hold(300))) == [None] * 300
    assert (await t.stats()).done_total == 300


async def a_repeated_settle_changes_nothing_more(t: Twin) -> None:
    """A worker repeats it after an unclear answer: ends succeed again, the rest is JobNotInflight."""
    a, b, c, d, e = await t.hold(5)
    batch: list[Settlement] = [ack(a), fail(b), discard(c), retry(d, t.now), release(e)]
    assert await t.settle(*batch) == [None] * 5
    async with t.unchanged():
        answers = await t.settle(*batch)
    assert answers[:3] == [None] * 3
    assert [type(answer) for answer in answers[3:]] == [errors.JobNotInflight] * 2


async def one_job_at_a_time_raises_the_error(t: Twin) -> None:
    """ack, retry, fail, release and discard are batches of one."""
    held = await t.lease(t.job())
    async with t.unchanged():
        (raised,) = await asyncio.gather(t.driver.ack(held.id, "wrong", now=t.now), return_exceptions=True)
    assert type(raised) is errors.LeaseMismatch
    assert raised.job_id == held.id


# -- the failure queue: the step that makes a job dead also enqueues a job that tells of it -----------------------


async def _failures(t: Twin, queue: str = "failed") -> list[FailurePayload]:
    jobs = await list_all(t.driver, JobFilter(queue=queue), t.now)
    return [msgspec.json.decode(job.payload, type=FailurePayload) for job in jobs]


async def a_failed_job_is_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(payload=b"\x00\xff", headers={"trace": "1"}, type="sms", codec="raw"))
    t.advance(1)
    await t.settle(fail(held, attempts=2))
    (payload,) = await _failures(t)
    same = {name: getattr(held, name) for name in ("queue", "type", "codec", "payload")}
    assert payload == FailurePayload(job_id=held.id, error=BOOM.text, attempts=2, stalls=0, **same)
    told = await t.lease(queue="failed")
    assert (told.type, told.headers, told.key) == (FAILURE_TYPE, {"trace": "1"}, None)
    assert (told.run_at_us, told.created_at_us) == (t.now, t.now)


async def the_key_of_a_dead_job_is_told(t: Twin) -> None:
    """None, plain, and in any script. The failure job itself has no key."""
    await t.configure(failure_queue="failed")
    for key in (None, "k", 'größe "7" \\ 日本 🚢'):
        await t.settle(fail(await t.lease(t.job(key=key))))
        (told,) = await t.reserve(queue="failed")
        assert msgspec.json.decode(told.payload, type=FailurePayload).key == key
        assert told.key is None
        await t.settle(ack(told))


@parametrised
async def _stall_told_by(t: Twin, call: str) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(max_attempts=1, key="k"), lease=5)
    t.advance(5)
    await getattr(t, call)()
    (told,) = await _failures(t)
    assert (told.job_id, told.stalls, told.error) == (held.id, 1, EXPIRED_ERROR.text)
    assert told.key == "k"


for _call in ("reclaim", "reserve"):
    _stall_told_by(f"a_job_that_died_by_stall_is_told_of_by_{_call}", _call)


async def told_once_for_each_death(t: Twin) -> None:
    """A repeated fail tells nothing; a requeued job that dies again is told of again."""
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job())
    await t.settle(fail(held), fail(held))
    await t.settle(fail(held))
    assert len(await _failures(t)) == 1
    await t.requeue(held.id)
    await t.settle(fail(await t.lease()))
    assert len(await _failures(t)) == 2


async def only_deaths_are_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    a, b, c, d = await t.hold(4)
    await t.cancel(c.id)
    await t.settle(ack(a), discard(b, BOOM), retry(c, t.now), retry(d, t.now))
    assert await _failures(t) == []


async def a_batch_of_deaths_is_told_one_by_one(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.hold(5)
    await t.settle(*map(fail, held))
    assert sorted(told.job_id for told in await _failures(t)) == sorted(job.id for job in held)


async def the_failure_queue_may_be_paused_and_have_its_own(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.configure("failed", failure_queue="last")
    await t.configure("last", paused=True)
    await t.settle(fail(await t.lease(t.job())))
    await t.settle(fail(await t.lease(queue="failed")))
    (last,) = await _failures(t, "last")
    assert (last.queue, last.type) == ("failed", FAILURE_TYPE)
    assert await t.reserve(queue="last") == []


async def the_death_of_a_keyed_job_is_told_and_unblocks(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(key="k"))
    blocked = await t.add(key="k")
    await t.settle(fail(held))
    assert len(await _failures(t)) == 1
    await t.shows(blocked, state="ready")
