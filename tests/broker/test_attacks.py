"""A table of attacks on a broker. Beside each, an honest producer and worker go on, and each of their jobs runs once."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec import inspect

from broker.broker_client import Answer, Client
from broker.broker_loops import PATIENCE, wait_until
from broker.test_fuzz import ALSO, CALLS, beyond, replaced
from broker.test_fuzz_tokens import STORES
from records import make_record
from taskharbor.broker.tokens import parse_token
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.records import Ack, JobFilter
from taskharbor.jobs import SECOND
from taskharbor.requests import new_id
from taskharbor.testing.broker import RunningBroker, broker_thread

SCOPES = {
    "honest": "produce,work",
    "reader": "read",
    "producer": "produce",
    "worker": "work",
    "both": "produce,work",
    "admin": "admin",
}
SECRETS = {name: f"{name}-secret-0123456789" for name in SCOPES}
TOKENS = tuple(parse_token(f"{name}:{scopes}:{SECRETS[name]}") for name, scopes in SCOPES.items())
HELD = 20
MANY = 5


class Attacked:
    """A broker under attack, and a client for each of its tokens."""

    def __init__(self, broker: RunningBroker, clients: dict[str, Client], held: list[dict[str, Any]]) -> None:
        self.broker = broker
        self.clients = clients
        self.held = held
        """Jobs that the honest worker holds."""

    def now(self) -> int:
        return self.broker.app.service.now()

    def call(self, who: str, call: op.Operation[Any]) -> Answer:
        """A call of the driver protocol, as its bytes."""
        path, kind = f"{wire.PATH}{call.name}", {"Content_Type": wire.MSGPACK}
        return self.clients[who].ask("POST", path, None, wire.encode(call), **kind)


class Honest(threading.Thread):
    """Submits, claims and completes jobs of its own queue until told to stop, and repeats what was refused or cut."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.stopped = threading.Event()
        self.ids: list[str] = []

    def run(self) -> None:
        with ExitStack() as stack:
            client = stack.enter_context(Client(self._url, secret=SECRETS["honest"]))

            def ok(path: str, body: Any, name: str) -> Any:
                while True:
                    with suppress(OSError, HTTPException):
                        answer = client.post(path, body, TaskHarbor_Request=name)
                        if answer.status < 400:
                            return answer.body
                        assert answer.status in (429, 503), answer
                    client._connection.close()

            while not self.stopped.is_set() or len(self.ids) < MANY:
                name = new_id()
                self.ids.append(
                    ok("/v1/jobs", {"type": "t", "queue": "h", "idempotency_key": name}, name)["id"]
                )
                for job in ok("/v1/jobs/claim", {"queue": "h", "limit": 10}, f"{name} c")["jobs"]:
                    ok(f"/v1/jobs/{job['id']}/complete", {"token": job["token"]}, "")


@contextmanager
def attacked(store: str = "memory://", **config: Any) -> Iterator[Attacked]:
    with broker_thread(store, **{"tokens": TOKENS, **config}) as broker, ExitStack() as stack:
        clients = {name: stack.enter_context(Client(broker.url, secret=SECRETS[name])) for name in SCOPES}
        honest = clients["honest"]
        for _ in range(HELD):
            honest.submit(queue="held")
        held = honest.claim(queue="held", limit=HELD, lease_seconds=60)
        thread = Honest(broker.url)
        thread.start()
        try:
            yield Attacked(broker, clients, held)
        finally:
            thread.stopped.set()
            thread.join(PATIENCE)
        assert not thread.is_alive(), "the honest client does not get through"
        for job in held:
            honest.act(job, "complete")
        for job_id in (*thread.ids, *(job["id"] for job in held)):
            job = honest.job(job_id)
            assert (job["state"], job["fence"]) == ("done", 1)
            assert len(honest.ok("GET", f"/v1/jobs/{job_id}/attempts")["attempts"]) == 1


async def test_the_http_driver_pages_across_answers_that_end_early() -> None:
    with broker_thread("memory://", max_answer_bytes=1000) as broker:
        async with HttpDriver.from_url(broker.url) as driver:
            now = await driver.time()
            records = [make_record(payload=b"x" * 900, now=now) for _ in range(300)]
            await driver.enqueue(records, now=now)
            ids = [record.id for record in records]
            page = await driver.list_jobs(JobFilter(), now=now, limit=250)
            assert [job.id for job in page.jobs] == ids[:49:-1]
            asked = [*ids, "nobody", ids[0]]
            found = [job and job.id for job in await driver.get(asked, now=now)]
            assert found == [*ids, None, ids[0]]


# -- the table ------------------------------------------------------------------------------------------------


def a_clock_ahead_ends_leases(on: Attacked) -> None:
    for skew in range(0, 60, 5):
        assert on.call("worker", op.Reclaim(on.now() + skew * SECOND)).status == 200
        reserve = op.Reserve("held", 10, 60 * SECOND, on.now() + skew * SECOND, "thief")
        assert wire.read_answer(op.Reserve, on.call("worker", reserve).body) == []


def ids_of_others_are_sent_as_new(on: Attacked) -> None:
    ids = [job["id"] for job in on.held]
    for queue in ("held", "elsewhere"):
        forged = [make_record(job_id, queue=queue, payload=b"forged", now=on.now()) for job_id in ids]
        answer = on.call("producer", op.Enqueue(forged, on.now(), new_ids=True))
        assert [one.existed for one in wire.read_answer(op.Enqueue, answer.body)] == [True] * HELD
    assert all(on.clients["reader"].job(job_id)["payload"] == {} for job_id in ids)


def lease_tokens_are_looked_for(on: Attacked) -> None:
    ids = [job["id"] for job in on.held]
    seen = b""
    for who in SCOPES:
        for call in (
            op.Get(ids, on.now()), op.ListJobs(JobFilter(), on.now(), 1000), op.ReadAttempts(), op.LogStreams(),
            op.Stats(on.now()), op.JobAttempts(ids[0]),
        ):  # fmt: skip
            seen += on.call(who, call).body
        for path in ("/v1/jobs?payload=true&limit=1000", f"/v1/jobs/{ids[0]}", "/v1/attempts", "/v1/stats"):
            seen += json.dumps(on.clients[who].get(path).body).encode()
    assert ids[0].encode() in seen
    assert not [job for job in on.held if job["token"].encode() in seen]


def a_worker_ends_jobs_without_their_tokens(on: Attacked) -> None:
    """By guesses, and by the name of the worker that claimed them."""
    worker = on.clients["worker"]
    assert worker.post("/v1/jobs/claim", {"queue": "x", "worker": "/honest/w"}).status == 422
    assert on.call("worker", op.Reserve("x", 1, SECOND, on.now(), "/honest/w")).status == 422
    for job in on.held:
        names = [job["worker"], f"{job['worker']}/w", "w", f"/{job['worker']}"]
        for proof in [{"token": guess} for guess in ("x", "none", job["id"])] + [
            {"workerId": one} for one in names
        ]:
            for action in ("complete", "heartbeat"):
                assert worker.post(f"/v1/jobs/{job['id']}/{action}", proof).status == 409
        (answer,) = wire.read_answer(
            op.Settle, on.call("worker", op.Settle([Ack(job["id"], "")], on.now())).body
        )
        assert answer is not None


def one_caller_waits_for_very_many_queues(on: Attacked) -> None:
    statuses = set()
    for start in range(0, 20 * 256, 256):
        queues = [f"q{number}" for number in range(start, start + 256)]
        statuses.add(on.call("worker", op.Wait(queues, on.now(), 0.0)).status)
    assert statuses == {200, 429}
    assert on.call("worker", op.Wait(["q"] * 257, on.now(), 0.0)).status == 422
    assert on.clients["both"].claim(queue="q", wait_seconds=0.001) == []


def one_request_makes_very_many_queues(on: Attacked) -> None:
    jobs = [{"type": "t", "queue": f"new-{number}"} for number in range(10_000)]
    assert on.clients["producer"].post("/v1/jobs", {"jobs": jobs}).refusal == (422, "invalid_request")
    records = [make_record(queue=job["queue"], now=on.now()) for job in jobs]
    assert on.call("producer", op.Enqueue(records, on.now())).status == 422
    statuses = [
        on.clients["producer"].post("/v1/jobs", {"jobs": jobs[start : start + 250]}).status
        for start in range(0, 2000, 250)
    ]
    assert statuses[:4] == [201] * 4
    assert 429 in statuses
    # Only new queues are refused.
    assert on.clients["producer"].submit(queue="new-1")


def payloads_are_read_by_the_thousand(on: Attacked) -> None:
    most = on.broker.app.service.config.max_answer_bytes
    ids = [on.clients["producer"].submit(queue="large", payload="x" * (most // 4)) for _ in range(100)]
    longest = 70 * most // 4
    for call in (op.ListJobs(JobFilter(queue="large"), on.now(), 10_000), op.Get(ids, on.now())):
        body = on.call("reader", call).body
        assert most < len(body) < longest
    page = on.clients["reader"].ok("GET", "/v1/jobs?queue=large&payload=true&limit=1000")
    assert 4 <= len(page["jobs"]) < 100
    assert page["cursor"]


def payloads_are_claimed_by_the_thousand(on: Attacked) -> None:
    for start in range(0, 200, 50):
        jobs = [{"type": "t", "queue": "large", "payload": "x" * 70_000} for _ in range(50)]
        assert on.clients["both"].post("/v1/jobs", {"jobs": jobs}).status == 201, start
    reserve = op.Reserve("large", 10_000, SECOND, on.now(), "w")
    assert len(wire.read_answer(op.Reserve, on.call("worker", reserve).body)) == 64
    assert len(on.clients["worker"].claim(queue="large", limit=1000)) == 64


def a_body_names_very_many_jobs(on: Attacked) -> None:
    """Each name of two letters takes 50 bytes of memory."""
    for who, name in (("reader", "get"), ("both", "cancel")):
        body = msgspec.msgpack.encode({"job_ids": ["xy"] * 2_000_000, "now": 0})
        answer = on.clients[who].ask("POST", f"{wire.PATH}{name}", None, body, Content_Type=wire.MSGPACK)
        assert answer.refusal in ((413, "too_large"), (403, "forbidden"))


def bodies_come_and_do_not_end(on: Attacked) -> None:
    head = (
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {SECRETS['producer']}\r\nContent-Length: 50000\r\n\r\n"
    ).encode()
    answers = set()
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(connected(on.broker.url))
            connection.sendall(head + b" " * 40_000)
            connection.settimeout(0.2)
            with suppress(TimeoutError):
                answers.add(connection.recv(65_536)[:12])
        assert answers == {b"HTTP/1.1 429"}
        assert on.clients["both"].submit()


def answers_are_asked_for_and_not_read(on: Attacked) -> None:
    on.clients["producer"].submit(queue="large", payload="x" * 600_000)
    head = "GET /v1/jobs?queue=large&payload=true HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: Bearer {SECRETS['reader']}\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(connected(on.broker.url, buffer=4096))
            connection.sendall(head.encode())
        tasks = on.broker.server.server_state.tasks
        # Those for which there is no memory are refused. The others are cut, and give it back.
        wait_until(on.broker, lambda: on.broker.app._bytes.held == 0 and len(tasks) <= 1)
    assert on.clients["both"].submit()


def connections_are_opened_and_left_open(on: Attacked) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(connected(on.broker.url, source="127.0.0.2")) for _ in range(1100)]
        state = on.broker.server.server_state
        wait_until(on.broker, lambda: len(state.connections) <= 50 + len(SCOPES) + 1)
        # Another address still gets in.
        with Client(on.broker.url, secret=SECRETS["both"]) as late:
            assert late.submit()
    assert len(opened) == 1100


def fields_have_values_at_their_bounds_and_beyond(on: Attacked) -> None:
    """Every bounded field of every operation, sent by a caller who may do anything."""
    pairs = 0
    for name, right in CALLS.items():
        kind = inspect.type_info(op.OPERATIONS[name])
        refused = [(*pair, {422}) for pair in (*beyond(kind), *ALSO.get(name, []))]
        allowed = [(*pair, {200, 404, 409, 413, 422}) for pair in beyond(kind, within=True)]
        for place, value, statuses in (*refused, *allowed):
            call = replaced(right | ({"now": on.now()} if "now" in right else {}), place, value)
            body, path = msgspec.msgpack.encode(call), f"{wire.PATH}{name}"
            answer = on.clients["admin"].ask("POST", path, None, body, Content_Type=wire.MSGPACK)
            assert answer.status in statuses, (name, place, value, answer)
            pairs += 1
        assert on.clients["both"].submit()
    assert pairs > 1000


def connected(url: str, *, source: str = "127.0.0.1", buffer: int = 0) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.bind((source, 0))
    connection.settimeout(PATIENCE)
    connection.connect((parts.hostname, parts.port))
    return connection


Attack: TypeAlias = Callable[[Attacked], None]
ATTACKS: list[tuple[Attack, dict[str, Any]]] = [
    (a_clock_ahead_ends_leases, {}),
    (ids_of_others_are_sent_as_new, {}),
    (lease_tokens_are_looked_for, {}),
    (a_worker_ends_jobs_without_their_tokens, {}),
    (one_caller_waits_for_very_many_queues, {}),
    (one_request_makes_very_many_queues, {}),
    (payloads_are_read_by_the_thousand, {"max_answer_bytes": 40_000}),
    (payloads_are_claimed_by_the_thousand, {"max_answer_bytes": 1_000_000}),
    (a_body_names_very_many_jobs, {}),
    (bodies_come_and_do_not_end, {"max_held_bytes": 200_000}),
    (answers_are_asked_for_and_not_read, {"max_held_bytes": 4_000_000, "body_seconds": 0.2}),
    (connections_are_opened_and_left_open, {"max_per_address": 50}),
    (fields_have_values_at_their_bounds_and_beyond, {"max_wait_seconds": 0.001}),
]
MOSTLY_SLOW = [
    pytest.param(attack, config, store, id=f"{attack.__name__}-{store}", marks=marks)
    for store, marks in (
        ("memory", []),
        *((store, [pytest.mark.slow]) for store in STORES if store != "memory"),
    )
    for attack, config in ATTACKS
]


@pytest.mark.parametrize(("attack", "config", "store"), MOSTLY_SLOW)
def test_an_attack_harms_nobody_else(
    attack: Attack, config: dict[str, Any], store: str, tmp_path: Path
) -> None:
    if "max_per_address" in config and sys.platform != "linux":
        pytest.skip("loopback has one address")
    with attacked(STORES[store](tmp_path), **config) as on:
        attack(on)
