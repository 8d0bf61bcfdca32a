"""The driver protocol, server side: what a client may send, what it is told, and what the broker remembers of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from broker.broker_loops import on_a_loop
from taskharbor.broker.calls import DriverCalls, driver_paths
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.problems import Problem
from taskharbor.broker.replays import MOST_HEARD, Name, Replays
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import EVERYBODY
from taskharbor.clock import Clock, FakeClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Driver,
    Enqueued,
    Extension,
    Fail,
    QueueSettings,
    Release,
    Retry,
    Settlement,
)
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobFinished, JobNotFound, LeaseMismatch
from taskharbor.jobs import LATEST, SECOND, Failure, JobRecord, JobState, Micros
from taskharbor.requests import new_ids

NOW: Micros = 1_800_000_000 * SECOND
BOOM = Failure("Boom", "")


def record(**fields: Any) -> JobRecord:
    return JobRecord(
        **{"id": new_ids(1)[0], "type": "t", "queue": "q", "run_at_us": NOW, "created_at_us": NOW, **fields}
    )


class Desk:
    """A client that says exactly what a test wants, to the calls of a broker over memory."""

    def __init__(self, driver: Driver | None = None, *, clock: Clock | None = None, **config: Any) -> None:
        self.driver = driver or MemoryDriver()
        settings = BrokerConfig(**{"trust_client_time": clock is None, **config})
        self.calls = DriverCalls(Service(self.driver, settings, clock=clock))

    async def ask(
        self,
        operation: type[op.Operation[Any]],
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
            "taskharbor.caller": msgspec.structs.replace(EVERYBODY, name=caller),
        }
        response = await self.calls.answer(operation, Request(scope, receive))
        return bytes(response.body)

    async def reserve(self, limit: int = 1, *, now: Micros = NOW, **options: Any) -> list[JobRecord]:
        call = op.Reserve("q", limit, 60 * SECOND, now, "w")
        return wire.read_answer(op.Reserve, await self.ask(op.Reserve, call, **options))


def test_every_operation_of_the_contract_is_there_and_has_a_scope() -> None:
    """Those of one job are made of the others, as is the wait that claims; and what concerns a handle alone stays with it."""
    methods = {
        name
        for name, method in vars(Driver).items()
        if callable(method) and not name.startswith("_") and asyncio.iscoroutinefunction(method)
    }
    alone = {"open", "close", "migrate", "ack", "retry", "fail", "release", "discard", "reserve_next"}
    alone |= {"run", "open_to_read", "swap_blob"}
    assert set(op.OPERATIONS) == (methods - alone) | {"hello"}
    places = driver_paths(Service(MemoryDriver()))
    assert {place.path: place.scope for place in places} == {
        f"/v1/driver/{name}": call.scope for name, call in op.OPERATIONS.items()
    }


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
    assert await desk.ask(op.Enqueue, body, kind="application/json; charset=utf-8") == (
        b'[{"id":"a","existed":false},{"id":"a","existed":true}]'
    )
    body = msgspec.json.encode({"queue": "q", "limit": 1, "lease_for": SECOND, "now": NOW, "worker": "w"})
    (job,) = msgspec.json.decode(
        await desk.ask(op.Reserve, body, kind="application/json"), type=list[JobRecord]
    )
    assert job.payload == b'{"x":1}'
    body = msgspec.json.encode(
        {"settlements": [{"type": "ack", "job_id": "a", "token": job.token}], "now": NOW}
    )
    assert await desk.ask(op.Settle, body, kind="application/json") == b"[null]"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"{}", b"\x93\x01\x02\x03", b"\xff" * 100])
@pytest.mark.parametrize("operation", [op.Enqueue, op.Reserve, op.Settle, op.Wait, op.Configure])
@on_a_loop
async def test_what_is_no_call_is_refused(operation: type[op.Operation[Any]], body: bytes) -> None:
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
        {"queue": ""},
        {"queue": " "},
        {"queue": "a\0"},
        {"type": 5},
        {"headers": {"a": 1}},
        {"headers": {"\0": ""}},
        {"backoff_min_us": "x"},
        {"payload": None},
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
    with pytest.raises((InvalidRequest, Problem)):
        await desk.ask(op.Enqueue, op.Enqueue([record(), record(**fields)], NOW))
    assert await desk.driver.stats(now=NOW) == []


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        (op.Reserve, op.Reserve("q", -1, SECOND, NOW, "w")),
        (op.Reserve, op.Reserve("q", 1, -1, NOW, "w")),
        (op.Reserve, op.Reserve("q", 1, 2**60, NOW, "w")),
        (op.Reserve, op.Reserve("q", 1, SECOND, 2**60, "w")),
        (op.Reserve, op.Reserve("q", 1, LATEST, NOW, "w")),
        (op.ExtendLease, op.ExtendLease([Extension("a", "t")], LATEST, NOW)),
        (op.Reserve, op.Reserve("q" * 300, 1, SECOND, NOW, "w")),
        (op.Settle, op.Settle([Fail("a", "t", -1, BOOM)], NOW)),
        (op.Settle, op.Settle([Retry("a", "t", 2**60, 1, BOOM)], NOW)),
        (op.Settle, op.Settle([Release("a", "t", 2**60)], NOW)),
        (
            op.Settle,
            op.Settle([Fail("a", "t", 1, Failure("x" * 70_000, ""))], NOW),
        ),
        (op.Configure, op.Configure("q", QueueSettings(max_inflight=-1), NOW)),
        (op.Configure, op.Configure("q", QueueSettings(keep_done_us=-1), NOW)),
        (op.Configure, op.Configure("q", QueueSettings(failure_queue="x" * 300), NOW)),
        (op.Wait, op.Wait(["q" * 300], NOW, 0)),
    ],
)
@on_a_loop
async def test_numbers_and_names_that_no_store_could_keep_are_refused(
    operation: type[op.Operation[Any]], call: Any
) -> None:
    desk = Desk()
    with pytest.raises((InvalidRequest, Problem)):
        await desk.ask(operation, call)
    assert await desk.driver.stats(now=NOW) == []


# -- what a client says and a broker does not believe -----------------------------------------------------------


@pytest.mark.parametrize("queue", ["q", "other"])
@on_a_loop
async def test_an_id_of_another_producers_job_is_not_stored_twice_though_it_is_said_to_be_new(
    queue: str,
) -> None:
    """An object store would not look for it in other queues."""
    async with connect(f"mem://{new_ids(1)[0]}") as driver:
        desk = Desk(driver)
        await driver.enqueue([record(id="a")], now=NOW)
        forged = op.Enqueue([record(id="a", queue=queue, payload=b"forged")], NOW, new_ids=True)
        told = wire.read_answer(op.Enqueue, await desk.ask(op.Enqueue, forged))
        assert told == [Enqueued("a", True)]
        counts = [stats.counts[JobState.READY] for stats in await driver.stats(now=NOW)]
        assert sum(counts) == 1
        (kept,) = await driver.get(["a"], now=NOW)
        assert kept is not None
        assert (kept.queue, kept.payload) == ("q", b"")


@on_a_loop
async def test_a_client_whose_clock_is_ahead_ends_no_lease_of_others() -> None:
    clock = FakeClock()
    now = clock.now()
    ahead = now + 59 * SECOND
    desk = Desk(clock=clock)
    await desk.driver.enqueue([record(run_at_us=now)], now=now)
    (job,) = await desk.driver.reserve("q", limit=1, lease_for=10 * SECOND, now=now, worker="w")
    assert wire.read_answer(op.Reclaim, await desk.ask(op.Reclaim, op.Reclaim(ahead))) == 0
    assert await desk.reserve(now=ahead) == []
    assert await desk.driver.settle([Ack(job.id, job.token or "")], now=now) == [None]


@on_a_loop
async def test_a_lease_is_measured_by_the_brokers_clock_where_the_clients_is_ahead() -> None:
    clock = FakeClock()
    now = clock.now()
    ahead = now + 59 * SECOND
    desk = Desk(clock=clock)
    await desk.driver.enqueue([record(run_at_us=now)], now=now)
    (job,) = await desk.reserve(now=ahead, name="one")
    assert job.expires_at_us == now + 60 * SECOND
    clock.advance(10)
    assert await desk.reserve(now=ahead + 10 * SECOND, name="one") == [job]


@on_a_loop
async def test_one_call_asks_for_a_job_once() -> None:
    """Else a large job and a short call make an answer of any size."""
    desk = Desk()
    with pytest.raises(InvalidRequest, match="twice"):
        await desk.ask(op.Get, op.Get(["a", "b", "a"], NOW))
    assert wire.read_answer(op.Get, await desk.ask(op.Get, op.Get(["a", "b"], NOW))) == [None, None]


# -- on the wire ------------------------------------------------------------------------------------------------


def test_settlements_of_several_kinds_keep_their_order() -> None:
    batch = [
        Ack("a", "t"),
        Fail("b", "t", 1, BOOM),
        Ack("c", "t", b"x"),
        Release("d", "t"),
        Discard("e", "t"),
        Retry("f", "t", NOW, 1, BOOM),
    ]
    call = op.Settle(batch, NOW)
    assert wire.READ_CALL["settle"](wire.encode(call)) == call
    assert wire.READ_CALL_JSON["settle"](wire.encode_json(call)) == call


@on_a_loop
async def test_errors_stand_in_the_places_of_their_items() -> None:
    desk = Desk()
    await desk.driver.enqueue([record(id="a")], now=NOW)
    (job,) = await desk.reserve()
    batch: list[Settlement] = [Ack("nobody", "t"), Ack("a", "wrong"), Ack("a", job.token or "")]
    told = wire.read_answer(op.Settle, await desk.ask(op.Settle, op.Settle(batch, NOW)))
    assert [type(one) for one in told] == [JobNotFound, LeaseMismatch, type(None)]
    assert (told[0].job_id, told[0].detail) == ("nobody", "")
    told = wire.read_answer(op.Cancel, await desk.ask(op.Cancel, op.Cancel(["nobody", "a"], NOW)))
    assert [type(one) for one in told] == [JobNotFound, JobFinished]
    beats = op.ExtendLease([Extension("nobody", "t")], SECOND, NOW)
    told = wire.read_answer(op.ExtendLease, await desk.ask(op.ExtendLease, beats))
    assert [type(one) for one in told] == [JobNotFound]


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

        async def run(self, call: op.Operation[Any]) -> Any:
            if isinstance(call, op.Reserve):
                self.count += 1
                self.began.set()
                await self.go_on.wait()
            return await super().run(call)

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

        async def run(self, call: op.Operation[Any]) -> Any:
            if self.is_away and isinstance(call, op.Reserve):
                raise BackendUnavailable("away")
            return await super().run(call)

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
        await desk.ask(op.Reclaim, op.Reclaim(NOW), name="one")
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
