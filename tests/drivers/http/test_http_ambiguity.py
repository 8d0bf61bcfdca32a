"""One lost answer, one call: nothing is doubled, nothing is left lying, and the caller hears what became of its call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import pytest

from drivers.http.http_line import LEASE, NOW, Line, records
from taskharbor import JobState, Outcome
from taskharbor.drivers.contract import Ack, Enqueued, Extension, QueueSettings, Release, RetryAt, Settlement
from taskharbor.errors import BackendUnavailable, JobNotFound, JobNotInflight
from taskharbor.jobs import Failure, JobRecord, Lease
from taskharbor_testkit.waits import waits_of
from worker.stage import eventually

BOOM = Failure("Boom", "it went wrong")
Loss: TypeAlias = Literal["drop", "lose_answer"]


def ack(job: JobRecord) -> Ack:
    return Ack(job.id, job.token or "")


def retry(job: JobRecord) -> RetryAt:
    return RetryAt(job.id, job.token or "", NOW, 1, BOOM)


def leased(jobs: list[JobRecord]) -> list[tuple[str, int]]:
    return [(job.id, job.fence) for job in jobs]


# -- one loss, which the driver gets over by itself -----------------------------------------------------------


@pytest.mark.parametrize("new_ids", [True, False])
@pytest.mark.parametrize("loss", ["drop", "lose_answer"])
async def test_a_call_takes_effect_once_and_is_said_to_have(here: Line, loss: Loss, new_ids: bool) -> None:
    """Also where a second settle would be refused: a retried job is not inflight any more."""
    jobs = records(5)
    here.proxy.on_request(b"enqueue", loss)
    answer = await here.near.enqueue(jobs, now=NOW, new_ids=new_ids)
    assert here.proxy.triggered.is_set()
    assert answer == [Enqueued(job.id) for job in jobs]
    here.proxy.on_request(b"reserve", loss)
    held = await here.claim(3)
    assert here.proxy.triggered.is_set()
    assert leased(held) == [(job.id, 1) for job in jobs[:3]]
    assert await here.counts() == {JobState.INFLIGHT: 3, JobState.READY: 2}
    here.proxy.on_request(b"settle", loss)
    done, again, back = held
    ends: list[Settlement] = [
        ack(done),
        retry(again),
        Release(back.id, back.token or ""),
        Ack("unknown", "t"),
    ]
    *settled, refused = await here.near.settle(ends, now=NOW)
    assert here.proxy.triggered.is_set()
    assert settled == [None] * 3
    assert isinstance(refused, JobNotFound)
    assert await here.counts() == {JobState.DONE: 1, JobState.READY: 4}
    outcomes = [[row.outcome for row in await here.log(job.id)] for job in held]
    assert outcomes == [[Outcome.DONE], [Outcome.RETRIED], [Outcome.RELEASED]]


async def test_other_calls_survive_a_lost_answer(here: Line) -> None:
    (job_id,) = await here.store()
    (job,) = await here.claim()
    here.proxy.on_request(b"extend_lease", "lose_answer")
    beat = Extension(job.id, job.token or "")
    (lease,) = await here.near.extend_lease([beat], lease_for=LEASE, now=NOW + 5)
    assert isinstance(lease, Lease)
    assert lease.expires_at_us == NOW + 5 + LEASE
    here.proxy.on_request(b"cancel", "lose_answer")
    assert await here.near.cancel([job_id], now=NOW) == [JobState.INFLIGHT]
    here.proxy.on_request(b"configure", "lose_answer")
    await here.near.configure("q", QueueSettings(paused=True), now=NOW)
    assert (await here.near.settings("q")).paused
    here.proxy.on_request(b"get", "lose_answer")
    assert [one.id for one in await here.near.get([job_id], now=NOW) if one] == [job_id]
    here.proxy.on_request(b"time", "drop")
    assert await here.near.time() > 0


# -- an outage, which the caller is told of ------------------------------------------------------------------


@contextlib.contextmanager
def lost(here: Line, operation: bytes) -> Iterator[None]:
    """The broker carries the call out; then there is no way to the broker."""
    here.proxy.refuse()
    here.proxy.on_request(operation, "lose_answer")
    with pytest.raises(BackendUnavailable, match="no broker answers"):
        yield
    here.proxy.accept()


async def test_the_next_reserve_of_the_worker_gets_the_jobs_of_the_lost_one(here: Line) -> None:
    ids = await here.store(5)
    with lost(here, b"reserve"):
        await here.claim(2)
    assert await here.counts() == {JobState.INFLIGHT: 2, JobState.READY: 3}
    assert leased(await here.claim(1, worker="other")) == [(ids[2], 1)]
    assert leased(await here.claim(2, now=NOW + 1)) == [(job_id, 1) for job_id in ids[:2]]
    assert [job.id for job in await here.claim(3, now=NOW + 1)] == ids[3:]


@pytest.mark.parametrize("wanted", [{"limit": 1}, {"limit": 4, "types": ["other"]}], ids=["room", "types"])
async def test_what_the_worker_does_not_want_any_more_goes_back_unspent(
    here: Line, wanted: dict[str, Any]
) -> None:
    ids = await here.store(5)
    with lost(here, b"reserve"):
        await here.claim(4)
    kept = [] if "types" in wanted else ids[:1]
    assert [job.id for job in await here.claim(**wanted)] == kept
    assert [row.outcome for row in await here.log(ids[1])] == [Outcome.RELEASED]
    assert [job.id for job in await here.claim(9)] == ids[len(kept) :]


async def test_leases_that_are_over_meanwhile_are_not_given_out(here: Line) -> None:
    (job_id,) = await here.store()
    with lost(here, b"reserve"):
        await here.claim()
    (job,) = await here.claim(now=NOW + LEASE)
    assert (job.id, job.fence, job.stalls) == (job_id, 2, 1)


async def test_a_cancelled_reserve_gives_back_what_it_leased(here: Line) -> None:
    """The caller went away; whatever was leased for it must not wait for the end of the lease."""
    (job_id,) = await here.store()
    here.proxy.stall()
    claiming = asyncio.ensure_future(here.claim())
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    here.proxy.flow()

    async def is_free() -> bool:
        return await here.counts() == {JobState.READY: 1}

    await eventually(lambda: not here.near._giving_back)
    await eventually(is_free)
    assert [job.id for job in await here.claim()] == [job_id]


async def test_a_call_that_the_caller_repeats_is_told_the_truth_and_does_nothing_new(here: Line) -> None:
    jobs = records(2)
    with lost(here, b"enqueue"):
        await here.near.enqueue(jobs, now=NOW)
    assert await here.near.enqueue(jobs, now=NOW) == [Enqueued(job.id, True) for job in jobs]
    assert await here.counts() == {JobState.READY: 2}
    done, again = await here.claim(2)
    batch: list[Settlement] = [ack(done), retry(again)]
    with lost(here, b"settle"):
        await here.near.settle(batch, now=NOW)
    first, second = await here.near.settle(batch, now=NOW)
    assert first is None
    assert isinstance(second, JobNotInflight)
    assert len(await here.log(again.id)) == 1


async def test_a_wake_up_whose_answer_was_lost_comes_again(here: Line) -> None:
    while await waits_of(here.near)(["q"], now=NOW, timeout=0):
        pass
    with lost(here, b"wait"):
        waiting = asyncio.ensure_future(waits_of(here.near)(["q"], now=NOW, timeout=20))
        await here.store()
        await waiting
    assert await waits_of(here.near)(["q"], now=NOW, timeout=20)
