"""Heartbeats and validation: who may act on a job, until when, and in which order errors are found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from taskharbor import errors
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, JobRecord, Lease
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import SETTLEMENTS, Twin, ack, beat, release, with_token


async def _expired(t: Twin) -> JobRecord:
    held = await t.lease(t.job())
    t.advance(30)
    return held


async def _stolen(t: Twin) -> JobRecord:
    held = await _released(t)
    await t.lease()
    return held


async def _released(t: Twin) -> JobRecord:
    held = await t.lease(t.job())
    await t.settle(release(held))
    return held


async def _unknown(t: Twin) -> JobRecord:
    return t.job(token="nonsense")


async def _expired_and_wrong_token(t: Twin) -> JobRecord:
    return with_token(await _expired(t), "nonsense")


async def _scheduled(t: Twin) -> JobRecord:
    return with_token(await t.add(run_at_us=t.now + SECOND), "nonsense")


SITUATIONS: dict[str, tuple[Callable[[Twin], Awaitable[JobRecord]], type[JobError]]] = {
    "an_unknown_job": (_unknown, errors.JobNotFound),
    "a_released_job": (_released, errors.JobNotInflight),
    "a_scheduled_job": (_scheduled, errors.JobNotInflight),
    "a_stolen_lease": (_stolen, errors.LeaseMismatch),
    "an_expired_lease": (_expired, errors.LeaseExpired),
    "a_wrong_token_on_an_expired_lease": (_expired_and_wrong_token, errors.LeaseMismatch),
}


@parametrised
async def _refused(t: Twin, situation: str, call: str) -> None:
    prepare, wanted = SITUATIONS[situation]
    job = await prepare(t)
    if call == "extend":
        await t.refuses_beat(wanted, job)
    else:
        await t.refuses(wanted, SETTLEMENTS[call](job))


for _situation in SITUATIONS:
    for _call in (*SETTLEMENTS, "extend"):
        _refused(f"{_call}_refused_for_{_situation}", _situation, _call)


async def extending_sets_expires_at(t: Twin) -> None:
    """expires_at = now + lease_for, counted from the heartbeat. Worker, reserved_at and fence stay."""
    held = await t.lease(t.job())
    t.advance(20)
    kept = await t.keep(held, lease=30)
    await t.shows(held, lease=Lease(held.id, str(kept.token), t.now + 30 * SECOND, False))
    await t.shows(held, worker=held.worker, reserved_at_us=held.reserved_at_us, fence=held.fence)
    t.advance(20)
    assert (await t.reserve(), await t.reclaim()) == ([], 0)
    kept = await t.keep(kept, lease=86_400)
    assert await t.settle(ack(kept)) == [None]


async def a_lease_is_valid_until_just_before_expires_at(t: Twin) -> None:
    one, two = await t.hold(2)
    t.now += 30 * SECOND - 1
    await t.keep(one)
    assert await t.settle(ack(two)) == [None]


async def a_heartbeat_without_progress_keeps_it(t: Twin) -> None:
    """Only None leaves the stored progress as it is; an empty one is stored."""
    held = await t.keep(await t.lease(t.job()), b"\x00 50%")
    held = await t.keep(held)
    await t.shows(held, progress=b"\x00 50%")
    await t.shows(await t.keep(held, b""), progress=b"")


async def a_mixed_batch_answers_per_item(t: Twin) -> None:
    """An error in one place neither stops nor changes the others, and a cancel request is told to its own holder."""
    one, two, gone, three = await t.hold(4)
    await t.settle(ack(gone))
    await t.cancel(three.id)
    jobs = (one, gone, with_token(two, "x"), t.job(token="x"), three)
    answers = await t.extend(*map(beat, jobs), lease=60)
    wanted = [Lease, errors.JobNotInflight, errors.LeaseMismatch, errors.JobNotFound, Lease]
    assert [type(answer) for answer in answers] == wanted
    requested = [answer.cancel_requested for answer in answers if isinstance(answer, Lease)]
    assert requested == [False, True]


async def a_token_of_another_job_does_not_fit(t: Twin) -> None:
    """Two reserve calls, two jobs, two tokens."""
    await t.add_many(2)
    one, two = await t.lease(), await t.lease()
    await t.refuses(errors.LeaseMismatch, ack(with_token(two, str(one.token))))


async def a_token_that_is_cut_or_continued_does_not_fit(t: Twin) -> None:
    held = await t.lease(t.job())
    token = str(held.token)
    for wrong in {token + "x", token[:-1], token[:24], token[:24] + "other"} - {token}:
        await t.refuses(errors.LeaseMismatch, ack(with_token(held, wrong)))
        await t.refuses_beat(errors.LeaseMismatch, with_token(held, wrong))


async def the_first_holder_is_a_stranger_after_a_reclaim(t: Twin) -> None:
    """A stale worker changes nothing, even while the next one works."""
    first = await _expired(t)
    second = await t.lease(worker="w2")
    await t.refuses(errors.LeaseMismatch, ack(first))
    await t.refuses_beat(errors.LeaseMismatch, first)
    assert await t.settle(ack(second)) == [None]
