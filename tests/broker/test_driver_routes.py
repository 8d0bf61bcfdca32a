"""The driver protocol, server side: calls that a broker does not believe, and answers that may not have arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.broker_client import Direct
from records import NOW, make_record, present
from taskharbor.broker import idempotency
from taskharbor.broker.idempotency import MOST_HEARD, Replays
from taskharbor.broker.tokens import parse_token
from taskharbor.clock import FakeClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Ack, Enqueued
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable
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
    answer = await direct.call("reclaim", wire.encode(op.Reclaim(clock.now() + 61 * SECOND)))
    assert answer.refusal == (422, "clock_skew")


# -- answers that may not have arrived -----------------------------------------------------------------------------


async def test_a_reserve_of_the_same_name_gives_the_same_jobs_whoever_else_asks() -> None:
    direct = Direct(tokens=tuple(parse_token(f"{name}:work:{name * 16}") for name in "ab"))
    await direct.driver.enqueue([make_record() for _ in range(4)], now=NOW)
    first, again, others = [
        await reserve(direct, "one", 2, Authorization=f"Bearer {name * 16}") for name in "aab"
    ]
    assert first == again
    assert {job.id for job in others}.isdisjoint(job.id for job in first)


async def test_a_call_that_is_still_under_way_is_waited_for_and_not_made_twice() -> None:
    class Slow(MemoryDriver):
        began, go_on = asyncio.Event(), asyncio.Event()
        count = 0

        async def run(self, call: op.Operation[Any]) -> Any:
            if isinstance(call, op.Reserve):
                self.count += 1
                self.began.set()
                await self.go_on.wait()
            return await super().run(call)

    driver = Slow()
    direct = Direct(driver)
    await driver.enqueue([make_record(), make_record()], now=NOW)
    tries = [asyncio.ensure_future(reserve(direct, "one")) for _ in range(3)]
    await driver.began.wait()
    driver.go_on.set()
    first, *others = await asyncio.gather(*tries)
    assert others == [first, first]
    assert driver.count == 1


async def test_an_error_is_not_remembered() -> None:
    class Away(MemoryDriver):
        is_away = True

        async def run(self, call: op.Operation[Any]) -> Any:
            if self.is_away and isinstance(call, op.Reserve):
                raise BackendUnavailable("away")
            return await super().run(call)

    driver = Away()
    direct = Direct(driver)
    await driver.enqueue([make_record()], now=NOW)
    call = wire.encode(op.Reserve("q", 1, SECOND, NOW, "w"))
    answer = await direct.call("reserve", call, TaskHarbor_Request="one")
    assert answer.refusal == (503, "backend_unavailable")
    driver.is_away = False
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
    reclaim = wire.encode(op.Reclaim(NOW))
    for name, complaint in (
        ("one", "used for reserve already"),
        ("", "1 to 64 characters"),
        ("x" * 65, "1 to 64 characters"),
    ):
        answer = await direct.call("reclaim", reclaim, TaskHarbor_Request=name)
        assert answer.refusal == (422, "invalid_request")
        assert complaint in answer.body["detail"]
    too_many = " ".join(["x"] * (MOST_HEARD + 1))
    assert (await direct.call("reclaim", reclaim, TaskHarbor_Heard=too_many)).status == 422


async def test_an_answer_that_was_heard_is_forgotten() -> None:
    direct = Direct()
    await direct.driver.enqueue([make_record() for _ in range(3)], now=NOW)
    first = await reserve(direct, "one")
    await reserve(direct, "two", TaskHarbor_Heard="zero one")
    assert await reserve(direct, "one") != first


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


async def test_whoever_waits_for_a_call_that_was_given_up_is_told_so() -> None:
    kept = Replays()
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    first, second = [asyncio.ensure_future(kept.once(("c", "x"), "op", never)) for _ in range(2)]
    await begun.wait()
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(BackendUnavailable):
        await second
