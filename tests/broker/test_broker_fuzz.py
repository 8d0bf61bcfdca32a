"""Bodies, headers, paths and tokens that nobody meant: never a server error, never a change by what was refused."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest

from broker.broker_client import Client
from taskharbor.broker.tokens import parse_token
from taskharbor.client import portal
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import OPERATIONS as DRIVER_OPERATIONS
from taskharbor.drivers.registry import connect
from taskharbor.testing.broker import running_broker

SEED = int(os.environ.get("TASKHARBOR_FUZZ_SEED", "20260"))
ROUNDS = int(os.environ.get("TASKHARBOR_FUZZ_ROUNDS", "500"))
SECRET = "the-right-secret-0123456789"

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.1,
    -0.0,
    1e308,
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "é" * 300,
    "x" * 70_000,
    "'; drop table jobs; --",
    "{{7*7}}",
    "../../etc/passwd",
    "null",
    "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00:00Z",
    "2026-02-30T00:00:00Z",
    [],
    {},
    [[]],
    [None] * 50,
    {"jobs": []},
    {"": ""},
    {"type": "t"},
    "AAAA",
    "=",
]

TEMPLATES: list[tuple[str, str, Any]] = [
    (
        "POST",
        "/v1/jobs",
        {"type": "t", "payload": {"a": 1}, "priority": 1, "key": "k", "headers": {"a": "b"}},
    ),
    ("POST", "/v1/jobs", {"type": "t", "run_at": "2030-01-01T00:00:00Z", "backoff_seconds": [1, 2]}),
    ("POST", "/v1/jobs", {"type": "t", "payload_base64": "AAAA", "codec": "msgpack", "idempotency_key": "i"}),
    ("POST", "/v1/jobs", {"jobs": [{"type": "t", "update": {"payload": True}, "key": "k"}, {"type": "u"}]}),
    (
        "POST",
        "/v1/jobs/claim",
        {"queue": "default", "types": ["t"], "limit": 2, "lease_seconds": 5, "workerId": "w"},
    ),
    ("POST", "/v1/jobs/heartbeat", {"jobs": [{"id": "x", "token": "t", "progress": 1}], "lease_seconds": 5}),
    ("POST", "/v1/jobs/settle", {"settlements": [{"action": "fail", "id": "x", "token": "t", "error": "e"}]}),
    ("POST", "/v1/jobs/x/complete", {"token": "t", "result": [1]}),
    ("POST", "/v1/jobs/x/fail", {"workerId": "w", "error": {"type": "E", "message": "m"}, "retryable": True}),
    ("POST", "/v1/jobs/x/retry", {"token": "t", "delay_seconds": 5}),
    ("POST", "/v1/jobs/x/release", {"token": "t", "run_at": "2030-01-01T00:00:00Z"}),
    ("POST", "/v1/jobs/x/discard", {"token": "t", "reason": "r"}),
    ("POST", "/v1/jobs/x/heartbeat", {"token": "t", "progress": {"a": 1}}),
    ("POST", "/v1/jobs/cancel", {"ids": ["x", "y"]}),
    ("POST", "/v1/jobs/requeue", {"ids": ["x"]}),
    ("POST", "/v1/purge", {"queue": "q", "states": ["done"], "types": ["t"], "limit": 5}),
    (
        "PUT",
        "/v1/queues/q",
        {"paused": False, "max_inflight": 5, "failure_queue": "f", "keep_done_seconds": 5},
    ),
]
QUERIES = {
    "/v1/jobs": ["queue", "state", "type", "key", "worker", "finished_before", "limit", "cursor", "payload"],
    "/v1/attempts": ["after", "limit"],
    "/v1/stats": ["queue"],
}


class Store:
    """The store behind the broker, looked at from beside it."""

    def __init__(self, url: str) -> None:
        self._driver = connect(url)
        portal().call(self._driver.open())
        self.latest = self.snapshot()

    def close(self) -> None:
        portal().call(self._driver.close())

    def snapshot(self) -> Any:
        return portal().call(self._look())

    async def _look(self) -> Any:
        # Always at the same time: a job that comes due is no change.
        page = await self._driver.list_jobs(JobFilter(), now=0, limit=100_000)
        stats = await self._driver.stats(now=0)
        log = await self._driver.read_attempts(limit=100_000)
        return page.jobs, [(one.queue, one.settings, one.done_total) for one in stats], log.attempts

    def check(self, status: int, what: object) -> None:
        before, self.latest = self.latest, self.snapshot()
        assert status < 500, f"seed {SEED}: {status} for {what!r}"
        if status >= 400:
            assert self.latest == before, f"seed {SEED}: {status} changed the store: {what!r}"


@pytest.fixture(params=["memory", "sqlite"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/fuzz.db"
    else:
        yield "memory://fuzz"
        MemoryDriver.drop("fuzz")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def broker(store_url: str) -> Iterator[str]:
    tokens = (parse_token(f"admin:admin:{SECRET}"),)
    with running_broker(store_url, tokens=tokens, max_wait_seconds=0.001, sweeps=False) as url:
        yield url


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with one thing wrong in it, or more."""
    if depth > 3 or rng.random() < 0.25:
        return rng.choice(NASTY)
    if isinstance(value, dict) and value:
        changed = dict(value)
        name = rng.choice(list(changed))
        kind = rng.random()
        if kind < 0.15:
            del changed[name]
        elif kind < 0.3:
            changed[rng.choice(["", "x", "\0", "type", "jobs", "__proto__", "a" * 1000])] = rng.choice(NASTY)
        else:
            changed[name] = mutated(rng, changed[name], depth + 1)
        return changed
    if isinstance(value, list) and value:
        changed_list = list(value)
        place = rng.randrange(len(changed_list))
        changed_list[place] = mutated(rng, changed_list[place], depth + 1)
        return changed_list * rng.choice([1, 1, 1, 3])
    return rng.choice(NASTY)


def mangled(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them wrong."""
    kind = rng.random()
    if kind < 0.6 or not data:
        return data
    if kind < 0.75:
        return data[: rng.randrange(len(data))]
    flipped = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


def test_bodies_that_nobody_meant(broker: str, store: Store) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with Client(broker, secret=SECRET) as client:
        for _ in range(ROUNDS):
            method, path, body = rng.choice(TEMPLATES)
            if rng.random() < 0.8:
                body = mutated(rng, body)
            text = json.dumps(body)
            if rng.random() < 0.5 and (held := rng.choice(client.claim(limit=3, workerId="w") or [None])):
                # Something that is really there.
                path = path.replace("/x/", f"/{held['id']}/")
                text = text.replace('"x"', json.dumps(held["id"]))
                text = text.replace('"token": "t"', f'"token": "{held["token"]}"')
                store.latest = store.snapshot()
            data = mangled(rng, text.encode())
            kind = rng.choice(
                ["application/json"] * 8 + ["Application/JSON; charset=utf-8", "text/plain", ""]
            )
            asked = (method, path, data[:300], kind)
            store.check(client.ask(method, path, data=data, Content_Type=kind).status, asked)
        assert client.get("/v1/stats").status == 200


def test_queries_and_paths_that_nobody_meant(broker: str, store: Store) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 1)
    with Client(broker, secret=SECRET) as client:
        for _ in range(ROUNDS):
            path, names = rng.choice(list(QUERIES.items()))
            pairs = [(rng.choice([*names, "x"]), rng.choice(NASTY)) for _ in range(rng.randint(0, 3))]
            query = "&".join(
                f"{name}={quote(str(value), safe='', errors='surrogatepass')[:5000]}" for name, value in pairs
            )
            if rng.random() < 0.3:
                value = quote(str(rng.choice(NASTY)), safe="", errors="surrogatepass")[:5000] or "x"
                path = rng.choice(
                    [f"/v1/jobs/{value}", f"/v1/jobs/{value}/attempts", f"/v1/queues/{value}", f"/{value}"]
                )
            asked = f"{path}?{query}"
            store.check(client.get(asked).status, asked)


def test_driver_calls_that_nobody_meant(broker: str, store: Store) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 2)
    shapes: list[Any] = [
        {"now": 1, "queue": "q", "limit": 1, "lease_for": 1, "worker": "w"},
        {"now": 1, "records": [{"id": "a", "type": "t", "run_at_us": 1, "created_at_us": 1}]},
        {"job_ids": ["a"], "now": 1},
        {"settlements": [], "now": 1},
        [["a"], 1],
        [],
    ]
    with Client(broker, secret=SECRET) as client:
        now = client.ok("GET", "/v1/time")["microseconds"]
        for _ in range(ROUNDS):
            path = f"/v1/driver/{rng.choice([*DRIVER_OPERATIONS, 'nothing', '../jobs'])}"
            shape = mutated(rng, rng.choice(shapes))
            if isinstance(shape, dict) and "now" in shape and rng.random() < 0.7:
                shape["now"] = now
            if rng.random() < 0.5:
                data, kind = json.dumps(shape).encode(), "application/json"
            else:
                data, kind = packed(shape), "application/msgpack"
            data = mangled(rng, data)
            asked = (path, data[:300], kind)
            store.check(client.ask("POST", path, data=data, Content_Type=kind).status, asked)


def packed(shape: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(shape)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"


def test_tokens_that_nobody_has(broker: str, store: Store) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 3)
    statuses = set()
    with Client(broker) as client:
        for _ in range(ROUNDS):
            noise = bytes(rng.choice(range(33, 256)) for _ in range(rng.randint(0, 60))).decode("latin-1")
            guess = rng.choice([SECRET[:-1], SECRET + "x", SECRET.upper(), SECRET[::-1], noise, "", "\t"])
            header = rng.choice(["Bearer ", "bearer", "Basic ", "", "Bearer  "]) + guess
            body = {"type": "t"}
            statuses.add(client.ask("POST", "/v1/jobs", body, Authorization=header).status)
    # 400: bytes that no header may have.
    assert statuses <= {400, 401, 429}
    assert store.snapshot() == store.latest


def test_requests_that_are_no_http(broker: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 4)
    parts = urlsplit(broker)
    whole = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + SECRET.encode()
        + b'\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"type":"t"}'
    )
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            place = rng.randrange(len(data))
            if kind < 0.5:
                data[place] = rng.randrange(256)
            elif kind < 0.75:
                data[place:place] = rng.choice(
                    [b"\r\n", b"\0", b"Transfer-Encoding: chunked\r\n", b": ", b" " * 100]
                )
            else:
                del data[place : place + rng.randint(1, 10)]
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
            connection.sendall(bytes(data))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        status = int(answer[9:12]) if answer else 0
        assert status < 500, f"seed {SEED}: {bytes(data)!r} -> {answer[:200]!r}"
    with Client(broker, secret=SECRET) as client:
        assert client.get("/v1/stats").status == 200
