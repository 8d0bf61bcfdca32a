"""Heartbeats and validation: who may act on a job, until when, and in which order errors are found."""

from __future__ import annotations

from collections.abc import Callable

from taskharbor import errors
from taskharbor.drivers.contract import Extension, Settlement
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease
from taskharbor_testkit.conformance.case import Body, add, case
from taskharbor_testkit.conformance.twin import Twin, ack, beat, discard, fail, release, retry, with_token

SETTLEMENTS: dict[str, Callable[[JobRecord], Settlement]] = {
    "ack": ack,
    "retry": lambda job: retry(job, job.run_at_us),
    "fail": fail,
    "release": release,
    "discard": discard,
}


async def _held(t: Twin) -> JobRecord:
    return await t.lease(t.job(), lease=30)


async def _expired(t: Twin) -> JobRecord:
    held = await _held(t)
    t.advance(30)
    return held


async def _stolen(t: Twin) -> JobRecord:
    held = await _held(t)
    await t.settle(release(held))
    await t.lease()
    return held


async def _released(t: Twin) -> JobRecord:
    held = await _held(t)
    await t.settle(release(held))
    return held


async def _unknown(t: Twin) -> JobRecord:
    return t.job(token="nonsense")


async def _expired_and_wrong_token(t: Twin) -> JobRecord:
    return with_token(await _expired(t), "nonsense")


async def _scheduled(t: Twin) -> JobRecord:
    job = t.job(run_at_us=t.now + SECOND)
    await t.enqueue(job)
    return with_token(job, "nonsense")


SITUATIONS = {
    "an_unknown_job": (_unknown, errors.JobNotFound),
    "a_released_job": (_released, errors.JobNotInflight),
    "a_scheduled_job": (_scheduled, errors.JobNotInflight),
    "a_stolen_lease": (_stolen, errors.LeaseMismatch),
    "an_expired_lease": (_expired, errors.LeaseExpired),
    "a_wrong_token_on_an_expired_lease": (_expired_and_wrong_token, errors.LeaseMismatch),
}


def _refusal(situation: str, settlement: str) -> Body:
    prepare, wanted = SITUATIONS[situation]

    async def body(t: Twin) -> None:
        job = await prepare(t)
        async with t.unchanged():
            (error,) = await t.settle(SETTLEMENTS[settlement](job))
        assert type(error) is wanted
        assert error.job_id == job.id

    return body


def _refused_beat(situation: str) -> Body:
    prepare, wanted = SITUATIONS[situation]

    async def body(t: Twin) -> None:
        job = await prepare(t)
        async with t.unchanged():
            (error,) = await t.extend(beat(job, b"progress"))
        assert type(error) is wanted

    return body


for _situation in SITUATIONS:
    for _settlement in SETTLEMENTS:
        add(_refusal(_situation, _settlement), f"{_settlement}_refused_for_{_situation}")
    add(_refused_beat(_situation), f"extend_refused_for_{_situation}")


@case()
async def extending_sets_expires_at(t: Twin) -> None:
    """expires_at = now + lease_for, counted from the heartbeat."""
    held = await _held(t)
    t.advance(20)
    (lease,) = await t.extend(beat(held), lease=30)
    assert isinstance(lease, Lease)
    assert (lease.job_id, lease.expires_at_us, lease.cancel_requested) == (
        held.id,
        t.now + 30 * SECOND,
        False,
    )
    assert (await t.get(held.id)).lease == lease


@case()
async def extending_never_shortens(t: Twin) -> None:
    """A heartbeat that asks for less than what is left changes nothing; its answer says how long the lease holds."""
    held = await _held(t)
    (lease,) = await t.extend(beat(held), lease=1)
    assert isinstance(lease, Lease)
    assert lease.expires_at_us == held.expires_at_us
    assert (await t.get(held.id)).expires_at_us == held.expires_at_us
    t.advance(29)
    assert await t.reserve() == []
    assert await t.settle(ack(with_token(held, lease.token))) == [None]


@case()
async def an_extended_lease_outlives_the_first_expiry(t: Twin) -> None:
    held = await _held(t)
    t.advance(20)
    (lease,) = await t.extend(beat(held), lease=30)
    assert isinstance(lease, Lease)
    t.advance(20)
    assert await t.reserve() == []
    assert await t.reclaim() == 0
    assert await t.settle(ack(with_token(held, lease.token))) == [None]


@case()
async def extending_keeps_who_and_since_when(t: Twin) -> None:
    held = await _held(t)
    t.advance(5)
    await t.extend(beat(held))
    stored = await t.get(held.id)
    assert (stored.worker, stored.reserved_at_us, stored.fence) == (
        held.worker,
        held.reserved_at_us,
        held.fence,
    )


@case()
async def a_lease_is_valid_until_just_before_expires_at(t: Twin) -> None:
    held = await _held(t)
    t.now += 30 * SECOND - 1
    assert await t.settle(ack(held)) == [None]


@case()
async def a_lease_may_be_extended_until_just_before_expires_at(t: Twin) -> None:
    held = await _held(t)
    t.now += 30 * SECOND - 1
    (lease,) = await t.extend(beat(held))
    assert isinstance(lease, Lease)


@case()
async def a_lease_is_over_at_expires_at_exactly(t: Twin) -> None:
    held = await _held(t)
    t.advance(30)
    async with t.unchanged():
        (error,) = await t.settle(ack(held))
    assert type(error) is errors.LeaseExpired


@case()
async def an_expired_lease_is_not_revived_by_a_heartbeat(t: Twin) -> None:
    held = await _held(t)
    t.advance(30)
    (error,) = await t.extend(beat(held))
    assert type(error) is errors.LeaseExpired
    assert len(await t.reserve()) == 1


@case()
async def a_heartbeat_carries_progress_up(t: Twin) -> None:
    held = await _held(t)
    await t.extend(beat(held, b"\x00 50%"))
    assert (await t.get(held.id)).progress == b"\x00 50%"


@case()
async def a_heartbeat_without_progress_keeps_it(t: Twin) -> None:
    held = await _held(t)
    (lease,) = await t.extend(beat(held, b"50%"))
    assert isinstance(lease, Lease)
    await t.extend(Extension(held.id, lease.token))
    assert (await t.get(held.id)).progress == b"50%"


@case()
async def a_heartbeat_with_empty_progress_stores_it(t: Twin) -> None:
    """Only None leaves the stored progress as it is."""
    held = await _held(t)
    (lease,) = await t.extend(beat(held, b"50%"))
    assert isinstance(lease, Lease)
    await t.extend(Extension(held.id, lease.token, b""))
    assert (await t.get(held.id)).progress == b""


@case()
async def a_heartbeat_brings_the_cancel_request_down(t: Twin) -> None:
    held = await _held(t)
    await t.cancel(held.id)
    (lease,) = await t.extend(beat(held))
    assert isinstance(lease, Lease)
    assert lease.cancel_requested


@case()
async def a_mixed_batch_answers_per_item(t: Twin) -> None:
    """An error in one place neither stops nor changes the others."""
    await t.enqueue(*[t.job() for _ in range(4)])
    one, two, gone, three = await t.reserve(4)
    await t.settle(ack(gone))
    unknown = t.job(token="x")
    answers = await t.extend(
        beat(one), beat(gone), beat(with_token(two, "x")), beat(unknown), beat(three), lease=60
    )
    assert [type(answer) for answer in answers] == [
        Lease,
        errors.JobNotInflight,
        errors.LeaseMismatch,
        errors.JobNotFound,
        Lease,
    ]


@case()
async def an_empty_heartbeat_changes_nothing(t: Twin) -> None:
    await _held(t)
    async with t.unchanged():
        assert await t.extend() == []


@case()
async def another_handle_may_settle_a_lease(t: Twin) -> None:
    """The token proves the lease, not the connection."""
    held = await _held(t)
    assert await t.settle(ack(held), by=await t.store.connect()) == [None]
    assert await t.state(held.id) is JobState.DONE


@case()
async def a_token_of_another_job_does_not_fit(t: Twin) -> None:
    """Two reserve calls, two jobs, two tokens."""
    await t.enqueue(t.job(), t.job())
    (one,) = await t.reserve()
    (two,) = await t.reserve()
    assert one.token is not None
    async with t.unchanged():
        (error,) = await t.settle(ack(with_token(two, one.token)))
    assert type(error) is errors.LeaseMismatch


@case()
async def the_first_holder_is_a_stranger_after_a_reclaim(t: Twin) -> None:
    """A stale worker changes nothing, even while the next one works."""
    first = await _expired(t)
    second = await t.lease(worker="w2")
    async with t.unchanged():
        assert [type(error) for error in await t.settle(ack(first))] == [errors.LeaseMismatch]
        assert [type(error) for error in await t.extend(beat(first, b"x"))] == [errors.LeaseMismatch]
    assert await t.settle(ack(second)) == [None]
