"""The driver protocol, server side: calls that a broker does not believe, and answers that may not have arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.broker_client import Direct, Unwell
from records import NOW, make_record, present
from taskharbor.broker import idempotency
from taskharbor.broker.idempotency import MOST_HEARD, Replays
from taskharbor.broker.tokens import parse_token
from taskharbor.clock import FakeClock
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Ack, Enqueued, Extension
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, LeaseExpired
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros
from taskharbor.requests import new_id


async def reserve(
    direct: Direct, name: str = "", limit: int = 1, *, now: Micros = NOW, **headers: str
) -> list[JobRecord]:
    """A claim, under a name of its own if there is one."""
    if name:
        headers["TaskHarbor_Request"] = name
    jobs: list[JobRecord] = await direct.run(op.Reserve("q", limit, 60 * SECOND, now, "w"), **headers)
    return jobs


# -- what a client says and a broker does not believe -----------------------------------------------------------


@pytest.mark.parametrize("queue", ["q", "other"])
async def test_an_id_of_another_producers_job_is_not_stored_twice_though_it_is_said_to_be_new(
    queue: str,
) -> None:
    """An object store would not look for it in other queues."""
    async with connect(f"mem://{new_id()}") as driver:
        await driver.enqueue([make_record("a")], now=NOW)
        forged = op.Enqueue([make_record("a", queue=queue, payload=b"forged")], NOW, new_ids=True)
        assert await Direct(driver).run(forged) == [Enqueued("a", True)]
        assert sum(stats.counts[JobState.READY] for stats in await driver.stats(now=NOW)) == 1
        kept = present((await driver.get(["a"], now=NOW))[0])
        assert (kept.queue, kept.payload) == ("q", b"")


async def test_a_client_whose_clock_is_ahead_ends_no_lease_of_others_and_gets_none_that_is_longer() -> None:
    clock = FakeClock()
    now = clock.now()
    ahead = now + 59 * SECOND
    direct = Direct(clock=clock)
    await direct.driver.enqueue([make_record(now=now), make_record(now=now)], now=now)
    (job,) = await direct.driver.reserve("q", limit=1, lease_for=10 * SECOND, now=now, worker="w")
    assert await direct.run(op.Reclaim(ahead)) == 0
    (other,) = await reserve(direct, "one", now=ahead)
    assert other.expires_at_us == now + 60 * SECOND
    assert await reserve(direct, now=ahead) == []
    assert await direct.driver.settle([Ack(job.id, present(job.token))], now=now) == [None]
    clock.advance(10)
    assert await reserve(direct, "one", now=ahead + 10 * SECOND) == [other]


async def test_a_client_whose_clock_is_behind_keeps_no_lease_that_is_over() -> None:
    clock = FakeClock()
    now = clock.now()
    behind = now - 40 * SECOND
    direct = Direct(clock=clock)
    await direct.driver.enqueue([make_record(now=now), make_record(now=now)], now=now)
    (job,) = await reserve(direct, now=behind)
    assert (job.reserved_at_us, job.expires_at_us) == (now, now + 60 * SECOND)
    (held,) = await direct.driver.reserve("q", limit=1, lease_for=10 * SECOND, now=now, worker="w")
    clock.advance(10)
    late: list[op.Operation[Any]] = [
        op.ExtendLease([Extension(held.id, present(held.token))], SECOND, behind),
        op.Settle([Ack(held.id, present(held.token))], behind),
    ]
    for call in late:
        (answer,) = await direct.run(call)
        assert isinstance(answer, LeaseExpired)


async def test_a_job_that_is_due_by_its_producers_clock_is_ready_at_once_and_a_later_one_is_not() -> None:
    clock = FakeClock()
    now = clock.now()
    ahead = now + 30 * SECOND
    direct = Direct(clock=clock)
    due = [
        make_record(id, run_at_us=at, now=now) for id, at in (("a", ahead), ("b", ahead + 1), ("c", now - 5))
    ]
    await direct.run(op.Enqueue(due, ahead))
    jobs = [present(job) for job in await direct.driver.get(["a", "b", "c"], now=now)]
    assert [job.run_at_us for job in jobs] == [now, ahead + 1, now - 5]
    assert [job.state for job in jobs] == [JobState.READY, JobState.SCHEDULED, JobState.READY]


async def test_a_clock_that_is_wrong_is_refused() -> None:
    clock = FakeClock()
    direct, now = Direct(clock=clock), clock.now()
    late, early = now + 61 * SECOND, now - 61 * SECOND
    calls = [*map(op.Reclaim, (late, early)), op.Enqueue([make_record(now=now)], late)]
    calls += [op.Reserve("q", 1, SECOND, at, "w") for at in (late, early)]
    for call in calls:
        answer = await direct.call(call.name, wire.encode(call))
        assert answer.refusal == (422, "clock_skew")
    # The last of many jobs is sent long after the first was stamped.
    await direct.run(op.Enqueue([make_record(now=now)], now - 9000 * SECOND))


# -- answers that may not have arrived -----------------------------------------------------------------------------


async def test_a_reserve_of_the_same_name_gives_the_same_jobs_until_the_answer_was_heard() -> None:
    """Whoever else uses that name."""
    direct = Direct(tokens=tuple(parse_token(f"{name}:work:{name * 16}") for name in "ab"))
    callers: list[dict[str, Any]] = [{"Authorization": f"Bearer {name * 16}"} for name in "ab"]
    await direct.driver.enqueue([make_record() for _ in range(6)], now=NOW)
    first, again = [await reserve(direct, "one", 2, **callers[0]) for _ in range(2)]
    others = await reserve(direct, "one", 2, **callers[1])
    assert first == again
    assert {job.id for job in others}.isdisjoint(job.id for job in first)
    await reserve(direct, "two", **callers[0], TaskHarbor_Heard="zero one")
    assert await reserve(direct, "one", 2, **callers[0]) != first


async def test_a_call_that_is_still_under_way_is_waited_for_and_not_made_twice() -> None:
    """If it is given up, whoever waits for it is told so."""
    kept, go_on, made = Replays(), asyncio.Event(), 0

    async def make() -> str:
        nonlocal made
        made += 1
        await go_on.wait()
        return "answer"

    def ask() -> list[asyncio.Task[tuple[str, bool]]]:
        return [asyncio.create_task(kept.once(("c", "x"), "op", make)) for _ in range(3)]

    first, *others = ask()
    await asyncio.sleep(0)
    first.cancel()
    for given_up in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(given_up, BackendUnavailable)
    tries = ask()
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*tries) == [("answer", False), ("answer", True), ("answer", True)]
    assert made == 2


async def test_an_error_is_not_remembered() -> None:
    driver = Unwell(BackendUnavailable("away"), op.Reserve)
    direct = Direct(driver)
    await driver.enqueue([make_record()], now=NOW)
    call = wire.encode(op.Reserve("q", 1, SECOND, NOW, "w"))
    answer = await direct.call("reserve", call, TaskHarbor_Request="one")
    assert answer.refusal == (503, "backend_unavailable")
    driver.error = None
    assert len(await reserve(direct, "one")) == 1


async def test_a_claim_for_no_job_undoes_the_one_of_that_name_also_where_it_comes_first() -> None:
    direct = Direct()
    await direct.driver.enqueue([make_record()], now=NOW)
    assert len(await reserve(direct, "one")) == 1
    assert await reserve(direct, "one", 0) == []
    assert await reserve(direct, "two", 0) == []
    assert await reserve(direct, "two") == []  # It was on its way for longer than the one that undid it.
    assert len(await reserve(direct, "three")) == 1


async def test_a_name_belongs_to_one_kind_of_call() -> None:
    direct = Direct()
    await reserve(direct, "one")
    for headers, complaint in (
        ({"TaskHarbor_Request": "one"}, "used for reserve already"),
        ({"TaskHarbor_Request": ""}, "1 to 64 characters"),
        ({"TaskHarbor_Request": "x" * 65}, "1 to 64 characters"),
        ({"TaskHarbor_Heard": "x " * (MOST_HEARD + 1)}, "at most"),
    ):
        answer = await direct.call("reclaim", wire.encode(op.Reclaim(NOW)), **headers)
        assert answer.refusal == (422, "invalid_request")
        assert complaint in answer.body["detail"]


async def test_what_is_remembered_is_bounded_in_time_bytes_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Replays()

    async def is_kept(name: str, size: int = 40) -> bool:
        _, is_repeated = await kept.once(("c", name), "op", answer)
        kept.weigh(("c", name), size)
        return is_repeated

    async def answer() -> str:
        return "x"

    monkeypatch.setattr(idempotency, "MAX_BYTES", 100)
    assert [await is_kept(name) for name in "abccb"] == [False, False, False, True, True]
    assert not await is_kept("a")
    monkeypatch.setattr(idempotency, "MAX_ANSWERS", 1)
    assert [await is_kept(name, 1) for name in "dede"] == [False] * 4
    monkeypatch.setattr(idempotency, "KEEP_SECONDS", 0)
    assert [await is_kept("f", 1) for _ in range(2)] == [False, False]
