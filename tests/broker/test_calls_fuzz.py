"""Calls of the driver protocol with anything in them: refused or carried out, never a failure of the broker."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Extension,
    Fail,
    JobFilter,
    QueueSettings,
    Release,
    Retry,
    Settlement,
)
from taskharbor.drivers.http import protocol as wire
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, UpdateFlags
from taskharbor.testing.broker import running_broker

SEED = "TASKHARBOR_CALLS_FUZZ_SEED"
ROUNDS = 600
NOW = 1_800_000_000 * SECOND
BOOM = Failure("Boom", "it went wrong", "here")

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"),
    "", "x", "q", "\0", "x" * 300, "\u20ac", "a\nb", b"", b"\xff\x00", [], ["q"], [None], {}, {"x": "y"}, {1: 2},
]  # fmt: skip


def samples() -> list[op.Operation[Any]]:
    job = JobRecord(
        id="a", type="t", queue="q", payload=b"{}", headers={"h": "v"}, run_at_us=NOW, created_at_us=NOW,
        key="k", update=UpdateFlags(), idempotency_key="i",
    )  # fmt: skip
    settlements: list[Settlement] = [
        Ack("a", "t", b"r"),
        Retry("a", "t", NOW, 1, BOOM),
        Fail("a", "t", 1, BOOM),
        Release("a", "t", NOW),
        Discard("a", "t", BOOM),
    ]
    selection = JobFilter(
        queue="q",
        states=frozenset({JobState.DONE}),
        types=frozenset({"t"}),
        key="k",
        worker="w",
        finished_before_us=NOW,
    )
    calls: list[op.Operation[Any]] = [
        op.Hello(),
        op.Time(),
        op.Enqueue([job], NOW, True),
        op.Reserve("q", 5, SECOND, NOW, "w", ["t"]),
        op.ExtendLease([Extension("a", "t", b"p")], SECOND, NOW),
        op.Settle(settlements, NOW),
        op.Reclaim(NOW, "q", 10),
        op.Cancel(["a", "b"], NOW),
        op.Requeue(["a", "b"], NOW),
        op.Purge(selection, 10),
        op.Prune(NOW, 10),
        op.Get(["a", "b"], NOW),
        op.ListJobs(selection, NOW, 10),
        op.Stats(NOW, "q"),
        op.Configure("q", QueueSettings(max_inflight=3, failure_queue="f"), NOW),
        op.Settings("q"),
        op.ReadAttempts(None, 10),
        op.JobAttempts("a"),
        op.Wait(["q"], NOW, 0.0, "s"),
        op.LogStreams(),
        op.ReadLog("0:q", 0, 10, 10),
        op.SplitLog("0:q", 0, 10, 10),
        op.SplitJobs("q", 3),
        op.Remove(["a", "b"]),
        op.PutBlob("staging/w/a", b"x", True, b"x"),
        op.ReadBlobs(["staging/w/a", "staging/w/b"]),
        op.ListBlobs("staging"),
        op.DropBlobs(["staging/w/a"]),
        op.CheckRoom("q", 10),
        op.PublishBlobs("s", 0, 1, ["staging/w/a"], NOW),
    ]
    assert {call.name for call in calls} == op.OPERATIONS.keys()
    return calls


def documents() -> dict[str, Any]:
    return {call.name: msgspec.msgpack.decode(wire.encode(call)) for call in samples()}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, by its path."""
    found = [path]
    if isinstance(value, dict):
        found += [place for key, inner in value.items() for place in places(inner, (*path, key))]
    if isinstance(value, list):
        found += [place for n, inner in enumerate(value) for place in places(inner, (*path, n))]
    return found


def changed(value: Any, path: tuple[Any, ...], dice: random.Random) -> Any:
    if not path:
        return dice.choice(VALUES)
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and isinstance(copy, dict) and dice.random() < 0.1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], dice)
    return copy


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


BAD_NAMES: list[Any] = ["", " ", "\t\n", "\0", "a\0b", "x" * 201, 5, b"q"]
BAD_INSTANTS: list[Any] = [2**53, -(2**53), 2**63, 1.5, "1", True]
NAMED: list[tuple[str, tuple[Any, ...]]] = [
    *(
        ("enqueue", ("records", 0, field))
        for field in ("id", "type", "queue", "codec", "key", "idempotency_key")
    ),
    *(("reserve", (field,)) for field in ("queue", "worker")),
    ("reserve", ("types", 0)),
    ("extend_lease", ("extensions", 0, "job_id")),
    *(("settle", ("settlements", n, "job_id")) for n in range(5)),
    *((name, ("job_ids", 0)) for name in ("get", "cancel", "requeue")),
    *((name, ("queue",)) for name in ("reclaim", "stats", "configure", "settings")),
    ("configure", ("settings", "failure_queue")),
    ("job_attempts", ("job_id",)),
    *(("list_jobs", ("selection", field)) for field in ("queue", "key", "worker")),
    ("purge", ("selection", "types", 0)),
    ("wait", ("queues", 0)),
]
DATED: list[tuple[str, tuple[Any, ...]]] = [
    *((call.name, ("now",)) for call in samples() if hasattr(call, "now")),
    *(("enqueue", ("records", 0, field)) for field in ("run_at_us", "created_at_us")),
    ("settle", ("settlements", 1, "run_at_us")),
    ("settle", ("settlements", 3, "run_at_us")),
    ("purge", ("selection", "finished_before_us")),
]


@pytest.fixture(scope="module")
def memory_broker() -> Iterator[str]:
    with running_broker("memory://", trust_client_time=True) as url:
        yield url


@contextlib.asynccontextmanager
async def broker(store: str) -> AsyncIterator[Callable[[str, bytes], Awaitable[int]]]:
    """Sends a call to a broker; the status of the answer, which is never a failure of the broker."""
    with running_broker(store, trust_client_time=True) as url:
        async with aiohttp.ClientSession(headers={"Content-Type": wire.MSGPACK}) as session:

            async def send(name: str, body: bytes) -> int:
                async with session.post(f"{url}{wire.PATH}{name}", data=body) as response:
                    said = await response.read()
                    assert response.status in (200, 409, 413, 422, 404), (name, body, response.status, said)
                    return response.status

            yield send


def stores(folder: Path) -> list[str]:
    return [f"sqlite:///{folder}/jobs.db", f"file://{folder}/store"]


async def test_no_call_makes_the_broker_fail(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"{SEED}={seed}")
    dice = random.Random(seed)
    shapes = documents()

    async with broker(f"sqlite:///{tmp_path}/jobs.db") as send:
        for _ in range(ROUNDS):
            name = dice.choice(list(shapes))
            document = shapes[name]
            for _ in range(dice.randint(0, 2)):
                if isinstance(document, dict):
                    document = changed(document, dice.choice(places(document)), dice)
            body = msgspec.msgpack.encode(document)
            if dice.random() < 0.1:
                body = body[: dice.randint(0, len(body))] + dice.randbytes(dice.randint(0, 5))
            await send(name, body)
        assert await send("time", wire.encode(op.Time())) == 200


@pytest.mark.parametrize("number", range(2))
async def test_every_value_in_every_place_of_every_call_is_refused_or_carried_out(
    tmp_path: Path, number: int
) -> None:
    """On two kinds of stores, and both serve on as before."""

    async with broker(stores(tmp_path)[number]) as send:
        for name, document in documents().items():
            assert await send(name, msgspec.msgpack.encode(document)) == 200
        for name, document in documents().items():
            for place in places(document):
                for value in VALUES:
                    await send(name, msgspec.msgpack.encode(replaced(document, place, value)))
        for name, document in documents().items():
            assert await send(name, msgspec.msgpack.encode(document)) == 200


@pytest.mark.parametrize(
    ("name", "place", "values"),
    [
        *((name, place, BAD_NAMES) for name, place in NAMED),
        *((name, place, BAD_INSTANTS) for name, place in DATED),
    ],
    ids=str,
)
async def test_what_no_store_could_keep_is_refused(
    name: str, place: tuple[Any, ...], values: list[Any], memory_broker: str
) -> None:
    async with aiohttp.ClientSession(headers={"Content-Type": wire.MSGPACK}) as session:
        for value in values:
            body = msgspec.msgpack.encode(replaced(documents()[name], place, value))
            async with session.post(f"{memory_broker}{wire.PATH}{name}", data=body) as response:
                assert response.status == 422, (value, await response.read())


async def test_a_body_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    depth = 100_000

    async with broker(stores(tmp_path)[0]) as send:
        assert await send("time", b"\x81\xa1x" + b"\x91" * depth + b"\x00") == 422
        assert await send("time", wire.encode(op.Time())) == 200
