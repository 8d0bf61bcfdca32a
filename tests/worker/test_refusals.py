"""A driver refuses a call: only the job or the queue that is to blame suffers, and the worker goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from taskharbor import BackendUnavailable, InvalidRequest, Job, JobState, Outcome, Retry, Snooze
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Ack
from taskharbor.errors import Forbidden
from taskharbor.jobs import LATEST
from worker.stage import Gate, Stage, Trouble, begun, eventually, finish, logged, running


@pytest.mark.parametrize(
    "error", [InvalidRequest("no such value"), ValueError("secret"), Forbidden("no scope")]
)
async def test_of_a_refused_settlement_only_the_job_to_blame_dies(
    error: Exception, troubled: Stage, trouble: Trouble
) -> None:
    executions: Counter[str] = Counter()
    ids = await troubled.enqueue_many(600)
    guilty = ids[277]

    def refuse(call: op.Operation[Any]) -> Exception | None:
        settlements = call.settlements if isinstance(call, op.Settle) else []
        return error if any(isinstance(one, Ack) and one.job_id == guilty for one in settlements) else None

    async def handler(job: Job) -> None:
        executions[job.id] += 1

    trouble.refuse = refuse
    await troubled.drain(handler)
    assert executions == dict.fromkeys(ids, 1)
    assert [await troubled.outcomes(one) for one in ids if one != guilty] == [[Outcome.DONE]] * 599
    dead = await troubled.get(guilty)
    assert (dead.state, dead.attempts) == (JobState.DEAD, 1)
    assert "SettlementRefused: the job ended as done, which could not be written" in (dead.last_error or "")
    assert "secret" not in (dead.last_error or "")


async def test_a_job_that_cannot_be_settled_at_all_keeps_nobody_from_it(
    troubled: Stage, trouble: Trouble
) -> None:
    ids = await troubled.enqueue_many(20)

    def refuse(call: op.Operation[Any]) -> Exception | None:
        settlements = call.settlements if isinstance(call, op.Settle) else []
        return InvalidRequest("bad id") if any(one.job_id == ids[0] for one in settlements) else None

    trouble.refuse = refuse
    with logged() as told:
        async with running(troubled.worker(lambda job: None)):
            for one in ids[1:]:
                assert (await troubled.ended(one)).state is JobState.DONE
            await eventually(lambda: told.count(f"{ids[0]} could not be settled as dead: bad id") == 1)
    assert await troubled.state(ids[0]) is JobState.INFLIGHT


async def test_of_a_refused_heartbeat_only_the_job_to_blame_is_lost(
    troubled: Stage, trouble: Trouble
) -> None:
    guilty, *others = ids = await troubled.enqueue_many(8)
    beats: Counter[str] = Counter()

    def refuse(call: op.Operation[Any]) -> Exception | None:
        if not isinstance(call, op.ExtendLease):
            return None
        beating = [one.job_id for one in call.extensions]
        if guilty not in beating:
            beats.update(beating)
        return InvalidRequest("too large") if guilty in beating else None

    trouble.refuse = refuse
    go_on = asyncio.Event()
    executions: Counter[str] = Counter()

    async def handler(job: Job) -> None:
        executions[job.id] += 1
        if executions[guilty] < 2:
            await go_on.wait()

    with logged() as told:
        async with running(troubled.worker(handler, concurrency=8, lease=60.0, heartbeat=0.02)):
            await eventually(lambda: told.count(f"lease of work {guilty} lost: too large") == 1)
            await eventually(lambda: min(beats[one] for one in others) >= 2)
            go_on.set()
            for one in others:
                assert (await troubled.ended(one)).state is JobState.DONE
    assert {executions[one] for one in ids} == {1}


@pytest.mark.parametrize(
    "error", [InvalidRequest("bad row"), BackendUnavailable("a damaged object"), TypeError("bad row")]
)
async def test_a_queue_that_cannot_be_claimed_from_holds_up_no_other_and_no_stop(
    error: Exception, troubled: Stage, trouble: Trouble
) -> None:
    is_bad = True

    def refuse(call: op.Operation[Any]) -> Exception | None:
        return error if is_bad and getattr(call, "queue", None) == "bad" else None

    trouble.refuse = refuse
    held = await troubled.enqueue(queue="bad")
    with logged() as told:
        async with running(troubled.worker(lambda job: None, queues=["bad", "good"], poll_interval=0.05)):
            for _ in range(3):
                assert (await troubled.ended(await troubled.enqueue(queue="good"))).state is JobState.DONE
            await eventually(lambda: told.count("queue bad cannot be claimed from") == 1)
        # It stopped, although the queue is as bad as before.
        assert await troubled.state(held) is JobState.READY
        async with running(troubled.worker(lambda job: None, queues=["bad", "good"], poll_interval=0.05)):
            await eventually(lambda: told.count("queue bad cannot be claimed from") == 2)
            is_bad = False
            assert (await troubled.ended(held)).state is JobState.DONE
        assert told.count("queue bad can be claimed from again") == 1


async def test_a_worker_that_may_not_claim_at_all_says_so_and_ends(troubled: Stage, trouble: Trouble) -> None:
    trouble.refuse = lambda call: Forbidden("no scope work") if isinstance(call, op.Reserve) else None
    with pytest.raises(Forbidden, match="no scope work"):
        await finish(troubled.worker(lambda job: None).run_async())


async def test_jobs_are_given_back_although_one_of_them_is_refused(
    troubled: Stage, trouble: Trouble, impatient: None
) -> None:
    guilty, *others = await troubled.enqueue_many(4)
    gate, begun_jobs = Gate(), list[str]()

    async def stubborn(job: Job) -> None:
        begun_jobs.append(job.id)
        while not gate.go_on.is_set():
            with suppress(asyncio.CancelledError):
                await gate.on_loop(job)

    def refuse(call: op.Operation[Any]) -> Exception | None:
        settlements = call.settlements if isinstance(call, op.Settle) else []
        return InvalidRequest("bad id") if any(one.job_id == guilty for one in settlements) else None

    trouble.refuse = refuse
    worker = troubled.worker(stubborn, grace=0.0)
    task = await begun(worker, gate)
    await eventually(lambda: len(begun_jobs) == 4)
    worker.stop()
    await finish(task)
    gate.go_on.set()
    assert [await troubled.state(one) for one in others] == [JobState.READY] * 3


@pytest.mark.parametrize("kind", [Retry, Snooze])
@pytest.mark.parametrize("instant", [datetime.min, datetime.max])
async def test_an_instant_beyond_all_bounds_is_brought_into_range(
    kind: type[Retry | Snooze], instant: datetime, troubled: Stage
) -> None:
    async def handler(job: Job) -> None:
        if job.fence == 1 and job.id == ids[0]:
            raise kind(run_at=instant.replace(tzinfo=UTC))

    ids = await troubled.enqueue_many(30)
    async with running(troubled.worker(handler)):
        for one in ids[1:]:
            assert (await troubled.ended(one)).state is JobState.DONE
        if instant == datetime.min:
            assert (await troubled.ended(ids[0])).state is JobState.DONE
        else:
            await troubled.until(ids[0], lambda record: record.run_at_us == LATEST)


async def test_extreme_numbers_of_a_record_end_no_worker(here: Stage) -> None:
    """Sent with the driver protocol, by somebody with the scope to produce."""

    async def handler(job: Job) -> None:
        raise ValueError("no")

    job_id = await here.enqueue(max_attempts=2)
    record = await here.get(job_id)
    for number, (name, value) in enumerate([("backoff_min_us", LATEST), ("timeout_us", LATEST)]):
        record.id = f"extreme-{number}"
        setattr(record, name, value)
        record.backoff_max_us = LATEST
        await here.client.driver.enqueue([record], now=record.run_at_us)
    async with running(here.worker(handler)):
        await here.until("extreme-1", lambda found: found.attempts > 0)
        await here.until("extreme-0", lambda found: found.attempts > 0)
        plain = await here.enqueue(max_attempts=1)
        assert (await here.ended(plain)).state is JobState.DEAD
