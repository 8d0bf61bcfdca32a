"""Calls whose answer never comes: whether the server has carried them out or not, they have happened once.

A proxy loses the answer of the very request a test names (`lose_answer`), or the request itself (`drop`). The caller is to
see neither: the driver asks again, in a way that finds what the first try has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from drivers.postgres.outage_stage import (
    LEASE,
    NOW,
    Line,
    crash_proof_server,
    line,
    nothing_unhandled,
    records,
    table_locked,
    waiting_for_locks,
)
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Enqueued,
    Extension,
    Fail,
    QueueSettings,
    Release,
    Retry,
    Settlement,
)
from taskharbor.drivers.postgres.connections import Row, Session
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, Lease, Outcome
from taskharbor_testkit.servers import PostgresServer
from taskharbor_testkit.servers.proxy import Fault
from worker.stage import eventually, finish

pytestmark = pytest.mark.parametrize("fault", ["drop", "lose_answer"])

ERROR = Failure("ValueError", "no")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with crash_proof_server() as server:
        yield server


def on_a_line(server: PostgresServer, story: Callable[[Line], Awaitable[None]], options: str = "") -> None:
    async def main() -> None:
        with nothing_unhandled():
            async with line(server, options) as here:
                await story(here)

    asyncio.run(main())


async def asked_twice(here: Line, call: bytes, fault: Fault, ask: Callable[[], Awaitable[Any]]) -> Any:
    """What the caller is told, when the first request that runs `call` meets its fault."""
    here.proxy.on_request(call, then=fault)
    answer = await ask()
    assert here.proxy.triggered.wait(10), f"nothing ran {call!r}"
    return answer


async def asked_in_vain(here: Line, call: bytes, fault: Fault, ask: Callable[[], Awaitable[Any]]) -> None:
    """The same, with nobody there to ask a second time."""
    here.proxy.refuse()
    with pytest.raises(BackendUnavailable):
        await asked_twice(here, call, fault, ask)
    assert here.proxy.triggered.wait(10)
    here.proxy.accept()


# -- enqueue ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 50])
def test_a_plain_enqueue_stores_each_job_once(server: PostgresServer, fault: Fault, count: int) -> None:
    async def story(here: Line) -> None:
        batch = records(count)
        answers = await asked_twice(here, b".enqueue_", fault, lambda: here.near.enqueue(batch, now=NOW))
        assert [one.id for one in answers] == [record.id for record in batch]
        assert await here.counts() == {JobState.READY: count}

    on_a_line(server, story)


@pytest.mark.parametrize(
    "fields", [{"key": "k"}, {"idempotency_key": "i"}, {"key": "k", "idempotency_key": "i"}]
)
def test_an_enqueue_by_key_stores_one_job(
    server: PostgresServer, fault: Fault, fields: dict[str, str]
) -> None:
    async def story(here: Line) -> None:
        (record,) = records(1, **fields)
        (answer,) = await asked_twice(
            here, b"enqueue_by_rules", fault, lambda: here.near.enqueue([record], now=NOW)
        )
        assert answer.id == record.id
        # The next one of the key finds it, so its mark was left once as well.
        assert await here.near.enqueue(records(1, **fields), now=NOW) == [Enqueued(record.id, existed=True)]
        assert await here.counts() == {JobState.READY: 1}

    on_a_line(server, story)


def test_an_enqueue_onto_a_running_key_blocks_one_job(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store(key="k")
        await here.claim()
        (record,) = records(1, key="k")
        (answer,) = await asked_twice(
            here, b"enqueue_by_rules", fault, lambda: here.near.enqueue([record], now=NOW)
        )
        assert answer.id == record.id
        assert await here.counts() == {JobState.INFLIGHT: 1, JobState.BLOCKED: 1}

    on_a_line(server, story)


def test_an_enqueue_that_failed_may_be_tried_again_with_the_same_records(
    server: PostgresServer, fault: Fault
) -> None:
    """Even when its jobs have run and ended meanwhile."""

    async def story(here: Line) -> None:
        plain, keyed = records(10), records(1, key="k")
        await asked_in_vain(here, b".enqueue_", fault, lambda: here.near.enqueue(plain, now=NOW))
        stored = await here.claim(100)
        assert len(stored) == (10 if fault == "lose_answer" else 0)
        await here.near.settle([Ack(job.id, job.token or "") for job in stored], now=NOW)
        for batch in (plain, keyed):
            answers = await here.near.enqueue(batch, now=NOW)
            assert [one.id for one in answers] == [record.id for record in batch]
        expected = {JobState.READY: 1, JobState.DONE: 10} if stored else {JobState.READY: 11}
        assert await here.counts() == expected

    on_a_line(server, story)


# -- reserve ----------------------------------------------------------------------------------------------


def test_a_reserve_gives_the_jobs_it_leased(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        jobs = await asked_twice(here, b".claim(", fault, lambda: here.claim(3))
        assert [job.id for job in jobs] == ids[:3]
        assert [(job.fence, job.stalls, job.reserved_at_us) for job in jobs] == [(1, 0, NOW)] * 3
        assert await here.counts() == {JobState.READY: 2, JobState.INFLIGHT: 3}
        assert await here.near.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW) == [None] * 3
        # What was asked for twice is over: the next claim is a new one.
        assert [job.id for job in await here.claim(3)] == ids[3:]

    on_a_line(server, story)


def test_a_reserve_under_a_limit_gives_the_jobs_it_leased(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await here.far.configure("q", QueueSettings(max_inflight=2), now=NOW)
        jobs = await asked_twice(here, b".claim(", fault, lambda: here.claim(3))
        assert [job.id for job in jobs] == ids[:2]
        assert await here.claim(3) == []
        assert await here.counts() == {JobState.READY: 3, JobState.INFLIGHT: 2}

    on_a_line(server, story)


def test_a_reserve_after_one_that_failed_gives_what_that_one_leased(
    server: PostgresServer, fault: Fault
) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await asked_in_vain(here, b".claim(", fault, lambda: here.claim(3))
        jobs = await here.claim(3, now=NOW + SECOND)
        assert [job.id for job in jobs] == ids[:3]
        assert [(job.fence, job.stalls) for job in jobs] == [(1, 0)] * 3
        assert [job.id for job in await here.claim(3, now=NOW + SECOND)] == ids[3:]
        assert await here.counts() == {JobState.INFLIGHT: 5}

    on_a_line(server, story)


def test_what_a_failed_reserve_leased_is_not_given_to_another_worker(
    server: PostgresServer, fault: Fault
) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await asked_in_vain(here, b".claim(", fault, lambda: here.claim(3))
        of_another = [job.id for job in await here.claim(1, worker="another")]
        assert of_another == (ids[3:4] if fault == "lose_answer" else ids[:1])
        own = [job.id for job in await here.claim(3)]
        assert own == (ids[:3] if fault == "lose_answer" else ids[1:4])

    on_a_line(server, story)


def test_a_lease_of_a_failed_reserve_that_ran_out_is_not_given_as_valid(
    server: PostgresServer, fault: Fault
) -> None:
    """The outage lasted longer than the lease: others may have these jobs any moment, so they are claimed anew."""

    async def story(here: Line) -> None:
        ids = await here.store(3)
        await asked_in_vain(here, b".claim(", fault, lambda: here.claim(3))
        later = NOW + LEASE + SECOND
        jobs = await here.claim(3, now=later)
        assert [job.id for job in jobs] == ids
        assert [job.expires_at_us for job in jobs] == [later + LEASE] * 3
        assert await here.near.settle([Ack(job.id, job.token or "") for job in jobs], now=later) == [None] * 3
        expired = [Outcome.EXPIRED] if fault == "lose_answer" else []
        assert [row.outcome for row in await here.log(ids[0])] == [*expired, Outcome.DONE]

    on_a_line(server, story)


def test_a_reserve_after_one_that_failed_gives_no_more_than_it_is_asked_for(
    server: PostgresServer, fault: Fault
) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(5)
        await asked_in_vain(here, b".claim(", fault, lambda: here.claim(3))
        got: list[str] = []
        for _ in range(5):
            jobs = await here.claim(1)
            assert len(jobs) == 1
            got += [job.id for job in jobs]
        assert sorted(got) == sorted(ids)

    on_a_line(server, story)


def test_reserves_that_failed_side_by_side_leave_nothing_behind(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        ids = await here.store(6)
        # Both connections of the handle have been used.
        await asyncio.gather(here.near.time(), here.near.time())
        await asked_in_vain(here, b".claim(", fault, lambda: here.claim(2))
        # As many as claim at the same time: on a connection that nobody has used yet a call is not repeated.
        await asyncio.gather(*(here.near.time() for _ in range(3)))
        here.proxy.on_request(b".claim(", then=fault, n=2)
        jobs = [job for batch in await asyncio.gather(*(here.claim(2) for _ in range(3))) for job in batch]
        assert sorted(job.id for job in jobs) == sorted(ids)
        assert [(job.fence, job.stalls) for job in jobs] == [(1, 0)] * 6

    on_a_line(server, story)


# -- the end of a lease -----------------------------------------------------------------------------------

ENDS: list[tuple[str, Callable[[JobRecord], Settlement], JobState, Outcome]] = [
    ("ack", lambda job: Ack(job.id, job.token or ""), JobState.DONE, Outcome.DONE),
    ("ack with a result", lambda job: Ack(job.id, job.token or "", b"1"), JobState.DONE, Outcome.DONE),
    ("fail", lambda job: Fail(job.id, job.token or "", 1, ERROR), JobState.DEAD, Outcome.DEAD),
    ("discard", lambda job: Discard(job.id, job.token or ""), JobState.CANCELLED, Outcome.CANCELLED),
    ("retry", lambda job: Retry(job.id, job.token or "", NOW, 1, ERROR), JobState.READY, Outcome.RETRIED),
    ("release", lambda job: Release(job.id, job.token or ""), JobState.READY, Outcome.RELEASED),
]


@pytest.mark.parametrize(("end", "state", "outcome"), [pytest.param(*end[1:], id=end[0]) for end in ENDS])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_lease_ends_once_and_without_an_error(
    server: PostgresServer,
    fault: Fault,
    key: str | None,
    end: Callable[[JobRecord], Settlement],
    state: JobState,
    outcome: Outcome,
) -> None:
    async def story(here: Line) -> None:
        await here.store(key=key)
        (job,) = await here.claim()
        answer = await asked_twice(here, b".settle(", fault, lambda: here.near.settle([end(job)], now=NOW))
        (stored,) = await here.jobs(job.id)
        assert (stored.state, stored.fence, stored.stalls) == (state, 1, 0)
        assert [row.outcome for row in await here.log(job.id)] == [outcome]
        assert await here.counts() == {state: 1}
        assert answer == [None]

    on_a_line(server, story)


def test_a_mixed_batch_ends_once(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store(len(ENDS))
        jobs = await here.claim(len(ENDS))
        settlements = [make(job) for (_, make, _, _), job in zip(ENDS, jobs, strict=True)]
        answers = await asked_twice(here, b".settle(", fault, lambda: here.near.settle(settlements, now=NOW))
        for (_, _, state, outcome), job in zip(ENDS, jobs, strict=True):
            assert [row.outcome for row in await here.log(job.id)] == [outcome]
            assert (await here.jobs(job.id))[0].state is state
        assert answers == [None] * len(ENDS)

    on_a_line(server, story)


def test_a_dead_job_reaches_the_failure_queue_once(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.far.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
        await here.store()
        (job,) = await here.claim()
        fail = Fail(job.id, job.token or "", 1, ERROR)
        assert await asked_twice(here, b".settle(", fault, lambda: here.near.settle([fail], now=NOW)) == [
            None
        ]
        (stats,) = await here.far.stats(now=NOW, queue="failed")
        assert stats.counts[JobState.READY] == 1

    on_a_line(server, story)


def test_a_settlement_that_failed_may_be_repeated(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store(20)
        jobs = await here.claim(20)
        acks = [Ack(job.id, job.token or "") for job in jobs]
        await asked_in_vain(here, b".settle(", fault, lambda: here.near.settle(acks, now=NOW))
        assert await here.near.settle(acks, now=NOW + SECOND) == [None] * 20
        for job in jobs:
            assert [row.outcome for row in await here.log(job.id)] == [Outcome.DONE]
        assert await here.counts() == {JobState.DONE: 20}

    on_a_line(server, story)


def test_a_heartbeat_holds(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store()
        (job,) = await here.claim()
        later = NOW + SECOND
        beat = [Extension(job.id, job.token or "", b"half")]
        answers = await asked_twice(
            here, b".extend_lease(", fault, lambda: here.near.extend_lease(beat, lease_for=LEASE, now=later)
        )
        (lease,) = answers
        assert isinstance(lease, Lease)
        assert lease.expires_at_us == later + LEASE
        (stored,) = await here.jobs(job.id)
        assert (stored.expires_at_us, stored.progress) == (later + LEASE, b"half")
        assert await here.near.settle([Ack(job.id, lease.token)], now=later) == [None]

    on_a_line(server, story)


# -- operating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancel_happens_once(server: PostgresServer, fault: Fault, is_running: bool) -> None:
    async def story(here: Line) -> None:
        (job_id,) = await here.store()
        if is_running:
            await here.claim()
        answers = await asked_twice(here, b".cancel(", fault, lambda: here.near.cancel([job_id], now=NOW))
        assert answers == [JobState.INFLIGHT if is_running else JobState.CANCELLED]
        (stored,) = await here.jobs(job_id)
        assert (stored.state, stored.cancel_requested) == (answers[0], is_running)
        assert len(await here.log(job_id)) == (0 if is_running else 1)

    on_a_line(server, story)


def test_a_requeue_happens_once_and_says_so(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store()
        (job,) = await here.claim()
        await here.near.settle([Fail(job.id, job.token or "", 1, ERROR)], now=NOW)
        answers = await asked_twice(here, b".requeue(", fault, lambda: here.near.requeue([job.id], now=NOW))
        (stored,) = await here.jobs(job.id)
        assert (stored.state, stored.attempts) == (JobState.READY, 0)
        assert [row.outcome for row in await here.log(job.id)] == [Outcome.DEAD, Outcome.REQUEUED]
        assert answers == [JobState.READY]

    on_a_line(server, story)


# -- a first try that is still under way ------------------------------------------------------------------
# A server does not notice that a client has gone while it waits for a lock, and goes on with the call afterwards.


async def asked_while_under_way(
    server: PostgresServer, here: Line, fault: Fault, ask: Callable[[], Awaitable[Any]]
) -> Any:
    """What the caller is told when the line is cut in the middle of a call, and the second try meets the first."""
    with table_locked(here.far, "moves", "SHARE"):
        asked = asyncio.ensure_future(ask())
        await eventually(lambda: waiting_for_locks(server) == 1)
        if fault == "drop":
            # The first try is undone: its backend is ended with it.
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            )
        else:
            here.proxy.cut()
            await eventually(lambda: waiting_for_locks(server) == 2)
    return await finish(asked)


def test_an_enqueue_meets_its_own_first_try(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        for batch in (records(10), records(1, key="k")):
            answers = await asked_while_under_way(
                server, here, fault, lambda batch=batch: here.near.enqueue(batch, now=NOW)
            )
            assert [one.id for one in answers] == [record.id for record in batch]
        await eventually(lambda: waiting_for_locks(server) == 0)
        assert await here.counts() == {JobState.READY: 11}

    on_a_line(server, story)


def test_a_reserve_meets_its_own_first_try(server: PostgresServer, fault: Fault) -> None:
    """None of the jobs is leased without anybody knowing of it."""

    async def story(here: Line) -> None:
        await here.store(6)
        jobs = await asked_while_under_way(server, here, fault, lambda: here.claim(3))
        assert len(jobs) == 3
        await eventually(lambda: waiting_for_locks(server) == 0)
        assert await here.counts() == {JobState.READY: 3, JobState.INFLIGHT: 3}

    on_a_line(server, story)


def test_a_reserve_that_the_server_reads_after_its_repetition_leases_nothing(
    server: PostgresServer, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    rows = Session.rows

    async def remembering(session: Session, statement: str, values: Any = ()) -> list[Row]:
        if ".claim(" in statement:
            asked.append((statement, list(values)))
        return await rows(session, statement, values)

    async def story(here: Line) -> None:
        await here.store(9)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "rows", remembering)
            await asked_in_vain(here, b".claim(", fault, lambda: here.claim(3))
            jobs = await here.claim(3)
        assert len(jobs) == 3
        late, _ = asked
        assert await here.far._query(lambda session: session.rows(*late)) == []
        assert await here.counts() == {JobState.READY: 6, JobState.INFLIGHT: 3}

    on_a_line(server, story)


def test_a_settlement_meets_its_own_first_try(server: PostgresServer, fault: Fault) -> None:
    async def story(here: Line) -> None:
        await here.store(5)
        await here.store(key="k")
        jobs = await here.claim(6)
        acks = [Ack(job.id, job.token or "") for job in jobs]
        answers = await asked_while_under_way(server, here, fault, lambda: here.near.settle(acks, now=NOW))
        assert answers == [None] * 6
        assert await here.counts() == {JobState.DONE: 6}
        assert [len(await here.log(job.id)) for job in jobs] == [1] * 6

    on_a_line(server, story)
