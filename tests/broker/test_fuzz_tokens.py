"""Requests that nobody meant, of callers with a token for each scope, in batches. After each batch an honest producer and worker
get through, and the broker holds nothing for requests that have ended.

`make soak` sends a million of them, over five stores.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes, unquote

import msgspec
import pytest
from msgspec import inspect

from broker.broker_client import Answer
from broker.test_fuzz import CALLS, NASTY, ONLY_JSON, ONLY_PACKED, SEED, mangled, mutated, sample
from conformance.recycled_postgres import recycler
from taskharbor.broker.admission import BrokerApp
from taskharbor.broker.app import make_app
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.routes import ROUTES
from taskharbor.broker.tokens import parse_token
from taskharbor.clock import FakeClock
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers.contract import Driver, JobFilter
from taskharbor.drivers.operations import OPERATIONS
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND
from taskharbor_testkit import servers

REQUESTS = int(os.environ.get("TASKHARBOR_FUZZ_REQUESTS", "1500"))
BATCH = 500
GROWTH = 64 << 20
"""Bytes by which the process may grow after its first batches. A million requests that each left 100 bytes would show."""
SCOPES = {
    "produce": "produce",
    "work": "work",
    "read": "read",
    "honest": "produce,work",
    "limited": "work,produce:q*",
}
CALLERS = ["produce", "work", "read", "limited"]
PERMITTED = [route for route in ROUTES if route.scope != "admin"]
SECRETS = {name: f"{name}-secret-0123456789" for name in SCOPES}
TOKENS = tuple(parse_token(f"{name}:{scopes}:{SECRETS[name]}") for name, scopes in SCOPES.items())
BROWSER: list[tuple[bytes, Callable[[random.Random], bytes]]] = [
    (
        name,
        lambda rng: rng.choice(
            [rng.randbytes(rng.randint(0, 40)), b"", b"http://[", b"http://[::1", b"null", b"9" * 5000]
        ),
    )
    for name in (
        b"origin",
        b"host",
        b"content-type",
        b"content-length",
        b"authorization",
        b"expect",
        b"cookie",
    )
]
OURS = [wire.REQUEST_ID.lower().encode(), wire.HEARD.lower().encode()]
DEEP = [
    b"[" * 50_000,
    b'{"payload":' * 9000,
    b"\x91" * 50_000,
    b"\x81\xa1x" * 50_000,
    b'{"type":"t","payload":' + b"[" * 5000,
]
STORES: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: "memory://",
    "sqlite": lambda path: f"sqlite:///{path}/jobs.db",
    "object store": lambda path: "mem://",
    "postgres": lambda path: recycler().fresh_url(),
    "redis": lambda path: servers.with_fresh_prefix(servers.given_or_shared_redis().url),
}


class Fuzzed:
    """A broker without a server, so that any bytes reach it."""

    def __init__(self, driver: Driver, rng: random.Random) -> None:
        self.driver = driver
        self.rng = rng
        self.clock = FakeClock()
        config = BrokerConfig(tokens=TOKENS, max_wait_seconds=0.001, sweeps=False)
        self.app: BrokerApp = make_app(driver, config, clock=self.clock)
        self.held: list[tuple[str, str]] = [("x", "t")]

    async def send(
        self,
        who: str,
        method: str,
        path: bytes,
        query: bytes,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> Answer:
        """Send a request as uvicorn gives it to an application."""
        messages: list[Any] = []
        bodies = [body]
        usual = {b"host": b"localhost", b"authorization": b"Bearer " + SECRETS[who].encode()}
        given = [*((name, value) for name, value in usual.items() if name not in dict(headers)), *headers]

        async def receive() -> Any:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        raw = path.decode("ascii")
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(raw),
            "raw_path": path,
            "query_string": query,
        }
        await self.app({**scope, "headers": given, "client": ("192.0.2.1", 1)}, receive, send)
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return Answer(messages[0]["status"], {}, content)

    async def honest(self, path: str, body: Any) -> Any:
        kind = [(b"content-type", b"application/json")]
        answer = await self.send("honest", "POST", path.encode(), b"", json.dumps(body).encode(), kind)
        assert answer.status in (200, 201), answer
        return json.loads(answer.body)

    async def get_through(self) -> None:
        """An honest producer and worker, after a batch. Then the store is emptied, and nothing is held for anybody."""
        self.clock.advance(60)
        ids = [(await self.honest("/v1/jobs", {"type": "t", "queue": "honest"}))["id"] for _ in range(3)]
        claimed = (await self.honest("/v1/jobs/claim", {"queue": "honest", "limit": 10}))["jobs"]
        assert [job["id"] for job in claimed] == ids
        for job in claimed:
            await self.honest(f"/v1/jobs/{job['id']}/complete", {"token": job["token"]})
        assert self.app._bytes.held == self.app._under_way.held == self.app.service.long_polls.waiting == 0
        await self.empty()

    async def empty(self) -> None:
        """Remove the jobs and the log, so that memory that grows is the broker's."""
        later = self.clock.now() + 200_000 * 86_400 * SECOND // 10
        while await self.driver.reclaim(now=later):
            pass
        while jobs := (await self.driver.list_jobs(JobFilter(), now=later, limit=1000)).jobs:
            waiting = [job.id for job in jobs if not job.state.is_terminal]
            await self.driver.cancel(waiting, now=later)
            await self.driver.purge(JobFilter())
        while await self.driver.prune(now=later):
            pass

    # -- requests -------------------------------------------------------------------------------------------

    def headers(self, kind: bytes) -> list[tuple[bytes, bytes]]:
        rng = self.rng
        made = [(b"content-type", kind)]
        while rng.random() < 0.2:
            name, value = rng.choice(BROWSER)
            made.insert(rng.randint(0, len(made)), (name, value(rng)))
        while rng.random() < 0.2:
            made.append((rng.choice(OURS), rng.choice([b"a", b"b", b"", b"x" * 65, b"a b c", b"\xff"])))
        return made

    def text(self) -> bytes:
        value = str(self.rng.choice([*NASTY[1:], *ONLY_JSON, "queue", "honest"])).encode(
            errors="surrogatepass"
        )[:3000]
        return (
            mangled(self.rng, quote_from_bytes(value, safe="").encode())
            .decode("latin-1")
            .encode("ascii", "ignore")
        )

    def caller(self, scope: str) -> str:
        """Mostly one whose scope allows the call."""
        fitting = [name for name in CALLERS if scope == "read" or scope in SCOPES[name]]
        return self.rng.choice(fitting or CALLERS) if self.rng.random() < 0.9 else self.rng.choice(CALLERS)

    async def route(self) -> int:
        rng = self.rng
        route = rng.choice(ROUTES if rng.random() < 0.2 else PERMITTED)
        who = self.caller(route.scope)
        job_id, token = rng.choice(self.held)
        body = b""
        if route.bodies:
            right = sample(inspect.type_info(rng.choice(route.bodies)), "", lambda: rng.random() < 0.3)
            text = json.dumps(mutated(rng, json.loads(msgspec.json.encode(right)), ONLY_JSON))
            text = text.replace('"x"', json.dumps(job_id)).replace('"t"', json.dumps(token))
            body = rng.choice(DEEP) if rng.random() < 0.01 else mangled(rng, text.encode())
        name = rng.choice([b"queue", b"honest", self.text() or b"x"])
        path = route.path.encode().replace(b"{name}", name)
        path = path.replace(b"{id}", rng.choice([job_id.encode(), self.text() or b"x"]))
        fields = [] if route.query is None else [one.name for one in msgspec.structs.fields(route.query)]
        query = b"&".join(
            rng.choice([*fields, "x"]).encode() + b"=" + self.text() for _ in range(rng.choice([0, 0, 1, 3]))
        )
        method = route.method if rng.random() < 0.98 else rng.choice(["HEAD", "DELETE", "PUT", "OPTIONS"])
        answer = await self.send(who, method, path, query, body, self.headers(b"application/json"))
        if answer.status == 200 and route.path == "/v1/jobs/claim":
            jobs = json.loads(answer.body).get("jobs", [])
            self.held = [*self.held, *((job["id"], job["token"]) for job in jobs)][-50:]
        return answer.status

    async def call(self) -> int:
        rng = self.rng
        name, call = rng.choice(list(CALLS.items()))
        who = self.caller(OPERATIONS[name].scope)
        job_id, token = rng.choice(self.held)
        is_json = rng.random() < 0.5
        now = self.clock.now()
        if is_json:
            plain = json.loads(msgspec.json.encode(call))
            text = json.dumps(mutated(rng, plain | {"now": now} if "now" in plain else plain, ONLY_JSON))
            data = text.replace('"x"', json.dumps(job_id)).replace('"t"', json.dumps(token)).encode()
        else:
            data = msgspec.msgpack.encode(
                mutated(rng, call | {"now": now} if "now" in call else call, ONLY_PACKED)
            )
        body = rng.choice(DEEP) if rng.random() < 0.01 else mangled(rng, data)
        kind = b"application/json" if is_json else wire.MSGPACK.encode()
        path = f"{wire.PATH}{name}".encode()
        return (await self.send(who, "POST", path, b"", body, self.headers(kind))).status


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("store", STORES)
async def test_what_callers_send_breaks_nothing_and_the_honest_get_through(
    store: str, tmp_path: Path
) -> None:
    print(f"TASKHARBOR_FUZZ_SEED={SEED} TASKHARBOR_FUZZ_REQUESTS={REQUESTS}")
    rng = random.Random(f"{SEED} {REQUESTS} {store}")
    statuses: Counter[int] = Counter()
    async with connect(STORES[store](tmp_path)) as driver:
        fuzzed = Fuzzed(driver, rng)
        sizes: list[int] = []
        for start in range(0, REQUESTS, BATCH):
            for number in range(start, min(start + BATCH, REQUESTS)):
                status = await rng.choice([fuzzed.route, fuzzed.call])()
                statuses[status] += 1
                assert status < 500, (
                    f"request {number}: TASKHARBOR_FUZZ_SEED={SEED} TASKHARBOR_FUZZ_REQUESTS={REQUESTS}"
                )
            await fuzzed.get_through()
            sizes.append(resident() if os.path.exists("/proc/self/statm") else 0)
        await fuzzed.app.service.long_polls.close()
    assert {200, 400, 401, 403, 404, 413, 422} <= statuses.keys(), statuses
    print(
        f"{store}: {statuses.total()} requests, {dict(statuses)}, grown by {sizes[-1] - sizes[len(sizes) // 10]} bytes"
    )
    assert sizes[-1] - sizes[len(sizes) // 10] < GROWTH, sizes
