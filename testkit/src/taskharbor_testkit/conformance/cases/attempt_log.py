"""The attempt log: one row for every lease that ended and every job that ended without one, in commit order."""

from __future__ import annotations

from taskharbor.jobs import SECOND, JobState, Lease, Outcome
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.snapshot import read_log
from taskharbor_testkit.conformance.twin import BOOM, Twin, ack, beat, fail, release, retry, with_token


@case()
async def an_empty_log_has_a_cursor(t: Twin) -> None:
    """`cursor` resumes after the last row, even when no row came."""
    page = await t.driver.read_attempts()
    assert page.attempts == []
    await t.settle(ack(await t.lease(t.job())))
    rest = await t.driver.read_attempts(after=page.cursor)
    assert len(rest.attempts) == 1
    assert (await t.driver.read_attempts(after=rest.cursor)).attempts == []


@case()
async def a_row_tells_everything(t: Twin) -> None:
    job = t.job(
        type="sms", key="k", priority=4, payload=b"12345", run_at_us=t.now - 7, created_at_us=t.now - 9
    )
    held = await t.lease(job, worker="w5", lease=30)
    t.advance(3)
    await t.settle(retry(held, t.now + SECOND))
    (row,) = await t.rows(job.id)
    assert (row.job_id, row.queue, row.type, row.key) == (job.id, "q", "sms", "k")
    assert (row.priority, row.fence, row.worker, row.payload_size) == (4, 1, "w5", 5)
    assert (row.created_at_us, row.run_at_us) == (job.created_at_us, job.run_at_us)
    assert (row.reserved_at_us, row.lease_expires_at_us) == (held.reserved_at_us, held.expires_at_us)
    assert (row.ended_at_us, row.outcome, row.state) == (t.now, Outcome.RETRIED, JobState.SCHEDULED)
    assert (row.error_type, row.error_message) == (BOOM.type, BOOM.message)


@case()
async def run_at_is_that_of_the_execution(t: Twin) -> None:
    """A snooze or a retry changes when the job is due next, not when it was due."""
    held = await t.lease(t.job())
    due = held.run_at_us
    await t.settle(release(held, t.now + SECOND))
    t.advance(1)
    await t.settle(ack(await t.lease()))
    assert [row.run_at_us for row in await t.rows(held.id)] == [due, due + SECOND]


@case()
async def the_expiry_is_that_of_the_last_heartbeat(t: Twin) -> None:
    held = await t.lease(t.job(), lease=10)
    t.advance(5)
    (lease,) = await t.extend(beat(held), lease=40)
    assert isinstance(lease, Lease)
    await t.settle(ack(with_token(held, lease.token)))
    assert (await t.last_row(held.id)).lease_expires_at_us == t.now + 40 * SECOND


@case()
async def one_jobs_rows_are_in_order(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=9), lease=5)
    await t.settle(retry(held, t.now))
    await t.settle(release(await t.lease()))
    await t.reserve(lease=5)
    t.advance(5)
    held = await t.lease()
    await t.settle(fail(held))
    await t.requeue(held.id)
    await t.settle(ack(await t.lease()))
    rows = await t.rows(held.id)
    assert [row.outcome for row in rows] == [
        Outcome.RETRIED,
        Outcome.RELEASED,
        Outcome.EXPIRED,
        Outcome.DEAD,
        Outcome.REQUEUED,
        Outcome.DONE,
    ]
    assert [row.fence for row in rows] == [1, 2, 3, 4, 4, 5]
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})


@case()
async def an_unknown_job_has_no_rows(t: Twin) -> None:
    assert await t.driver.job_attempts("unknown") == []


@case()
async def a_refused_settle_leaves_no_row(t: Twin) -> None:
    held = await t.lease(t.job(), lease=5)
    t.advance(5)
    await t.settle(ack(held))
    assert await t.rows(held.id) == []


@case()
async def enqueue_reserve_and_heartbeat_leave_no_row(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.extend(beat(held))
    assert (await t.driver.read_attempts()).attempts == []


@case()
async def pages_in_any_size_tell_the_same(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(17)])
    for job in await t.reserve(17):
        await t.settle(ack(job))
    whole = await read_log(t.driver)
    assert len(whole) == 17
    for limit in (1, 4, 16, 17, 18):
        assert await read_log(t.driver, limit=limit) == whole
        assert len((await t.driver.read_attempts(limit=limit)).attempts) <= limit


@case()
async def rows_come_in_the_order_of_the_calls(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(6)])
    held = await t.reserve(6)
    wanted = [held[n].id for n in (4, 0, 5, 2, 1, 3)]
    for job_id in wanted:
        (job,) = (one for one in held if one.id == job_id)
        await t.settle(ack(job))
    assert [row.job_id for row in await read_log(t.driver)] == wanted


@case()
async def a_cursor_survives_retention(t: Twin) -> None:
    """A slow reader misses what retention removed, and nothing else."""
    await t.configure(keep_attempts_us=SECOND)
    await t.settle(ack(await t.lease(t.job())))
    page = await t.driver.read_attempts()
    await t.settle(ack(await t.lease(t.job())))
    t.advance(2)
    await t.prune()
    late = await t.lease(t.job())
    await t.settle(ack(late))
    rest = await t.driver.read_attempts(after=page.cursor)
    assert [row.job_id for row in rest.attempts] == [late.id]


@case()
async def a_cursor_works_on_any_handle(t: Twin) -> None:
    await t.settle(ack(await t.lease(t.job())))
    page = await t.driver.read_attempts()
    late = await t.lease(t.job())
    await t.settle(ack(late))
    rest = await (await t.store.connect()).read_attempts(after=page.cursor)
    assert [row.job_id for row in rest.attempts] == [late.id]


@case()
async def rows_outlive_their_job(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(ack(held))
    await t.purge()
    assert [row.outcome for row in await t.rows(held.id)] == [Outcome.DONE]
