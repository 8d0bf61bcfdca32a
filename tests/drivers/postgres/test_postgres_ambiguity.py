"""Calls whose answer never comes: whether the server has carried them out or not, they have happened once.

A proxy loses the answer of the very request a test names (`lose_answer`), or the request itself (`drop`). The caller is to
see neither: the driver asks again, in a way that finds what the first try has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import psycopg
import pytest

from drivers.postgres.harness import LEASE, Line, Raw, ack, claim, counts, held, ids, make_records, outcomes
from records import NOW, make_record
from taskharbor.drivers import contract
from taskharbor.drivers.postgres import PostgresDriver, enqueue
from taskharbor.drivers.postgres.connections import Row, Session
from taskharbor.drivers.postgres.options import NOTIFYING
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, Lease, Outcome
from taskharbor_testkit.servers.proxy import Fault
from worker.stage import eventually, finish

T = TypeVar("T")
ERROR = Failure("ValueError", "no")


@pytest.fixture(params=["drop", "lose_answer"])
def fault(request: pytest.FixtureRequest) -> Any:
    return request.param


async def asked_twice(here: Line, call: bytes, fault: Fault, ask: Callable[[], Awaitable[T]]) -> T:
    """The answer, where the first request that runs `call` meets its fault."""
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


async def claim_in_vain(here: Line, fault: Fault, limit: int = 3) -> None:
    await asked_in_vain(here, b".claim(", fault, lambda: claim(here.near, limit))


# -- enqueue ----------------------------------------------------------------------------------------------


KEYED, ONCE = {"key": "k"}, {"idempotency_key": "i"}


@pytest.mark.parametrize(("count", "fields"), [(1, {}), (50, {}), (1, KEYED), (1, ONCE), (1, KEYED | ONCE)])
async def test_an_enqueue_stores_once(here: Line, fault: Fault, count: int, fields: Any) -> None:
    batch = make_records(count, **fields)
    answers = await asked_twice(here, b".enqueue_", fault, lambda: here.near.enqueue(batch, now=NOW))
    assert ids(answers) == ids(batch)
    if fields:
        # The next one of the key finds it, so its mark was left once as well.
        again = await here.near.enqueue([make_record(**fields)], now=NOW)
        assert again == [contract.Enqueued(batch[0].id, existed=True)]
    assert await counts(here.far) == {JobState.READY: count}


async def test_an_enqueue_onto_a_running_key_blocks_one_job(here: Line, fault: Fault) -> None:
    await here.store(key="k")
    await claim(here.near)
    job = make_record(key="k")
    answers = await asked_twice(here, b".enqueue_", fault, lambda: here.near.enqueue([job], now=NOW))
    assert ids(answers) == [job.id]
    assert await counts(here.far) == {JobState.INFLIGHT: 1, JobState.BLOCKED: 1}


async def test_an_enqueue_that_failed_may_be_tried_again(here: Line, fault: Fault) -> None:
    """Even when its jobs have run and ended meanwhile."""
    plain, keyed = make_records(10), make_records(1, key="k")
    await asked_in_vain(here, b".enqueue_", fault, lambda: here.near.enqueue(plain, now=NOW))
    stored = await claim(here.near, 100)
    assert len(stored) == (10 if fault == "lose_answer" else 0)
    await ack(here.near, stored)
    for batch in (plain, keyed):
        assert ids(await here.near.enqueue(batch, now=NOW)) == ids(batch)
    expected = {JobState.READY: 1, JobState.DONE: 10} if stored else {JobState.READY: 11}
    assert await counts(here.far) == expected


# -- reserve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2])
async def test_a_reserve_gives_the_jobs_it_leased(here: Line, fault: Fault, limit: int | None) -> None:
    stored = await here.store(5)
    await here.far.configure("q", contract.QueueSettings(max_inflight=limit), now=NOW)
    jobs = await asked_twice(here, b".claim(", fault, lambda: claim(here.near, 3))
    room = limit or 3
    assert ids(jobs) == stored[:room]
    assert [(job.fence, job.stalls, job.reserved_at_us) for job in jobs] == [(1, 0, NOW)] * room
    assert await counts(here.far) == {JobState.READY: 5 - room, JobState.INFLIGHT: room}
    if limit:
        assert await claim(here.near, 3) == []
    await ack(here.near, jobs)
    # The repeated claim is over: the next one is new.
    assert ids(await claim(here.near, 2)) == stored[room : room + 2]


@pytest.mark.parametrize("limits", [[3, 2], [1] * 5], ids=str)
async def test_a_reserve_gives_what_a_failed_one_leased(here: Line, fault: Fault, limits: list[int]) -> None:
    """But not more than it asks for: the rest goes back."""
    stored = await here.store(5)
    await claim_in_vain(here, fault)
    first, *others = [await claim(here.near, limit, now=NOW + SECOND) for limit in limits]
    assert ids(first) == stored[: limits[0]]
    assert [(job.fence, job.stalls) for job in first] == [(1, 0)] * limits[0]
    assert [len(jobs) for jobs in others] == limits[1:]
    assert sorted(job.id for jobs in others for job in jobs) == sorted(stored[limits[0] :])
    assert await counts(here.far) == {JobState.INFLIGHT: 5}


async def test_what_a_failed_reserve_leased_is_not_given_to_another_worker(here: Line, fault: Fault) -> None:
    stored = await here.store(5)
    await claim_in_vain(here, fault)
    of_another = ids(await claim(here.near, 1, worker="another"))
    assert of_another == (stored[3:4] if fault == "lose_answer" else stored[:1])
    assert ids(await claim(here.near, 3)) == (stored[:3] if fault == "lose_answer" else stored[1:4])


async def test_a_lease_of_a_failed_reserve_that_ran_out_is_claimed_anew(here: Line, fault: Fault) -> None:
    """The outage lasted longer than the lease: others may have these jobs any moment, so they are claimed anew."""
    stored = await here.store(3)
    await claim_in_vain(here, fault)
    later = NOW + LEASE + SECOND
    jobs = await claim(here.near, 3, now=later)
    assert ids(jobs) == stored
    assert [job.expires_at_us for job in jobs] == [later + LEASE] * 3
    await ack(here.near, jobs, later)
    expired = [Outcome.EXPIRED] if fault == "lose_answer" else []
    assert await outcomes(here.far, stored[0]) == [*expired, Outcome.DONE]


async def test_reserves_that_failed_side_by_side_leave_nothing_behind(here: Line, fault: Fault) -> None:
    stored = await here.store(6)
    # Both connections of the handle have been used.
    await asyncio.gather(here.near.time(), here.near.time())
    await claim_in_vain(here, fault, 2)
    # As many as claim at the same time: on a connection that nobody has used yet a call is not repeated.
    await asyncio.gather(*(here.near.time() for _ in range(3)))
    here.proxy.on_request(b".claim(", then=fault, n=2)
    jobs = [job for batch in await asyncio.gather(*(claim(here.near, 2) for _ in range(3))) for job in batch]
    assert sorted(ids(jobs)) == sorted(stored)
    assert [(job.fence, job.stalls) for job in jobs] == [(1, 0)] * 6


# -- the end of a lease -----------------------------------------------------------------------------------

ENDS: dict[str, tuple[Callable[[JobRecord], contract.Settlement], JobState, Outcome]] = {
    "ack": (lambda job: contract.Ack(*held(job)), JobState.DONE, Outcome.DONE),
    "ack with a result": (lambda job: contract.Ack(*held(job), b"1"), JobState.DONE, Outcome.DONE),
    "fail": (lambda job: contract.Fail(*held(job), 1, ERROR), JobState.DEAD, Outcome.DEAD),
    "discard": (lambda job: contract.Discard(*held(job)), JobState.CANCELLED, Outcome.CANCELLED),
    "retry": (lambda job: contract.RetryAt(*held(job), NOW, 1, ERROR), JobState.READY, Outcome.RETRIED),
    "release": (lambda job: contract.Release(*held(job)), JobState.READY, Outcome.RELEASED),
}


OTHER_ENDS = [pytest.param([name], marks=pytest.mark.slow) for name in ENDS if name not in ("ack", "retry")]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("names", [list(ENDS), ["ack"], ["retry"], *OTHER_ENDS], ids=" ".join)
async def test_a_lease_ends_once(here: Line, fault: Fault, key: str | None, names: list[str]) -> None:
    await here.far.configure("q", contract.QueueSettings(failure_queue="failed"), now=NOW)
    for name in names:
        await here.store(key=key and key + name)
    jobs = await claim(here.near, len(names))
    ends = [ENDS[name][0](job) for name, job in zip(names, jobs, strict=True)]
    answers = await asked_twice(here, b".settle(", fault, lambda: here.near.settle(ends, now=NOW))
    for name, job in zip(names, jobs, strict=True):
        _, state, outcome = ENDS[name]
        stored = await here.job(job.id)
        assert (stored.state, stored.fence, stored.stalls) == (state, 1, 0)
        assert await outcomes(here.far, job.id) == [outcome]
    assert sum((await counts(here.far)).values()) == len(names)
    assert await counts(here.far, "failed") == ({JobState.READY: 1} if "fail" in names else {})
    assert answers == [None] * len(names)


async def test_a_settlement_that_failed_may_be_repeated(here: Line, fault: Fault) -> None:
    await here.store(20)
    jobs = await claim(here.near, 20)
    await asked_in_vain(here, b".settle(", fault, lambda: ack(here.near, jobs))
    await ack(here.near, jobs, NOW + SECOND)
    for job in jobs:
        assert await outcomes(here.far, job.id) == [Outcome.DONE]
    assert await counts(here.far) == {JobState.DONE: 20}


async def test_a_heartbeat_holds(here: Line, fault: Fault) -> None:
    await here.store()
    (job,) = await claim(here.near)
    later = NOW + SECOND
    beat = partial(here.near.extend_lease, [contract.Extension(*held(job), b"half")], lease_for=LEASE)
    (lease,) = await asked_twice(here, b".extend_lease(", fault, partial(beat, now=later))
    assert isinstance(lease, Lease)
    stored = await here.job(job.id)
    assert stored.expires_at_us == lease.expires_at_us == later + LEASE
    assert stored.progress == b"half"
    await ack(here.near, [job], later)


# -- operating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_cancel_happens_once(here: Line, fault: Fault, is_running: bool) -> None:
    (job_id,) = await here.store()
    if is_running:
        await claim(here.near)
    answers = await asked_twice(here, b".cancel_jobs(", fault, lambda: here.near.cancel([job_id], now=NOW))
    assert answers == [JobState.INFLIGHT if is_running else JobState.CANCELLED]
    stored = await here.job(job_id)
    assert (stored.state, stored.cancel_requested) == (answers[0], is_running)
    assert await outcomes(here.far, job_id) == ([] if is_running else [Outcome.CANCELLED])


async def test_a_cancel_by_key_counts_what_its_first_try_cancelled(here: Line, fault: Fault) -> None:
    await here.store(key="k")
    await claim(here.near)
    (blocked,), (ready,) = await here.store(key="k"), await here.store(key="other")
    ask = partial(here.near.cancel_keys, ["k", "other", "none"], queue="q", now=NOW)
    assert await asked_twice(here, b".cancel_keys(", fault, ask) == [2, 1, 0]
    assert await outcomes(here.far, blocked) == await outcomes(here.far, ready) == [Outcome.CANCELLED]


async def test_a_requeue_happens_once_and_says_so(here: Line, fault: Fault) -> None:
    await here.store()
    (job,) = await claim(here.near)
    await here.near.settle([contract.Fail(*held(job), 1, ERROR)], now=NOW)
    answers = await asked_twice(here, b".requeue_jobs(", fault, lambda: here.near.requeue([job.id], now=NOW))
    stored = await here.job(job.id)
    assert (stored.state, stored.attempts) == (JobState.READY, 0)
    assert await outcomes(here.far, job.id) == [Outcome.DEAD, Outcome.REQUEUED]
    assert answers == [JobState.READY]


# -- a first try that is still under way ------------------------------------------------------------------
# A server does not notice that a client has gone while it waits for a lock, and goes on with the call afterwards.


async def test_a_call_meets_its_own_first_try(here: Line, raw: Raw, fault: Fault) -> None:
    """None of the jobs is leased without anybody knowing of it."""

    async def meet(ask: Callable[[], Awaitable[T]]) -> T:
        """Asks, cuts the line in the middle of the call, and lets the second try meet the first."""
        with raw.another("LOCK TABLE moves IN SHARE MODE"):
            asked = asyncio.ensure_future(ask())
            await eventually(lambda: raw.locks_awaited() == 1)
            if fault == "drop":
                # The first try is undone: its backend is ended with it.
                raw("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            else:
                here.proxy.cut()
                await eventually(lambda: raw.locks_awaited() == 2)
        answer = await finish(asked)
        await eventually(lambda: raw.locks_awaited() == 0)
        return answer

    for batch in (make_records(1, key="k"), make_records(10)):
        assert ids(await meet(partial(here.near.enqueue, batch, now=NOW))) == ids(batch)
    assert await counts(here.far) == {JobState.READY: 11}
    jobs = await meet(lambda: claim(here.near, 6))
    assert len(jobs) == 6
    assert await counts(here.far) == {JobState.READY: 5, JobState.INFLIGHT: 6}
    await meet(lambda: ack(here.near, jobs))
    assert await counts(here.far) == {JobState.READY: 5, JobState.DONE: 6}
    assert [await outcomes(here.far, job.id) for job in jobs] == [[Outcome.DONE]] * 6


# -- a first try that the server reads last ---------------------------------------------------------------


Statement = tuple[str, list[Any]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Statement]:
    """The statements of all sessions."""
    statements: list[Statement] = []
    rows = Session.rows

    async def remembering(session: Session, statement: str, values: Any = ()) -> list[Row]:
        statements.append((statement, list(values)))
        return await rows(session, statement, values)

    monkeypatch.setattr(Session, "rows", remembering)
    return statements


async def test_a_reserve_read_last_leases_nothing(here: Line, fault: Fault, sent: list[Statement]) -> None:
    await here.store(9)
    await claim_in_vain(here, fault)
    assert len(await claim(here.near, 3)) == 3
    late = next(one for one in sent if ".claim(" in one[0])
    assert await here.far._query(lambda session: session.rows(*late)) == []
    assert await counts(here.far) == {JobState.READY: 6, JobState.INFLIGHT: 3}


@pytest.fixture(params=["", "&prepare=off"])
def ways(url: str, request: pytest.FixtureRequest) -> str:
    return url + str(request.param)


async def open_queue(driver: PostgresDriver) -> None:
    """A single enqueue takes its short way on a queue that is there."""
    await driver.enqueue([make_record()], now=NOW, new_ids=True)
    await ack(driver, await claim(driver))


async def store_again_and_run(driver: PostgresDriver, job: JobRecord) -> None:
    """As a driver does whose first try got no answer. Then the job runs."""

    async def again(session: Session) -> None:
        session.is_repeated = True
        await enqueue.store(session, [job], NOW, NOTIFYING, new_ids=True)

    await driver._query(again)
    await ack(driver, await claim(driver))
    assert await counts(driver) == {JobState.DONE: 2}


async def test_an_enqueue_read_last_stores_nothing(
    ways: str, monkeypatch: Any, sent: list[Statement]
) -> None:
    job = make_record()
    async with PostgresDriver.from_url(ways) as first, PostgresDriver.from_url(ways) as second:
        await open_queue(first)

        async def losing(session: Session, statement: str, values: Any = ()) -> list[Row]:
            sent.append((statement, list(values)))
            raise psycopg.OperationalError("the answer was lost")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "rows", losing)
            with pytest.raises(BackendUnavailable):
                await first.enqueue([job], now=NOW, new_ids=True)
        late = next(one for one in sent if job.id in one[1])
        await store_again_and_run(second, job)
        with pytest.raises(Exception, match="a later try has stored this job"):
            await first._query(lambda session: session.rows(*late))
        assert await counts(second) == {JobState.DONE: 2}


_GATE = """
CREATE FUNCTION stop_here() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('test.stops', true) = 'on' THEN
        PERFORM pg_advisory_xact_lock_shared(4711);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER stop_here BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION stop_here();
"""


async def test_an_enqueue_that_was_stopped_on_its_way_stores_nothing(ways: str, raw: Raw) -> None:
    """Its view of the store is older than the second try, and the job's end: what it checks by must not be."""
    job = make_record()
    async with PostgresDriver.from_url(ways) as first, PostgresDriver.from_url(ways) as second:
        await open_queue(first)
        raw.connection.execute(_GATE.encode())
        try:
            await first._query(lambda session: session.rows("SELECT set_config('test.stops', 'on', false)"))
            with raw.another("SELECT pg_advisory_lock(4711)"):
                late = asyncio.ensure_future(first.enqueue([job], now=NOW, new_ids=True))
                await eventually(lambda: raw.locks_awaited() == 1)
                await store_again_and_run(second, job)
            assert await finish(late) == [contract.Enqueued(job.id, existed=True)]
            assert await counts(second) == {JobState.DONE: 2}
        finally:
            raw("DROP TRIGGER stop_here ON jobs")
            raw("DROP FUNCTION stop_here")
