"""Requests that nobody meant: never a failure of the broker, never a change by a request that was refused.

Documents that are right are made of the types of the routes and operations. Then something in them is made wrong.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from msgspec import inspect

from broker.broker_client import Client, Direct, contents
from needing import Entered
from taskharbor.broker.models import NewSchedule
from taskharbor.broker.routes import ROUTES
from taskharbor.broker.tokens import parse_token
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers.operations import OPERATIONS
from taskharbor.drivers.registry import connect
from taskharbor.drivers.validation import given_fields
from taskharbor.jobs import LATEST, SECOND
from taskharbor.testing.broker import running_broker

Place: TypeAlias = tuple[str | int, ...]
"""The way to a value in a document."""

SEED = int(os.environ.get("TASKHARBOR_FUZZ_SEED", "20260"))
SECRET = "the-right-secret-0123456789"
NOW = 1_800_000_000 * SECOND
NAMES = {
    **dict.fromkeys(("id", "ids", "job_id", "job_ids"), "x"),
    **dict.fromkeys(("cursor", "after", "until")),
    **{"token": "t", "queues": "queue", "stream": "0:queue", "cron": "0 3 * * *", "zone": "UTC"},
}
"""Texts of fields that have more of a meaning than a name."""
LEFT_OUT = object()
NASTY: list[Any] = [
    LEFT_OUT, None, True, False, -1, 0, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.1, -0.0, 1e308,
    float("nan"), float("inf"), "", " ", "x", "queue", "\0", "a\0b", "a\nb", "é" * 300, "x" * 70_000, "null",
    "'; drop table jobs; --", "{{7*7}}", "../../etc/passwd", "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00:00Z", "2026-02-30T00:00:00Z", "AAAA", "=", [], {}, [[]], ["queue"], [None] * 50,
    {"jobs": []}, {"": ""}, {"type": "t"}, {"x": "y"},
]  # fmt: skip
ONLY_PACKED: list[Any] = [b"", b"\xff\x00", {1: 2}]
ONLY_JSON: list[Any] = [10**40, -(2**63) - 1, "\ud800"]


# -- documents --------------------------------------------------------------------------------------------------


def sample(kind: inspect.Type, name: str, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """A value that a field of this name may have. `is_wanted`: whether to give a field that may be left out."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type, name, is_wanted)
        case inspect.UnionType():
            kinds = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            return sample(kinds[0], name, is_wanted)
        case inspect.StructType():
            fields = {
                field.encode_name: sample(field.type, field.encode_name, is_wanted)
                for field in kind.fields
                # A job with fields of a listing and without a payload is refused.
                if field.required or field.encode_name == "payload" or is_wanted()
            }
            tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
            return list(fields.values()) if kind.array_like else {**tag, **fields}
        case inspect.ListType() | inspect.FrozenSetType():
            return [sample(one, name, is_wanted) for one in item_types(kind)]
        case inspect.TupleType():
            return [sample(one, name) for one in kind.item_types]
        case inspect.StrType():
            return "staging/w/a" if kind.pattern else NAMES.get(name, name)
        case inspect.IntType():
            return NOW if kind.ge == -LATEST else 1
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.DateTimeType():
            return "2030-01-01T00:00:00Z"
        case inspect.TimeDeltaType():
            return 5
    plain: dict[type, Any] = {inspect.BoolType: True, inspect.FloatType: 5.0, inspect.BytesType: b"x"}
    return plain.get(type(kind), {"a": "b"})


def item_types(kind: inspect.ListType | inspect.FrozenSetType) -> list[inspect.Type]:
    """The types of the items, of each of which a sample has one."""
    item = kind.item_type
    return list(item.types) if isinstance(item, inspect.UnionType) else [item]


CALLS = {name: sample(inspect.type_info(call), name) for name, call in OPERATIONS.items()}
"""A call of every operation."""


def places(value: Any, way: Place = ()) -> list[Place]:
    """Every place in a document, and one more in every object."""
    found = [way]
    inner = list(value.items()) if isinstance(value, dict) else []
    inner += list(enumerate(value)) if isinstance(value, list) else []
    for key, one in inner:
        found += places(one, (*way, key))
    return [*found, (*way, "more")] if isinstance(value, dict) else found


def replaced(value: Any, way: Place, new: Any) -> Any:
    if not way:
        return None if new is LEFT_OUT else new
    changed, key = copy.copy(value), way[0]
    if len(way) > 1:
        changed[key] = replaced(changed[key], way[1:], new)
    elif new is not LEFT_OUT:
        changed[key] = new
    elif not isinstance(changed, dict) or key in changed:
        del changed[key]
    return changed


def mutated(rng: random.Random, value: Any, more: list[Any]) -> Any:
    """The value with up to two things wrong in it."""
    for _ in range(rng.randint(0, 2)):
        value = replaced(value, rng.choice(places(value)), rng.choice([*NASTY, *more]))
    return value


def mangled(rng: random.Random, data: bytes) -> bytes:
    """The bytes, now and then with a few of them wrong."""
    kind = rng.random()
    if kind < 0.7 or not data:
        return data
    if kind < 0.85:
        return data[: rng.randrange(len(data))] + rng.randbytes(rng.randint(0, 5))
    flipped = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


# -- at random, with a look at the store ------------------------------------------------------------------------


class Fuzzed(Direct):
    """An application whose store is looked at before and after every request."""

    async def check(self, method: str, url: str, body: bytes = b"", /, **headers: str) -> int:
        before = await contents(self.driver)
        status = (await self.ask(method, url, body, **headers)).status
        what = (SEED, status, method, url, body[:300], headers)
        assert status < 500, what
        assert status < 400 or await contents(self.driver) == before, what
        return status


@pytest.fixture(params=[150, pytest.param(1000, marks=pytest.mark.slow)])
def rounds(request: pytest.FixtureRequest) -> int:
    print(f"TASKHARBOR_FUZZ_SEED={SEED}")
    count: int = request.param
    return count


@pytest.fixture
def rng(rounds: int, request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {rounds} {request.function.__name__}")


@pytest.fixture(params=["memory://", "sqlite:///{}/fuzz.db"])
def fuzzed(request: pytest.FixtureRequest, tmp_path: Path) -> Entered:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Fuzzed]:
        async with connect(request.param.format(tmp_path)) as driver:
            fuzzed = Fuzzed(driver, max_wait_seconds=0.001)
            yield fuzzed
            assert (await fuzzed.ask("GET", "/v1/stats")).status == 200
            await fuzzed.app.service.long_polls.close()

    return Entered(opened())


async def test_bodies_that_nobody_meant(fuzzed: Fuzzed, rng: random.Random, rounds: int) -> None:
    routes = [(route, body) for route in ROUTES for body in route.bodies]
    kinds = ["application/json"] * 8 + ["Application/JSON; charset=utf-8", "text/plain", ""]
    statuses = set()
    for _ in range(rounds):
        route, body = rng.choice(routes)
        right = sample(inspect.type_info(body), "", lambda: rng.random() < 0.3)
        if body is NewSchedule:  # It needs one of two, and the name in the path.
            right = {
                **right,
                "name": "queue",
                "cron": None,
                "every": 60,
                **rng.choice([{}, {"cron": "0 3 * * *", "every": None}]),
            }
        text = json.dumps(mutated(rng, json.loads(msgspec.json.encode(right)), ONLY_JSON))
        # Of a job that is really there, if there is one.
        held = await fuzzed.driver.reserve("default", limit=1, lease_for=SECOND, now=NOW, worker="w")
        job_id, token = (held[0].id, held[0].token) if held else ("x", "t")
        text = text.replace('"x"', json.dumps(job_id)).replace('"t"', json.dumps(token))
        path = route.path.replace("{name}", "queue").replace("{id}", job_id)
        data, kind = mangled(rng, text.encode()), rng.choice(kinds)
        statuses.add(await fuzzed.check(route.method, path, data, Content_Type=kind))
    assert {200, 201, 400, 404, 415, 422} <= statuses


async def test_queries_and_paths_that_nobody_meant(fuzzed: Fuzzed, rng: random.Random, rounds: int) -> None:
    def quoted() -> str:
        value = rng.choice([*NASTY[1:], *ONLY_JSON])
        return quote(str(value), safe="", errors="surrogatepass")[:5000] or "x"

    queries = {route.path: msgspec.structs.fields(route.query) for route in ROUTES if route.query is not None}
    for _ in range(rounds):
        path, fields = rng.choice(list(queries.items()))
        names = [field.name for field in fields]
        if rng.random() < 0.3:
            path = rng.choice(["/v1/jobs/%s", "/v1/jobs/%s/attempts", "/v1/queues/%s", "/%s"]) % quoted()
        asked = "&".join(f"{rng.choice([*names, 'x'])}={quoted()}" for _ in range(rng.randint(0, 3)))
        await fuzzed.check("GET", f"{path}?{asked}")


async def test_driver_calls_that_nobody_meant(fuzzed: Fuzzed, rng: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        name, call = rng.choice(list(CALLS.items()))
        if is_json := rng.random() < 0.5:
            plain = json.loads(msgspec.json.encode(call))
            data = json.dumps(mutated(rng, plain, ONLY_JSON)).encode()
        else:
            data = msgspec.msgpack.encode(mutated(rng, call, ONLY_PACKED))
        kind = "application/json" if is_json else wire.MSGPACK
        path = f"{wire.PATH}{rng.choice([name] * 20 + ['nothing', '../jobs'])}"
        await fuzzed.check("POST", path, mangled(rng, data), Content_Type=kind)


async def test_tokens_that_nobody_has(rng: random.Random, rounds: int) -> None:
    direct = Direct(tokens=(parse_token(f"admin:admin:{SECRET}"),))
    for _ in range(rounds):
        noise = bytes(rng.choice(range(33, 256)) for _ in range(rng.randint(0, 60))).decode("latin-1")
        guess = rng.choice([SECRET[:-1], SECRET + "x", SECRET.upper(), SECRET[::-1], noise, "", "\t"])
        header = rng.choice(["Bearer ", "bearer", "Basic ", "", "Bearer  "]) + guess
        answer = await direct.ask("POST", "/v1/jobs", b'{"type":"t"}', Authorization=header)
        assert answer.status in (401, 429)
    assert await direct.driver.stats(now=NOW) == []


def test_requests_that_are_no_http(rng: random.Random, rounds: int) -> None:
    whole = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 12\r\n\r\n{"type":"t"}'
    )
    pieces = [b"\r\n", b"\0", b"Transfer-Encoding: chunked\r\n", b": ", b" " * 100]
    with running_broker("memory://") as url:
        parts = urlsplit(url)
        for _ in range(rounds):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 6)):
                kind, place = rng.random(), rng.randrange(len(data))
                if kind < 0.5:
                    data[place] = rng.randrange(256)
                elif kind < 0.75:
                    data[place:place] = rng.choice(pieces)
                else:
                    del data[place : place + rng.randint(1, 10)]
            with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
                connection.sendall(bytes(data))
                connection.shutdown(socket.SHUT_WR)
                answer = connection.makefile("rb").read()
            assert int(answer[9:12] or 0) < 500, f"seed {SEED}: {bytes(data)!r} -> {answer[:200]!r}"
        with Client(url) as client:
            assert client.get("/v1/stats").status == 200


# -- every place of every call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_is_the_same_in_both_forms(name: str) -> None:
    call = wire.READ_CALL[name](msgspec.msgpack.encode(CALLS[name]))
    assert wire.READ_CALL_JSON[name](wire.encode_json(call)) == call
    assert wire.READ_CALL[name](wire.encode(call)) == call


@pytest.mark.parametrize(
    "store", ["sqlite:///{}/jobs.db", pytest.param("file://{}/store", marks=pytest.mark.slow)]
)
async def test_every_value_in_every_place_of_every_call_is_refused_or_carried_out(
    tmp_path: Path, store: str
) -> None:
    """And the broker serves on as before."""
    async with connect(store.format(tmp_path)) as driver:
        direct = Direct(driver, max_wait_seconds=0.001)

        async def send(name: str, document: Any) -> int:
            answer = await direct.call(name, msgspec.msgpack.encode(document))
            assert answer.status in (200, 404, 409, 413, 422), (name, document, answer)
            return answer.status

        assert {await send(name, call) for name, call in CALLS.items()} == {200}
        for name, call in CALLS.items():
            for place in places(call):
                for value in (*NASTY, *ONLY_PACKED):
                    await send(name, replaced(call, place, value))
        assert {await send(name, call) for name, call in CALLS.items()} == {200}
        await direct.app.service.long_polls.close()


def beyond(kind: inspect.Type, way: Place = (), *, within: bool = False) -> Iterator[tuple[Place, Any]]:
    """Every place whose type has bounds, with values that are beyond them, or just `within`."""
    wrong: list[Any] = []
    right: list[Any] = []
    match kind:
        case inspect.StructType():
            given = {field.name for field in given_fields(kind.cls)}
            for field in kind.fields:
                if field.name in given and not kind.array_like:
                    yield from beyond(field.type, (*way, field.encode_name), within=within)
        case inspect.ListType() | inspect.FrozenSetType():
            for number, one in enumerate(item_types(kind)):
                yield from beyond(one, (*way, number), within=within)
        case inspect.UnionType():
            for one in kind.types:
                yield from beyond(one, way, within=within)
        case inspect.StrType(pattern=str()):
            wrong = ["", "other", "staging/../x", 5]
        case inspect.StrType(max_length=int() as most):
            blank = ["", " ", "\t\n"] if kind.min_length else []
            wrong = [*blank, "\0", "a\0b", "x" * (most + 1), 5, b"q"]
            right = ["x" * most, "\U0001f600" * most, "\u202e\r\n", "'; drop table jobs; --", "%s{0}*"]
        case inspect.BytesType(max_length=1_048_576 as most):
            wrong = [b"x" * (most + 1), "x", 5]
        case inspect.IntType(ge=int() as least, le=int() as most):
            wrong, right = [least - 1, most + 1, 1.5, "1", True], [least, most]
        case inspect.FloatType() if kind.ge is not None and kind.le is not None:
            wrong = [kind.ge - 0.1, kind.le + 0.1, float("nan"), "1"]
    yield from ((way, value) for value in (right if within else wrong))


ALSO: dict[str, list[tuple[Place, Any]]] = {
    "enqueue": [
        (("records", 0, name), value)
        for name, value in [
            ("headers", {"a": 1}),
            ("headers", {"\0": ""}),
            ("headers", {"x": "y" * 9000}),
            ("payload", None),
            ("type", None),
        ]
    ],
    "reserve": [(("now",), LATEST)],
    "extend_lease": [(("now",), LATEST)],
    "configure": [(("settings", "max_inflight"), 0), (("settings", "failure_queue"), "queue")],
    "get": [(("job_ids",), ["x", "y", "x"])],
    "wait": [(("queues",), []), (("queues",), ["q"] * 257)],
}
"""Values that are beyond bounds of several fields together."""


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_value_beyond_its_bounds_is_refused_and_nothing_is_stored(name: str) -> None:
    direct = Direct()
    right = CALLS[name]
    for place, value in [*beyond(inspect.type_info(OPERATIONS[name])), *ALSO.get(name, [])]:
        wrong = replaced(right, place, value)
        if name == "enqueue" and "records" in wrong and place:
            wrong["records"] = [CALLS[name]["records"][0] | {"id": "right"}, *wrong["records"]]
        answer = await direct.call(name, msgspec.msgpack.encode(wrong))
        assert answer.refusal == (422, "invalid_request"), (place, value, answer)
    assert await direct.driver.stats(now=NOW) == []


@pytest.mark.parametrize("kind", [wire.MSGPACK, "application/json; charset=utf-8", "text/plain", ""])
async def test_a_body_that_is_no_call_is_refused(kind: str) -> None:
    refusal = (422, "invalid_request") if kind.startswith("app") else (415, "unsupported_media_type")
    too_deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00"
    for body in (b"", b"\xc1", b"{}\0", b"\x93\x01\x02\x03", b"\xff" * 100, too_deep, b"[" * 100_000):
        for name in ("enqueue", "reserve", "settle", "wait", "configure", "time"):
            assert (await Direct().call(name, body, Content_Type=kind)).refusal == refusal
