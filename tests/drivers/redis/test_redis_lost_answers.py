"""Calls whose answer never comes: whether the server has carried them out or not, they have happened once.

A proxy loses the answer of the very request that a test names (`lose_answer`), or the request itself (`drop`). The caller sees
neither: the driver asks again, in a way that finds what the first try has done.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from drivers.redis.redis_shelf import BOOM, LEASE, Line, ack, fail, release, runs, token
from taskharbor.drivers.contract import Ack, Discard, Enqueued, Extension, QueueSettings, RetryAt, Settlement
from taskharbor.drivers.redis.connection import SharedConnection
from taskharbor.errors import BackendUnavailable, JobNotDead
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease, Outcome
from taskharbor_testkit.servers.proxy import Fault

pytestmark = pytest.mark.parametrize("fault", ["drop", "lose_answer"])

T = TypeVar("T")
Late = Callable[[Line, str], None]


async def asked_twice(here: Line, function: str, fault: Fault, asking: Awaitable[T]) -> T:
    """What the caller is told, when the first request that runs the function meets its fault."""
    here.proxy.on_request(runs(function), then=fault)
    answer = await asking
    assert here.proxy.triggered.wait(10), f"nothing ran {function}"
    return answer


async def asked_in_vain(here: Line, function: str, fault: Fault, asking: Awaitable[Any]) -> None:
    """The same, with nobody there to ask a second time."""
    here.proxy.refuse()
    with pytest.raises(BackendUnavailable):
        await asked_twice(here, function, fault, asking)
    assert here.proxy.triggered.wait(10)
    here.proxy.accept()


# -- enqueue ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("queues", ["q", "qrs"])
@pytest.mark.parametrize("new_ids", [True, False])
async def test_a_plain_enqueue_stores_each_job_once(
    here: Line, fault: Fault, count: int, queues: str, new_ids: bool
) -> None:
    batch = [job for queue in queues for job in here.jobs(count, queue=queue)]
    enqueuing = here.near.enqueue(batch, now=here.now, new_ids=new_ids)
    answers = await asked_twice(here, "enqueue", fault, enqueuing)
    assert [one.id for one in answers] == [job.id for job in batch]
    for queue in queues:
        assert await here.counts(queue) == {JobState.READY: count}
        assert len(await here.reserve(100, queue=queue)) == count


@pytest.mark.parametrize("by", [["key"], ["idempotency_key"], ["key", "idempotency_key"]], ids="+".join)
@pytest.mark.parametrize("running", ["k", "another"])
async def test_an_enqueue_by_key_stores_one_job(
    here: Line, fault: Fault, by: list[str], running: str
) -> None:
    await here.claimed(1, key=running)
    job = here.job(**(fields := dict.fromkeys(by, "k")))
    (answer,) = await asked_twice(here, "enqueue", fault, here.near.enqueue([job], now=here.now))
    assert answer.id == job.id
    # The next one of the key finds it, so its mark was left once as well.
    assert await here.near.enqueue([here.job(**fields)], now=here.now) == [Enqueued(job.id, existed=True)]
    waits = JobState.BLOCKED if fields.get("key") == running else JobState.READY
    assert await here.counts() == {waits: 1, JobState.INFLIGHT: 1}


async def test_an_enqueue_that_failed_may_be_repeated_with_the_same_records(here: Line, fault: Fault) -> None:
    """Even when its jobs have run and ended meanwhile."""
    plain, keyed = here.jobs(10), here.jobs(1, key="k")
    await here.driver.configure("q", QueueSettings(), now=here.now)
    await here.near.stats(now=here.now)
    await asked_in_vain(here, "enqueue", fault, here.near.enqueue(plain, now=here.now))
    stored = await here.claim(100)
    assert len(stored) == (10 if fault == "lose_answer" else 0)
    await here.settle(*map(ack, stored))
    for batch in (plain, keyed):
        answers = await here.near.enqueue(batch, now=here.now)
        assert [one.id for one in answers] == [job.id for job in batch]
    expected = {JobState.READY: 1, JobState.DONE: 10} if stored else {JobState.READY: 11}
    assert await here.counts() == expected


# -- reserve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [3, 2])
async def test_a_reserve_gives_the_jobs_it_leased(here: Line, fault: Fault, room: int) -> None:
    ids = await here.enqueue(*here.jobs(5))
    await here.driver.configure("q", QueueSettings(max_inflight=room), now=here.now)
    jobs = await asked_twice(here, "reserve", fault, here.claim(3))
    assert sorted(job.id for job in jobs) == sorted(ids[:room])
    assert {(job.fence, job.stalls, job.reserved_at_us) for job in jobs} == {(1, 0, here.now)}
    assert await here.claim(3) == []
    assert await here.counts() == {JobState.READY: 5 - room, JobState.INFLIGHT: room}
    assert await here.near.settle([ack(job) for job in jobs], now=here.now) == [None] * room
    # What was asked for twice is over: the next claim is a new one.
    assert [job.id for job in await here.claim(2)] == ids[room : room + 2]


async def test_a_reserve_after_one_that_failed_gives_what_that_one_leased(here: Line, fault: Fault) -> None:
    """And nobody else gets it."""
    ids = await here.enqueue(*here.jobs(5))
    await asked_in_vain(here, "reserve", fault, here.claim(3))
    of_another = [job.id for job in await here.claim(1, worker="another")]
    assert of_another == (ids[3:4] if fault == "lose_answer" else ids[:1])
    here.now += SECOND
    own = await here.claim(3)
    assert sorted(job.id for job in own) == sorted(ids[:3] if fault == "lose_answer" else ids[1:4])
    assert [(job.fence, job.stalls) for job in own] == [(1, 0)] * 3
    assert [job.id for job in await here.claim(3)] == ids[4:]
    assert await here.counts() == {JobState.INFLIGHT: 5}


async def test_a_lease_of_a_failed_reserve_that_ran_out_is_not_given(here: Line, fault: Fault) -> None:
    """The outage lasted longer than the lease: others may have these jobs any moment, so they are claimed anew."""
    ids = await here.enqueue(*here.jobs(3))
    await asked_in_vain(here, "reserve", fault, here.claim(3))
    here.now += LEASE + SECOND
    jobs = await here.claim(3)
    assert [job.id for job in jobs] == ids
    assert [job.expires_at_us for job in jobs] == [here.now + LEASE] * 3
    await here.settle(*map(ack, jobs))
    expired = [Outcome.EXPIRED] if fault == "lose_answer" else []
    assert [row.outcome for row in await here.log(ids[0])] == [*expired, Outcome.DONE]


async def test_a_reserve_after_one_that_failed_gives_no_more_than_asked(here: Line, fault: Fault) -> None:
    ids = await here.enqueue(*here.jobs(5))
    await asked_in_vain(here, "reserve", fault, here.claim(3))
    jobs = [job for _ in ids for (job,) in [await here.claim(1)]]
    assert sorted(job.id for job in jobs) == sorted(ids)


async def test_reserves_that_failed_side_by_side_leave_nothing_behind(here: Line, fault: Fault) -> None:
    ids = await here.enqueue(*here.jobs(6))
    here.proxy.on_request(runs("reserve"), then=fault, n=2)
    jobs = [job for batch in await asyncio.gather(*(here.claim(2) for _ in range(3))) for job in batch]
    assert sorted(job.id for job in jobs) == sorted(ids)
    assert [(job.fence, job.stalls) for job in jobs] == [(1, 0)] * 6


async def test_a_reserve_that_is_given_up_leaves_nothing_leased(here: Line, fault: Fault) -> None:
    await here.enqueue(*here.jobs(5))
    here.proxy.stall()
    claim = asyncio.create_task(here.claim(3))
    await asyncio.sleep(0)
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    if fault == "drop":
        here.proxy.cut()
    here.proxy.flow()
    assert claim.cancelled()
    await asyncio.gather(*here.near._claims._giving_back, return_exceptions=True)
    assert await here.counts() == {JobState.READY: 5}


# -- the end of a lease -----------------------------------------------------------------------------------

ENDS: dict[str, tuple[Callable[[JobRecord], Settlement], JobState, Outcome]] = {
    "ack": (ack, JobState.DONE, Outcome.DONE),
    "ack with a result": (lambda job: Ack(job.id, token(job), b"1"), JobState.DONE, Outcome.DONE),
    "fail": (fail, JobState.DEAD, Outcome.DEAD),
    "discard": (lambda job: Discard(job.id, token(job)), JobState.CANCELLED, Outcome.CANCELLED),
    "retry": (lambda job: RetryAt(job.id, token(job), 0, 1, BOOM), JobState.READY, Outcome.RETRIED),
    "release": (release, JobState.READY, Outcome.RELEASED),
}


@pytest.mark.parametrize("kinds", [*([kind] for kind in ENDS), list(ENDS)], ids="+".join)
@pytest.mark.parametrize("key", [None, "k"])
async def test_a_lease_ends_once_and_without_an_error(
    here: Line, fault: Fault, key: str | None, kinds: list[str]
) -> None:
    jobs = [here.job(key=key and f"{key}{n}") for n in range(len(kinds))]
    await here.enqueue(*jobs)
    held = await here.claim(len(kinds))
    settlements = [ENDS[kind][0](job) for kind, job in zip(kinds, held, strict=True)]
    answers = await asked_twice(here, "settle", fault, here.near.settle(settlements, now=here.now))
    assert answers == [None] * len(kinds)
    for kind, job in zip(kinds, held, strict=True):
        _, state, outcome = ENDS[kind]
        stored = await here.get(job.id)
        assert (stored.state, stored.fence, stored.stalls) == (state, 1, 0)
        assert [row.outcome for row in await here.log(job.id)] == [outcome]
    assert sum((await here.counts()).values()) == len(kinds)


async def test_a_settlement_that_failed_may_be_repeated(here: Line, fault: Fault) -> None:
    acks = [ack(job) for job in await here.claimed(20)]
    await asked_in_vain(here, "settle", fault, here.near.settle(acks, now=here.now))
    assert await here.near.settle(acks, now=here.now + SECOND) == [None] * 20
    for one in acks:
        assert [row.outcome for row in await here.log(one.job_id)] == [Outcome.DONE]
    assert await here.counts() == {JobState.DONE: 20}


async def test_a_heartbeat_holds(here: Line, fault: Fault) -> None:
    (job,) = await here.claimed(1)
    here.now += SECOND
    beat = here.near.extend_lease([Extension(job.id, token(job), b"half")], lease_for=LEASE, now=here.now)
    answers = await asked_twice(here, "extend", fault, beat)
    assert answers == [Lease(job.id, token(job), here.now + LEASE)]
    stored = await here.get(job.id)
    assert (stored.expires_at_us, stored.progress) == (here.now + LEASE, b"half")


# -- deaths and the failure queue -------------------------------------------------------------------------


async def doomed(here: Line, count: int, **fields: Any) -> list[JobRecord]:
    """Jobs whose deaths are told to a failure queue."""
    await here.driver.configure("q", QueueSettings(failure_queue="failed"), now=here.now)
    return await here.claimed(count, **fields)


@pytest.mark.parametrize("step", [runs("settle"), b"LRANGE", b"LREM"])
async def test_a_death_is_told_once_whatever_step_fails(here: Line, fault: Fault, step: bytes) -> None:
    fails = [fail(job) for job in await doomed(here, 3)]
    here.proxy.on_request(step, then=fault)
    assert await here.near.settle(fails, now=here.now) == [None] * 3
    await here.reserve()
    assert await here.counts("failed") == {JobState.READY: 3}


async def test_a_death_that_its_teller_did_not_survive_is_told_by_the_next(here: Line, fault: Fault) -> None:
    fails = [fail(job) for job in await doomed(here, 2)]
    await asked_in_vain(here, "settle", fault, here.near.settle(fails, now=here.now))
    await here.reserve()
    assert await here.counts("failed") == ({JobState.READY: 2} if fault == "lose_answer" else {})
    assert await here.near.settle(fails, now=here.now) == [None] * 2
    assert await here.counts("failed") == {JobState.READY: 2}


async def test_deaths_that_a_reclaim_and_its_repetition_cause_are_each_told(here: Line, fault: Fault) -> None:
    """The first try ends one lease and its answer is lost; the second ends the other."""
    await doomed(here, 2, max_attempts=1)
    here.now += LEASE
    await asked_twice(here, "reclaim", fault, here.near.reclaim(now=here.now, queue="q", limit=1))
    left = 0 if fault == "lose_answer" else 1
    assert await here.near.reclaim(now=here.now, queue="q") == left
    assert await here.counts() == {JobState.DEAD: 2}
    assert await here.counts("failed") == {JobState.READY: 2}


# -- operating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_cancel_happens_once(here: Line, fault: Fault, is_running: bool) -> None:
    (job_id,) = await here.enqueue(here.job())
    if is_running:
        await here.claim()
    answers = await asked_twice(here, "cancel", fault, here.near.cancel([job_id], now=here.now))
    assert answers == [JobState.INFLIGHT if is_running else JobState.CANCELLED]
    stored = await here.get(job_id)
    assert (stored.state, stored.cancel_requested) == (answers[0], is_running)
    assert len(await here.log(job_id)) == (0 if is_running else 1)


@pytest.mark.parametrize("only_waiting", [False, True])
async def test_a_cancel_by_key_happens_once_and_says_so(here: Line, fault: Fault, only_waiting: bool) -> None:
    (held,) = await here.claimed(1, key="k")
    ids = await here.enqueue(here.job(key="k"), here.job(key="l"))
    cancelling = here.near.cancel_keys(
        ["k", "l", "l", "m"], queue="q", now=here.now, only_waiting=only_waiting
    )
    assert await asked_twice(here, "cancel_keys", fault, cancelling) == [1 if only_waiting else 2, 1, 0, 0]
    assert (await here.get(held.id)).cancel_requested is not only_waiting
    for job_id in ids:
        assert [row.outcome for row in await here.log(job_id)] == [Outcome.CANCELLED]


@pytest.mark.parametrize("delay", [None, 0, SECOND])
@pytest.mark.parametrize("keep_counts", [False, True])
async def test_a_requeue_happens_once_and_says_so(
    here: Line, fault: Fault, delay: int | None, keep_counts: bool
) -> None:
    (job,) = await here.claimed(1)
    await here.settle(fail(job))
    (other,) = await here.enqueue(here.job())
    run_at = None if delay is None else here.now + delay
    again = here.near.requeue([job.id, other], now=here.now, run_at_us=run_at, keep_counts=keep_counts)
    answers = await asked_twice(here, "requeue", fault, again)
    stored = await here.get(job.id)
    assert (stored.state, stored.attempts) == (
        JobState.SCHEDULED if delay else JobState.READY,
        int(keep_counts),
    )
    assert [row.outcome for row in await here.log(job.id)] == [Outcome.DEAD, Outcome.REQUEUED]
    assert (answers[0], type(answers[1])) == (stored.state, JobNotDead)


# -- a first try that comes late --------------------------------------------------------------------------
# What a client wrote into a connection that broke may lie in a buffer somewhere, and reach the server after its repetition.


@pytest.fixture
def arrives_late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Sends the first request that ran a function once more."""
    sent: list[bytes] = []
    ask = SharedConnection.ask

    def asking(connection: SharedConnection, packed: bytes, count: int) -> Coroutine[Any, Any, list[Any]]:
        sent.append(packed)
        return ask(connection, packed, count)

    def arrive(here: Line, function: str) -> None:
        server = urlsplit(here.server.url)
        with socket.create_connection((server.hostname, server.port)) as late:
            late.sendall(next(packed for packed in sent if runs(function) in packed))
            assert late.recv(1 << 16)

    monkeypatch.setattr(SharedConnection, "ask", asking)
    return arrive


@pytest.mark.parametrize("fields", [{}, {"key": "k"}, {"idempotency_key": "i"}])
@pytest.mark.parametrize("new_ids", [False, True])
async def test_an_enqueue_that_arrives_after_its_repetition_stores_nothing(
    here: Line, fault: Fault, fields: dict[str, str], new_ids: bool, arrives_late: Late
) -> None:
    enqueuing = here.near.enqueue([here.job(**fields)], now=here.now, new_ids=new_ids)
    await asked_twice(here, "enqueue", fault, enqueuing)
    await here.settle(*map(ack, await here.claim()))
    arrives_late(here, "enqueue")
    assert await here.counts() == {JobState.DONE: 1}


async def test_a_reserve_that_comes_late_leases_nothing(here: Line, fault: Fault, arrives_late: Late) -> None:
    await here.enqueue(*here.jobs(9))
    assert len(await asked_twice(here, "reserve", fault, here.claim(3))) == 3
    arrives_late(here, "reserve")
    assert await here.counts() == {JobState.READY: 6, JobState.INFLIGHT: 3}


async def test_a_cancel_by_key_that_comes_late_spares_newer_jobs(
    here: Line, fault: Fault, arrives_late: Late
) -> None:
    await here.enqueue(here.job(key="k"))
    cancelling = here.near.cancel_keys(["k"], queue="q", now=here.now)
    assert await asked_twice(here, "cancel_keys", fault, cancelling) == [1]
    await here.enqueue(here.job(key="k"))
    arrives_late(here, "cancel_keys")
    assert await here.counts() == {JobState.READY: 1, JobState.CANCELLED: 1}


async def test_settings_that_come_late_are_void(here: Line, fault: Fault, arrives_late: Late) -> None:
    pausing = here.near.configure("q", QueueSettings(paused=True), now=here.now, fields=["paused"])
    await asked_twice(here, "configure", fault, pausing)
    assert (await here.driver.settings("q")).paused
    await here.driver.configure("q", QueueSettings(max_inflight=2), now=here.now)
    arrives_late(here, "configure")
    assert await here.driver.settings("q") == QueueSettings(max_inflight=2)


async def test_a_settlement_that_comes_late_is_void(here: Line, fault: Fault, arrives_late: Late) -> None:
    (job,) = await here.claimed(1)
    retry = RetryAt(job.id, token(job), here.now, 1, BOOM)
    await asked_twice(here, "settle", fault, here.near.settle([retry], now=here.now))
    (again,) = await here.claim()
    arrives_late(here, "settle")
    stored = await here.get(job.id)
    assert (stored.state, stored.fence, stored.token) == (JobState.INFLIGHT, 2, again.token)
    assert len(await here.log(job.id)) == 1
