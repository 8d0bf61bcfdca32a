"""Calls of the driver protocol with anything in them: refused or carried out, never a failure of the broker."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from taskharbor.broker.calls import SCOPES
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Extension,
    Fail,
    JobFilter,
    QueueSettings,
    Release,
    Retry,
)
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.http.settlements import Settlements
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


def samples() -> dict[str, Any]:
    job = JobRecord(
        id="a", type="t", queue="q", payload=b"{}", headers={"h": "v"}, run_at_us=NOW, created_at_us=NOW,
        key="k", update=UpdateFlags(), idempotency_key="i",
    )  # fmt: skip
    settlements = Settlements.of(
        [
            Ack("a", "t", b"r"),
            Retry("a", "t", NOW, 1, BOOM),
            Fail("a", "t", 1, BOOM),
            Release("a", "t", NOW),
            Discard("a", "t", BOOM),
        ]
    )
    selection = JobFilter(
        queue="q",
        states=frozenset({JobState.DONE}),
        types=frozenset({"t"}),
        key="k",
        worker="w",
        finished_before_us=NOW,
    )
    calls: dict[str, Any] = {
        "hello": wire.NoArguments(),
        "time": wire.NoArguments(),
        "enqueue": wire.EnqueueCall([job], NOW, True),
        "reserve": wire.ReserveCall("q", 5, SECOND, NOW, "w", ["t"]),
        "extend_lease": wire.ExtendCall([Extension("a", "t", b"p")], SECOND, NOW),
        "settle": wire.SettleCall(settlements, NOW),
        "reclaim": wire.ReclaimCall(NOW, "q", 10),
        "cancel": wire.JobsCall(["a", "b"], NOW),
        "requeue": wire.JobsCall(["a", "b"], NOW),
        "purge": wire.PurgeCall(selection, 10),
        "prune": wire.PruneCall(NOW, 10),
        "get": wire.JobsCall(["a", "b"], NOW),
        "list_jobs": wire.ListCall(selection, NOW, 10, "c"),
        "stats": wire.StatsCall(NOW, "q"),
        "configure": wire.ConfigureCall("q", QueueSettings(max_inflight=3, failure_queue="f"), NOW),
        "settings": wire.SettingsCall("q"),
        "read_attempts": wire.ReadAttemptsCall("c", 10),
        "job_attempts": wire.JobAttemptsCall("a"),
        "wait": wire.WaitCall(["q"], NOW, 0.0, "s"),
    }
    assert calls.keys() == SCOPES.keys()
    return calls


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


def test_no_call_makes_the_broker_fail(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"{SEED}={seed}")
    dice = random.Random(seed)
    documents = {
        name: msgspec.msgpack.decode(msgspec.msgpack.encode(call)) for name, call in samples().items()
    }

    async def main(url: str) -> None:
        headers = {"Content-Type": wire.MSGPACK}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(ROUNDS):
                name = dice.choice(list(documents))
                document = documents[name]
                for _ in range(dice.randint(0, 2)):
                    if isinstance(document, dict):
                        document = changed(document, dice.choice(places(document)), dice)
                body = msgspec.msgpack.encode(document)
                if dice.random() < 0.1:
                    body = body[: dice.randint(0, len(body))] + dice.randbytes(dice.randint(0, 5))
                async with session.post(f"{url}{wire.PATH}{name}", data=body) as response:
                    said = await response.read()
                    assert response.status in (200, 409, 413, 422, 404), (
                        name,
                        document,
                        response.status,
                        said,
                    )
            async with session.post(f"{url}{wire.PATH}time", data=msgspec.msgpack.encode({})) as response:
                assert response.status == 200

    with running_broker(f"sqlite:///{tmp_path}/jobs.db", trust_client_time=True) as url:
        asyncio.run(main(url))
