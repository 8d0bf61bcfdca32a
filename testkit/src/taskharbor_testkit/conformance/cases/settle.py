"""Ending leases: what each settlement makes of a job, and that batches are judged item by item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from taskharbor import errors
from taskharbor.drivers.contract import Settlement
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, Lease, Outcome
from taskharbor_testkit.conformance.case import Body, add, case
from taskharbor_testkit.conformance.twin import (
    BOOM,
    Twin,
    ack,
    beat,
    discard,
    fail,
    release,
    retry,
    with_token,
)


@case()
async def ack_ends_the_job_done(t: Twin) -> None:
    held = await t.lease(t.job())
    t.advance(1)
    assert await t.settle(ack(held, b"\x00result")) == [None]
    job = await t.get(held.id)
    assert (job.state, job.result, job.finished_at_us) == (JobState.DONE, b"\x00result", t.now)
    assert (job.token, job.worker, job.expires_at_us, job.reserved_at_us) == (None,) * 4
    assert (job.attempts, job.stalls, job.last_error) == (0, 0, None)


@case()
async def ack_without_result_stores_none(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(ack(held))
    assert (await t.get(held.id)).result is None


@case()
async def ack_with_an_empty_result_stores_it(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(ack(held, b""))
    assert (await t.get(held.id)).result == b""


@case()
async def ack_keeps_the_failures_before_it(t: Twin) -> None:
    held = await t.lease(t.job())
    failed_at = t.now
    await t.settle(retry(held, t.now))
    t.advance(1)
    await t.settle(ack(await t.lease()))
    job = await t.get(held.id)
    assert (job.attempts, job.last_error, job.failed_at_us) == (1, BOOM.text, failed_at)


@case()
async def retry_later_is_scheduled(t: Twin) -> None:
    held = await t.lease(t.job())
    assert await t.settle(retry(held, t.now + 5 * SECOND, attempts=1)) == [None]
    job = await t.get(held.id)
    assert (job.state, job.run_at_us, job.attempts) == (JobState.SCHEDULED, t.now + 5 * SECOND, 1)
    assert (job.last_error, job.failed_at_us, job.finished_at_us) == (BOOM.text, t.now, None)


@case()
async def retry_at_once_is_ready(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(retry(held, t.now))
    assert await t.state(held.id) is JobState.READY


@case()
async def retry_stores_the_number_it_is_given(t: Twin) -> None:
    """The core counts; the driver persists."""
    held = await t.lease(t.job(max_attempts=2))
    await t.settle(retry(held, t.now, attempts=17))
    job = await t.get(held.id)
    assert (job.state, job.attempts) == (JobState.READY, 17)


@case()
async def retry_counts_no_stall(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(retry(held, t.now))
    assert (await t.get(held.id)).stalls == 0


@case()
async def fail_ends_the_job_dead(t: Twin) -> None:
    held = await t.lease(t.job())
    t.advance(1)
    assert await t.settle(fail(held, attempts=3)) == [None]
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.last_error) == (JobState.DEAD, 3, BOOM.text)
    assert (job.failed_at_us, job.finished_at_us) == (t.now, t.now)


@case()
async def an_error_without_detail_is_one_line(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(fail(held, error=Failure("Gone", "")))
    assert (await t.get(held.id)).last_error == "Gone"
    row = await t.last_row(held.id)
    assert (row.error_type, row.error_message) == ("Gone", "")


@case()
async def release_gives_back_unspent(t: Twin) -> None:
    held = await t.lease(t.job())
    t.advance(1)
    await t.settle(release(held))
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.stalls, job.run_at_us) == (JobState.READY, 0, 0, held.run_at_us)
    assert (job.last_error, job.failed_at_us, job.finished_at_us, job.fence) == (None, None, None, 1)


@case()
async def release_until_later_is_scheduled(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(release(held, t.now + SECOND))
    job = await t.get(held.id)
    assert (job.state, job.run_at_us, job.attempts, job.stalls) == (JobState.SCHEDULED, t.now + SECOND, 0, 0)


@case()
async def release_until_an_instant_that_passed_is_ready(t: Twin) -> None:
    held = await t.lease(t.job())
    t.advance(2)
    await t.settle(release(held, t.now - SECOND))
    job = await t.get(held.id)
    assert (job.state, job.run_at_us) == (JobState.READY, t.now - SECOND)


@case()
async def discard_ends_the_job_cancelled(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(discard(held))
    job = await t.get(held.id)
    assert (job.state, job.finished_at_us, job.last_error) == (JobState.CANCELLED, t.now, None)


@case()
async def discard_with_a_reason_says_why(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(discard(held, Failure("Discard", "obsolete")))
    job = await t.get(held.id)
    assert (job.last_error, job.failed_at_us, job.attempts) == ("Discard: obsolete", None, 0)
    assert (await t.last_row(held.id)).error_message == "obsolete"


@case()
async def every_end_of_a_lease_clears_progress_and_cancel_request(t: Twin) -> None:
    for settlement in (ack, fail, discard, release, lambda job: retry(job, t.now)):
        held = await t.lease(t.job(queue="p"), queue="p")
        (lease,) = await t.extend(beat(held, b"50%"))
        assert isinstance(lease, Lease)
        await t.cancel(held.id)
        await t.settle(settlement(with_token(held, lease.token)))
        job = await t.get(held.id)
        assert (job.progress, job.cancel_requested, job.lease) == (None, False, None)


@case()
async def release_clears_progress(t: Twin) -> None:
    held = await t.lease(t.job())
    (lease,) = await t.extend(beat(held, b"50%"))
    assert isinstance(lease, Lease)
    await t.settle(release(with_token(held, lease.token)))
    assert (await t.get(held.id)).progress is None


def _again(first: str, second: str) -> Body:
    """Terminal idempotence, whatever the token."""

    async def body(t: Twin) -> None:
        held = await t.lease(t.job())
        await t.settle(ack(held, b"first") if first == "ack" else _ENDS[first](held))
        t.advance(100)
        async with t.unchanged():
            assert await t.settle(_ENDS[second](held)) == [None]
            assert await t.settle(_ENDS[second](with_token(held, "whatever"))) == [None]

    return body


def _not_again(first: str, second: str) -> Body:
    async def body(t: Twin) -> None:
        held = await t.lease(t.job())
        await t.settle(_ENDS[first](held))
        async with t.unchanged():
            (error,) = await t.settle(_LEASED[second](held))
        assert type(error) is errors.JobNotInflight

    return body


_ENDS: dict[str, Callable[[JobRecord], Settlement]] = {
    "ack": lambda job: ack(job, b"late"),
    "fail": fail,
    "discard": discard,
}
_LEASED: dict[str, Callable[[JobRecord], Settlement]] = {
    **_ENDS,
    "retry": lambda job: retry(job, job.run_at_us),
    "release": release,
}
_SUCCEED_AGAIN = {("ack", "ack"), ("ack", "fail"), ("fail", "fail"), ("discard", "discard")}
for _first in _ENDS:
    for _second in _LEASED:
        if (_first, _second) in _SUCCEED_AGAIN:
            add(_again(_first, _second), f"{_second}_after_{_first}_succeeds_again")
        else:
            add(_not_again(_first, _second), f"{_second}_after_{_first}_is_not_inflight")


@case()
async def discard_succeeds_on_a_job_cancelled_while_waiting(t: Twin) -> None:
    job = t.job()
    await t.enqueue(job)
    await t.cancel(job.id)
    async with t.unchanged():
        assert await t.settle(discard(with_token(job, "none"))) == [None]


@case()
async def extending_an_ended_job_is_not_inflight(t: Twin) -> None:
    """Terminal idempotence is for settlements; a heartbeat for an ended job must stop its sender."""
    held = await t.lease(t.job())
    await t.settle(ack(held))
    async with t.unchanged():
        assert [type(one) for one in await t.extend(beat(held))] == [errors.JobNotInflight]


@case()
async def a_batch_is_judged_item_by_item(t: Twin) -> None:
    """An error in one place neither stops nor changes the others."""
    await t.enqueue(*[t.job() for _ in range(6)])
    jobs = await t.reserve(6)
    answers = await t.settle(
        ack(jobs[0]),
        ack(with_token(jobs[1], "wrong")),
        retry(jobs[2], t.now + SECOND),
        ack(t.job(token="unknown")),
        fail(jobs[3]),
        release(jobs[4]),
        discard(jobs[5]),
    )
    kinds = [None if answer is None else type(answer) for answer in answers]
    assert kinds == [None, errors.LeaseMismatch, None, errors.JobNotFound, None, None, None]
    assert [await t.state(job.id) for job in jobs] == [
        JobState.DONE,
        JobState.INFLIGHT,
        JobState.SCHEDULED,
        JobState.DEAD,
        JobState.READY,
        JobState.CANCELLED,
    ]


def _twice_in_a_batch(first: str, second: str) -> Body:
    async def body(t: Twin) -> None:
        held = await t.lease(t.job())
        one: Settlement = _LEASED[first](held)
        two: Settlement = _LEASED[second](held)
        answers = await t.settle(one, two)
        assert answers[0] is None
        assert len(await t.rows(held.id)) == 1
        if (first, second) in _SUCCEED_AGAIN:
            assert answers[1] is None
        else:
            assert type(answers[1]) is errors.JobNotInflight

    return body


for _first, _second in [
    ("ack", "ack"),
    ("retry", "retry"),
    ("release", "ack"),
    ("fail", "retry"),
    ("ack", "fail"),
]:
    add(_twice_in_a_batch(_first, _second), f"{_first}_then_{_second}_in_one_batch_counts_once")


@case()
async def a_batch_spans_queues(t: Twin) -> None:
    held = [await t.lease(t.job(queue=queue), queue=queue) for queue in "abc"]
    assert await t.settle(*[ack(job) for job in held]) == [None] * 3
    assert [(await t.stats(queue)).done_total for queue in "abc"] == [1, 1, 1]


@case()
async def a_large_batch_is_settled_whole(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(300)])
    held = await t.reserve(300)
    assert await t.settle(*[ack(job) for job in held]) == [None] * 300
    assert (await t.stats()).done_total == 300


@case()
async def an_empty_batch_changes_nothing(t: Twin) -> None:
    async with t.unchanged():
        assert await t.settle() == []


@case()
async def a_repeated_settle_changes_nothing_more(t: Twin) -> None:
    """What a worker does after an unclear answer: ends succeed again, the rest says JobNotInflight."""
    await t.enqueue(*[t.job() for _ in range(5)])
    a, b, c, d, e = await t.reserve(5)
    batch: list[Settlement] = [ack(a), fail(b), discard(c), retry(d, t.now), release(e)]
    assert await t.settle(*batch) == [None] * 5
    async with t.unchanged():
        answers = await t.settle(*batch)
    assert answers[:3] == [None] * 3
    assert [type(answer) for answer in answers[3:]] == [errors.JobNotInflight] * 2


@case()
async def a_batch_with_bad_input_ends_nothing(t: Twin) -> None:
    """One transaction: where the call as a whole is refused, the good settlements before it did not happen."""
    held = await t.lease(t.job())
    bad: Any = None
    async with t.unchanged():
        try:
            await t.driver.settle([ack(held), bad], now=t.now)
        except Exception:
            return
        raise AssertionError("None in a batch of settlements was accepted")


@case()
async def one_job_at_a_time_raises_the_error(t: Twin) -> None:
    """ack, retry, fail, release and discard are batches of one."""
    held = await t.lease(t.job())
    async with t.unchanged():
        (raised,) = await asyncio.gather(t.driver.ack(held.id, "wrong", now=t.now), return_exceptions=True)
    assert type(raised) is errors.LeaseMismatch
    assert raised.job_id == held.id


@case()
async def the_log_tells_each_outcome(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(5)])
    a, b, c, d, e = await t.reserve(5)
    await t.settle(ack(a), fail(b), discard(c), retry(d, t.now + 1), release(e))
    told = [((await t.last_row(job.id)).outcome, (await t.last_row(job.id)).state) for job in (a, b, c, d, e)]
    assert told == [
        (Outcome.DONE, JobState.DONE),
        (Outcome.DEAD, JobState.DEAD),
        (Outcome.CANCELLED, JobState.CANCELLED),
        (Outcome.RETRIED, JobState.SCHEDULED),
        (Outcome.RELEASED, JobState.READY),
    ]
