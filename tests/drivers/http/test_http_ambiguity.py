"""One lost answer, one call: nothing is doubled, nothing is left lying, and the caller hears what became of its call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from drivers.http.http_line import LEASE, NOW, Line, line, records
from taskharbor import JobState, Outcome
from taskharbor.drivers.contract import Ack, Enqueued, Extension, QueueSettings, Release, Retry
from taskharbor.errors import BackendUnavailable, JobNotInflight
from taskharbor.jobs import Failure
from taskharbor_testkit.waits import waits_of
from worker.stage import eventually

BOOM = Failure("Boom", "it went wrong")


def on_a_line(story: Callable[[Line], Awaitable[None]], **config: object) -> None:
    async def main() -> None:
        async with line(**config) as here:
            await story(here)

    asyncio.run(main())


# -- one loss, which the driver gets over by itself -----------------------------------------------------------


@pytest.mark.parametrize("new_ids", [True, False])
@pytest.mark.parametrize("loss", ["drop", "lose_answer"])
def test_an_enqueue_is_not_doubled(loss: str, new_ids: bool) -> None:
    async def story(here: Line) -> None:
        jobs = records(3)
        here.proxy.on_request(b"enqueue", loss)
        answer = await here.near.enqueue(jobs, now=NOW, new_ids=new_ids)
        assert here.proxy.triggered.is_set()
        assert answer == [Enqueued(job.id) for job in jobs]
        assert await here.counts() == {JobState.READY: 3}

    on_a_line(story)


@pytest.mark.parametrize("loss", ["drop", "lose_answer"])
def test_a_reserve_gives_the_same_jobs_again(loss: str) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        here.proxy.on_request(b"reserve", loss)
        held = await here.claim(3)
        assert here.proxy.triggered.is_set()
        assert [(job.id, job.fence) for job in held] == [(job_id, 1) for job_id in ids[:3]]
        assert await here.counts() == {JobState.INFLIGHT: 3, JobState.READY: 2}
        assert await here.near.settle([Ack(job.id, job.token or "") for job in held], now=NOW) == [None] * 3

    on_a_line(story)


@pytest.mark.parametrize("loss", ["drop", "lose_answer"])
def test_a_settle_is_written_once_and_said_to_be_written(loss: str) -> None:
    """Also where a second one would be refused: a retried job is not inflight any more."""

    async def story(here: Line) -> None:
        await here.store(3)
        done, again, back = await here.claim(3)
        here.proxy.on_request(b"settle", loss)
        answers = await here.near.settle(
            [
                Ack(done.id, done.token or ""),
                Retry(again.id, again.token or "", NOW, 1, BOOM),
                Release(back.id, back.token or ""),
                Ack("unknown", "token"),
            ],
            now=NOW,
        )
        assert here.proxy.triggered.is_set()
        assert answers[:3] == [None] * 3
        assert type(answers[3]).__name__ == "JobNotFound"
        assert await here.counts() == {JobState.DONE: 1, JobState.READY: 2}
        outcomes = [[row.outcome for row in await here.log(job.id)] for job in (done, again, back)]
        assert outcomes == [[Outcome.DONE], [Outcome.RETRIED], [Outcome.RELEASED]]

    on_a_line(story)


def test_a_heartbeat_a_cancel_and_settings_survive_a_lost_answer() -> None:
    async def story(here: Line) -> None:
        (job_id,) = await here.store()
        (job,) = await here.claim()
        here.proxy.on_request(b"extend_lease", "lose_answer")
        (lease,) = await here.near.extend_lease(
            [Extension(job.id, job.token or "")], lease_for=LEASE, now=NOW + 5
        )
        assert lease.expires_at_us == NOW + 5 + LEASE
        here.proxy.on_request(b"cancel", "lose_answer")
        assert await here.near.cancel([job_id], now=NOW) == [JobState.INFLIGHT]
        here.proxy.on_request(b"configure", "lose_answer")
        await here.near.configure("q", QueueSettings(paused=True), now=NOW)
        assert (await here.near.settings("q")).paused

    on_a_line(story)


def test_what_is_only_read_is_read_again() -> None:
    async def story(here: Line) -> None:
        ids = await here.store(2)
        here.proxy.on_request(b"get", "lose_answer")
        assert [job.id for job in await here.near.get(ids, now=NOW) if job] == ids
        here.proxy.on_request(b"time", "drop")
        assert await here.near.time() > 0

    on_a_line(story)


# -- an outage, which the caller is told of ------------------------------------------------------------------


async def lose_a_reserve(here: Line, limit: int) -> None:
    """The broker carries it out; then there is no way to the broker."""
    here.proxy.refuse()
    here.proxy.on_request(b"reserve", "lose_answer")
    with pytest.raises(BackendUnavailable, match="no broker answers"):
        await here.claim(limit)
    here.proxy.accept()


def test_the_next_reserve_of_the_worker_gets_the_jobs_of_the_lost_one() -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await lose_a_reserve(here, 3)
        assert await here.counts() == {JobState.INFLIGHT: 3, JobState.READY: 2}
        held = await here.claim(3, now=NOW + 1)
        assert [(job.id, job.fence) for job in held] == [(job_id, 1) for job_id in ids[:3]]
        assert [job.id for job in await here.claim(3, now=NOW + 1)] == ids[3:]

    on_a_line(story)


def test_what_the_worker_has_no_room_for_any_more_goes_back_unspent() -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await lose_a_reserve(here, 4)
        assert [job.id for job in await here.claim(1)] == ids[:1]
        assert await here.counts() == {JobState.INFLIGHT: 1, JobState.READY: 4}
        (row,) = await here.log(ids[1])
        assert row.outcome is Outcome.RELEASED
        assert [job.id for job in await here.claim(9)] == ids[1:]

    on_a_line(story)


def test_jobs_of_types_that_are_not_wanted_any_more_go_back_unspent() -> None:
    async def story(here: Line) -> None:
        await here.store(2)
        await lose_a_reserve(here, 2)
        assert await here.claim(2, types=["other"]) == []
        assert await here.counts() == {JobState.READY: 2}

    on_a_line(story)


def test_leases_that_are_over_meanwhile_are_not_given_out() -> None:
    async def story(here: Line) -> None:
        (job_id,) = await here.store()
        await lose_a_reserve(here, 1)
        (job,) = await here.claim(now=NOW + LEASE)
        assert (job.id, job.fence, job.stalls) == (job_id, 2, 1)

    on_a_line(story)


def test_another_worker_does_not_get_what_was_lost() -> None:
    async def story(here: Line) -> None:
        ids = await here.store(2)
        await lose_a_reserve(here, 1)
        assert [job.id for job in await here.claim(2, worker="other")] == ids[1:]

    on_a_line(story)


def test_a_cancelled_reserve_gives_back_what_it_leased() -> None:
    """The caller went away; whatever was leased for it must not wait for the end of the lease."""

    async def story(here: Line) -> None:
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
        (job,) = await here.claim()
        assert job.id == job_id

    on_a_line(story)


def test_a_repeated_enqueue_by_the_caller_stores_nothing_new() -> None:
    async def story(here: Line) -> None:
        jobs = records(2)
        here.proxy.refuse()
        here.proxy.on_request(b"enqueue", "lose_answer")
        with pytest.raises(BackendUnavailable):
            await here.near.enqueue(jobs, now=NOW)
        here.proxy.accept()
        assert await here.near.enqueue(jobs, now=NOW) == [Enqueued(job.id, True) for job in jobs]
        assert await here.counts() == {JobState.READY: 2}

    on_a_line(story)


def test_a_repeated_settle_by_the_caller_is_told_the_truth() -> None:
    async def story(here: Line) -> None:
        await here.store(2)
        done, again = await here.claim(2)
        batch = [Ack(done.id, done.token or ""), Retry(again.id, again.token or "", NOW, 1, BOOM)]
        here.proxy.refuse()
        here.proxy.on_request(b"settle", "lose_answer")
        with pytest.raises(BackendUnavailable):
            await here.near.settle(batch, now=NOW)
        here.proxy.accept()
        first, second = await here.near.settle(batch, now=NOW)
        assert first is None
        assert isinstance(second, JobNotInflight)
        assert len(await here.log(again.id)) == 1

    on_a_line(story)


def test_a_wake_up_whose_answer_was_lost_comes_again() -> None:
    async def story(here: Line) -> None:
        while await waits_of(here.near)(["q"], now=NOW, timeout=0):
            pass
        here.proxy.refuse()
        here.proxy.on_request(b"wait", "lose_answer")
        waiting = asyncio.ensure_future(waits_of(here.near)(["q"], now=NOW, timeout=20))
        await here.store()
        with pytest.raises(BackendUnavailable):
            await waiting
        here.proxy.accept()
        assert await waits_of(here.near)(["q"], now=NOW, timeout=20)

    on_a_line(story)
