"""The driver protocol, server side: what a client may send, what it is told, and what the broker remembers of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from broker_loops import on_a_loop

from taskharbor.broker.calls import SCOPES, DriverCalls
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.replays import MOST_HEARD, Name, Replays
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import EVERYBODY
from taskharbor.drivers.contract import Ack, Discard, Driver, Fail, QueueSettings, Release, Retry
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.http.settlements import Settlements
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.ids import new_ids
from taskharbor.jobs import SECOND, Failure, JobRecord, Micros

NOW: Micros = 1_800_000_000 * SECOND
BOOM = Failure("Boom", "")


def record(**fields: Any) -> JobRecord:
    return JobRecord(
        **{"id": new_ids(1)[0], "type": "t", "queue": "q", "run_at_us": NOW, "created_at_us": NOW, **fields}
    )


class Desk:
    """A client that says exactly what a test wants, to the calls of a broker over memory."""

    def __init__(self, driver: Driver | None = None, **config: Any) -> None:
        self.driver = driver or MemoryDriver()
        self.calls = DriverCalls(Service(self.driver, BrokerConfig(**{"trust_client_time": True, **config})))

    async def ask(
        self,
        operation: wire.Operation[Any, Any],
        call: Any,
        *,
        name: str | None = None,
        heard: str | None = None,
        kind: str = wire.MSGPACK,
        caller: str = "everybody",
    ) -> Any:
        from starlette.requests import Request

        body = call if isinstance(call, bytes) else wire.encode(call)
        headers = [(b"content-type", kind.encode())]
        headers += [(wire.REQUEST_ID.lower().encode(), name.encode())] if name is not None else []
        headers += [(wire.HEARD.lower().encode(), heard.encode())] if heard is not None else []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http",
            "method": "POST",
            "headers": headers,
            "path_params": {"operation": operation.name},
            "taskharbor.caller": msgspec.structs.replace(EVERYBODY, name=caller),
        }
        response = await self.calls.answer(Request(scope, receive))
        return bytes(response.body)

    async def reserve(self, limit: int = 1, *, now: Micros = NOW, **options: Any) -> list[JobRecord]:
        call = wire.ReserveCall("q", limit, 60 * SECOND, now, "w")
        return wire.RESERVE.read_answer(await self.ask(wire.RESERVE, call, **options))


def test_every_operation_of_the_contract_is_there_and_has_a_scope() -> None:
    """Those of one job are made of the others, as is the wait that claims; and what concerns a handle alone stays with it."""
    methods = {
        name
        for name, method in vars(Driver).items()
        if callable(method) and not name.startswith("_") and asyncio.iscoroutinefunction(method)
    }
    alone = {"open", "close", "migrate", "ack", "retry", "fail", "release", "discard", "reserve_next"}
    assert set(SCOPES) == (methods - alone) | {"hello"}
    assert set(Desk().calls._carried_out) == set(SCOPES)


@on_a_loop
async def test_json_is_understood_and_answered_in_json() -> None:
    desk = Desk()
    given = {
        "id": "a",
        "type": "t",
        "queue": "q",
        "payload": "eyJ4IjoxfQ==",
        "run_at_us": NOW,
        "created_at_us": NOW,
    }
    body = msgspec.json.encode({"records": [given, given], "now": NOW})
    assert await desk.ask(wire.ENQUEUE, body, kind="application/json; charset=utf-8") == b'{"ids":{"1":"a"}}'
    body = msgspec.json.encode({"queue": "q", "limit": 1, "lease_for": SECOND, "now": NOW, "worker": "w"})
    (job,) = msgspec.json.decode(
        await desk.ask(wire.RESERVE, body, kind="application/json"), type=list[JobRecord]
    )
    assert job.payload == b'{"x":1}'
    body = msgspec.json.encode({"settlements": {"acks": [{"job_id": "a", "token": job.token}]}, "now": NOW})
    assert await desk.ask(wire.SETTLE, body, kind="application/json") == b'{"errors":{}}'


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"{}", b"\x93\x01\x02\x03", b"\xff" * 100])
@pytest.mark.parametrize("operation", [wire.ENQUEUE, wire.RESERVE, wire.SETTLE, wire.WAIT, wire.CONFIGURE])
@on_a_loop
async def test_what_is_no_call_is_refused(operation: wire.Operation[Any, Any], body: bytes) -> None:
    from taskharbor.broker.problems import Problem

    with pytest.raises(Problem) as told:
        await Desk().ask(operation, body)
    assert (told.value.status, told.value.code) == (422, "invalid_request")
    with pytest.raises(Problem) as told:
        await Desk().ask(operation, body, kind="text/plain")
    assert told.value.status == 415


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"id": "x" * 201},
        {"queue": "x" * 201},
        {"type": "x" * 201},
        {"key": "x" * 201},
        {"idempotency_key": "x" * 201},
        {"priority": 40_000},
        {"run_at_us": 2**60},
        {"created_at_us": -(2**60)},
        {"max_attempts": -1},
        {"max_stalls": 2**40},
        {"timeout_us": -1},
        {"backoff_max_us": 2**60},
        {"headers": {"x": "y" * 9_000}},
    ],
)
@on_a_loop
async def test_a_job_that_no_core_would_send_is_refused_and_none_of_its_batch_is_stored(
    fields: dict[str, Any],
) -> None:
    desk = Desk()
    with pytest.raises(InvalidRequest):
        await desk.ask(wire.ENQUEUE, wire.EnqueueCall([record(), record(**fields)], NOW))
    assert await desk.driver.stats(now=NOW) == []


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        (wire.RESERVE, wire.ReserveCall("q", -1, SECOND, NOW, "w")),
        (wire.RESERVE, wire.ReserveCall("q", 1, -1, NOW, "w")),
        (wire.RESERVE, wire.ReserveCall("q", 1, 2**60, NOW, "w")),
        (wire.RESERVE, wire.ReserveCall("q", 1, SECOND, 2**60, "w")),
        (wire.RESERVE, wire.ReserveCall("q" * 300, 1, SECOND, NOW, "w")),
        (wire.SETTLE, wire.SettleCall(Settlements(fails=[Fail("a", "t", -1, BOOM)]), NOW)),
        (wire.SETTLE, wire.SettleCall(Settlements(retries=[Retry("a", "t", 2**60, 1, BOOM)]), NOW)),
        (wire.SETTLE, wire.SettleCall(Settlements(releases=[Release("a", "t", 2**60)]), NOW)),
        (
            wire.SETTLE,
            wire.SettleCall(Settlements(fails=[Fail("a", "t", 1, Failure("x" * 70_000, ""))]), NOW),
        ),
        (wire.CONFIGURE, wire.ConfigureCall("q", QueueSettings(max_inflight=-1), NOW)),
        (wire.CONFIGURE, wire.ConfigureCall("q", QueueSettings(keep_done_us=-1), NOW)),
        (wire.CONFIGURE, wire.ConfigureCall("q", QueueSettings(failure_queue="x" * 300), NOW)),
        (wire.WAIT, wire.WaitCall(["q" * 300], NOW, 0)),
    ],
)
@on_a_loop
async def test_numbers_and_names_that_no_store_could_keep_are_refused(
    operation: wire.Operation[Any, Any], call: Any
) -> None:
    from taskharbor.broker.problems import Problem

    desk = Desk()
    with pytest.raises((InvalidRequest, Problem)):
        await desk.ask(operation, call)
    assert await desk.driver.stats(now=NOW) == []


# -- settlements ------------------------------------------------------------------------------------------------


def test_settlements_of_several_kinds_keep_their_order() -> None:
    batch = [
        Ack("a", "t"),
        Fail("b", "t", 1, BOOM),
        Ack("c", "t", b"x"),
        Release("d", "t"),
        Discard("e", "t"),
        Retry("f", "t", NOW, 1, BOOM),
    ]
    told = msgspec.msgpack.decode(wire.encode(Settlements.of(batch)), type=Settlements)
    assert told.order == "afalxr"
    assert told.batch() == batch
    alike = [Release("a", "t"), Release("b", "t", NOW)]
    assert Settlements.of(alike).order == ""
    assert Settlements.of(alike).batch() == alike
    assert Settlements.of([]).batch() == []


@pytest.mark.parametrize("order", ["", "a", "aaf", "aff", "az", "f"])
def test_an_order_that_does_not_fit_is_refused(order: str) -> None:
    told = Settlements(order=order, acks=[Ack("a", "t")], fails=[Fail("b", "t", 1, BOOM)])
    with pytest.raises(InvalidRequest, match="order"):
        told.batch()


# -- answers that may not have arrived -----------------------------------------------------------------------------


@on_a_loop
async def test_a_reserve_of_the_same_name_gives_the_same_jobs_whoever_else_asks() -> None:
    desk = Desk()
    await desk.driver.enqueue([record() for _ in range(4)], now=NOW)
    first = await desk.reserve(2, name="one")
    assert await desk.reserve(2, name="one") == first
    others = await desk.reserve(2, name="one", caller="somebody else")
    assert {job.id for job in others}.isdisjoint(job.id for job in first)


@on_a_loop
async def test_a_call_that_is_still_under_way_is_waited_for_and_not_made_twice() -> None:
    class Slow(MemoryDriver):
        began, go_on = asyncio.Event(), asyncio.Event()
        count = 0

        async def reserve(self, queue: str, **options: Any) -> list[JobRecord]:
            self.count += 1
            self.began.set()
            await self.go_on.wait()
            return await super().reserve(queue, **options)

    driver = Slow()
    desk = Desk(driver)
    await driver.enqueue([record(), record()], now=NOW)
    tries = [asyncio.ensure_future(desk.reserve(name="one")) for _ in range(3)]
    await driver.began.wait()
    driver.go_on.set()
    first, *others = await asyncio.gather(*tries)
    assert others == [first, first]
    assert driver.count == 1


@on_a_loop
async def test_an_error_is_not_remembered() -> None:
    class Away(MemoryDriver):
        is_away = True

        async def reserve(self, queue: str, **options: Any) -> list[JobRecord]:
            if self.is_away:
                raise BackendUnavailable("away")
            return await super().reserve(queue, **options)

    driver = Away()
    desk = Desk(driver)
    await driver.enqueue([record()], now=NOW)
    with pytest.raises(BackendUnavailable):
        await desk.reserve(name="one")
    driver.is_away = False
    assert len(await desk.reserve(name="one")) == 1


@on_a_loop
async def test_a_claim_for_no_job_undoes_the_one_of_that_name_also_where_it_comes_first() -> None:
    desk = Desk()
    await desk.driver.enqueue([record()], now=NOW)
    assert len(await desk.reserve(name="one")) == 1
    assert await desk.reserve(0, name="one") == []
    assert await desk.reserve(0, name="two") == []
    assert await desk.reserve(name="two") == []  # It was on its way for longer than the one that undid it.
    assert len(await desk.reserve(name="three")) == 1


@on_a_loop
async def test_a_name_belongs_to_one_kind_of_call() -> None:
    desk = Desk()
    await desk.reserve(name="one")
    with pytest.raises(InvalidRequest, match="used for reserve already"):
        await desk.ask(wire.RECLAIM, wire.ReclaimCall(NOW), name="one")
    for wrong in ("", "x" * 65):
        with pytest.raises(InvalidRequest, match="characters"):
            await desk.reserve(name=wrong)
    with pytest.raises(InvalidRequest, match="heard"):
        await desk.reserve(name="two", heard=" ".join(["x"] * (MOST_HEARD + 1)))


@on_a_loop
async def test_what_was_heard_is_forgotten() -> None:
    desk = Desk()
    for n in range(50):
        await desk.reserve(name=str(n), heard=None if n == 0 else str(n - 1))
    assert len(desk.calls.replays) == 1


@on_a_loop
async def test_what_is_remembered_is_bounded_in_time_and_bytes() -> None:
    now = 0.0
    replays = Replays(keep_seconds=60, max_bytes=100, time=lambda: now)

    async def keep(name: str, size: int) -> None:
        await replays.once(Name("c", name), "op", answer)
        replays.weigh(Name("c", name), size)

    async def answer() -> str:
        return "x"

    async def is_kept(name: str) -> bool:
        return (await replays.once(Name("c", name), "op", answer)).is_repeated

    await keep("a", 40)
    await keep("b", 40)
    await keep("c", 40)
    assert len(replays) == 2
    assert await is_kept("b")
    now = 61.0
    await keep("d", 1)
    assert len(replays) == 1
    assert not await is_kept("b")


@on_a_loop
async def test_whoever_waits_for_a_call_that_was_given_up_is_told_so() -> None:
    replays = Replays()
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    first = asyncio.ensure_future(replays.once(Name("c", "x"), "op", never))
    await begun.wait()
    second = asyncio.ensure_future(replays.once(Name("c", "x"), "op", never))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(BackendUnavailable):
        await second
    assert len(replays) == 0
