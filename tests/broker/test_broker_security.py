"""Who may call, from where, and how much. Every rule has a test that fails without it."""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import taskharbor.broker.tokens as tokens
from broker.broker_client import Answer, Client
from broker.broker_loops import PATIENCE, wait_until
from needing import Certificate
from taskharbor.broker.app import ROUTES
from taskharbor.broker.gate import KnownHosts, Rates
from taskharbor.broker.routes import Route
from taskharbor.broker.serving import BoundedProtocol, check_exposure
from taskharbor.broker.tokens import Guard, parse_token, parse_tokens, read_token_file
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import OPERATIONS as DRIVER_OPERATIONS
from taskharbor.errors import InvalidRequest
from taskharbor.testing.broker import broker_thread, running_broker

SECRETS = {name: f"{name}-secret-0123456789" for name in ("read", "produce", "work", "admin")}
TOKENS = tuple(parse_token(f"{name}-er:{name}:{secret}") for name, secret in SECRETS.items())


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with running_broker("memory://", tokens=TOKENS) as url:
        yield url


def raw(url: str, data: bytes, *, reads: bool = True) -> bytes:
    """Send bytes as they are; all that comes back until the server hangs up."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        answer = b""
        while reads and (piece := connection.recv(65536)):
            answer += piece
        return answer


# -- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "wrong-secret-0123456789", SECRETS["work"][:-1], ""])
def test_without_a_right_token_nothing_is_answered(guarded: str, secret: str | None) -> None:
    with Client(guarded, secret=secret) as client:
        answer = client.get("/v1/stats")
        assert (answer.status, answer.body["code"]) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert client.post("/v1/jobs", {"type": "t"}).status == 401
        assert client.post("/v1/driver/time").status == 401


@pytest.mark.parametrize(
    "header", ["Basic d29yazp3b3Jr", "Bearer", SECRETS["work"], f"Token {SECRETS['work']}"]
)
def test_only_a_bearer_token_counts(guarded: str, header: str) -> None:
    with Client(guarded) as client:
        assert client.get("/v1/stats", Authorization=header).status == 401


def test_a_token_that_comes_twice_is_none(guarded: str) -> None:
    head = f"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {SECRETS['work']}\r\n"
    assert b" 200 " in raw(guarded, head.encode() + b"\r\n").splitlines()[0]
    assert b" 401 " in raw(guarded, head.encode() + b"Authorization: Bearer other\r\n\r\n").splitlines()[0]


def test_health_and_readiness_need_no_token(guarded: str) -> None:
    with Client(guarded) as client:
        assert [client.get("/health").status, client.get("/ready").status] == [200, 200]


NEEDED = [(one.method, one.path, one.scope) for one in ROUTES if not one.is_public] + [
    ("POST", f"/v1/driver/{name}", call.scope) for name, call in DRIVER_OPERATIONS.items()
]


@pytest.mark.parametrize(("method", "path", "scope"), NEEDED)
def test_a_token_opens_what_its_scope_says_and_no_more(
    guarded: str, method: str, path: str, scope: str
) -> None:
    path = path.replace("{id}", "x").replace("{name}", "x")
    for name, secret in SECRETS.items():
        with Client(guarded, secret=secret) as client:
            answer = client.ask(method, path, data=b"?" if method != "GET" else None)
            is_allowed = scope == "read" or name in (scope, "admin")
            assert (answer.status != 403) == is_allowed, (name, answer)
            if not is_allowed:
                assert answer.body["code"] == "forbidden"
                assert scope in answer.body["hint"]


@pytest.mark.parametrize("name", SECRETS)
def test_lease_tokens_are_shown_to_workers_alone(guarded: str, name: str) -> None:
    with Client(guarded, secret=SECRETS["admin"]) as client:
        job_id = client.submit(queue=name)
        (claimed,) = client.claim(queue=name)
        now = client.ok("GET", "/v1/time")["microseconds"]
    with Client(guarded, secret=SECRETS[name]) as client:
        (job, nobody) = client.ok("POST", "/v1/driver/get", {"job_ids": [job_id, "nobody"], "now": now})
        page = client.ok("POST", "/v1/driver/list_jobs", {"selection": {"queue": name}, "now": now})
    seen = claimed["token"] if name in ("work", "admin") else None
    assert nobody is None
    assert page == {"jobs": [job], "cursor": None}
    assert (job["id"], job["state"], job["token"]) == (job_id, "inflight", seen)


def test_every_change_needs_more_than_to_look() -> None:
    looks = [one for one in ROUTES if one.scope == "read"]
    assert all(one.method == "GET" for one in looks)
    assert all(one.scope != "read" for one in ROUTES if one.method != "GET")


def test_every_token_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes must not say which one matched, or how far."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    class Spied:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(tokens, "hmac", Spied)
    guard = Guard(TOKENS)
    caller = guard.caller(f"Bearer {SECRETS['read']}".encode())
    assert caller is not None
    assert caller.name == "read-er"
    assert len(compared) == len(TOKENS)
    assert guard.caller(b"Bearer nobody") is None
    assert len(compared) == 2 * len(TOKENS)
    assert all(len(a) == len(b) == 32 for a, b in compared)


def test_a_secret_is_not_kept() -> None:
    assert SECRETS["work"] not in repr(TOKENS)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("just-a-secret-0123456789", "form"),
        ("name:work", "form"),
        ("name:wurk:0123456789abcdef", "scope"),
        ("name::0123456789abcdef", "scope"),
        ("na me:work:0123456789abcdef", "name"),
        (":work:0123456789abcdef", "name"),
        ("name:work:short", "16 characters"),
        ("name:work:0123456789abcdef with spaces", "characters"),
    ],
)
def test_a_token_that_is_none_is_refused_without_repeating_it(text: str, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=wrong) as refused:
        parse_tokens(["# who", "", text], where="tokens.txt")
    assert "line 3 of tokens.txt" in str(refused.value)
    assert text.rpartition(":")[2] not in str(refused.value)


def test_a_token_file_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(InvalidRequest, match="cannot read the token file"):
        read_token_file(file)
    file.write_text("# nobody\n")
    with pytest.raises(InvalidRequest, match="no token"):
        read_token_file(file)
    file.write_text(f"a:work:{'x' * 16}\na:admin:{'y' * 16}\n")
    with pytest.raises(InvalidRequest, match="two tokens named a"):
        read_token_file(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not text"):
        read_token_file(file)
    file.write_text(f"# ours\na:work, produce:{'x' * 16}\nb:admin:{'y' * 16}\n")
    first, second = read_token_file(file)
    assert first.caller.scopes == {"work", "produce", "read"}
    assert second.caller.scopes == {"read", "produce", "bulk", "work", "admin"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "queue.example"])
def test_other_hosts_are_let_in_only_with_tokens(host: str) -> None:
    with pytest.raises(InvalidRequest, match="no token"):
        check_exposure(host, has_tokens=False)
    check_exposure(host, has_tokens=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_host_is_let_in_without(host: str) -> None:
    check_exposure(host, has_tokens=False)


# -- host and origin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7433", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_name_that_is_not_ours_is_refused(url: str, client: Client, host: str) -> None:
    """A page that made its own name lead here cannot even look."""
    assert client.get("/v1/stats", Host=host).body["code"] == "unknown_host"
    assert client.get("/health", Host=host).status == 421
    assert client.ask("POST", "/v1/jobs", {"type": "t"}, Host=host).status == 421
    assert client.ok("GET", "/v1/jobs")["jobs"] == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:7433", "[::1]:7433", "localhost."])
def test_loopback_names_are_ours(client: Client, host: str) -> None:
    assert client.get("/v1/stats", Host=host).status == 200


def test_names_that_were_told_are_ours() -> None:
    with (
        running_broker(
            "memory://", host_names=("Queue.Example",), advertise="http://broker-1.internal:7433"
        ) as url,
        Client(url) as client,
    ):
        for host in ("queue.example", "queue.example:7433", "broker-1.internal:7433"):
            assert client.get("/v1/stats", Host=host).status == 200
        assert client.get("/v1/stats", Host="other.example").status == 421


def test_two_hosts_or_none_are_refused(url: str) -> None:
    request = b"GET /v1/stats HTTP/1.1\r\nConnection: close\r\n%s\r\n"
    assert b" 421 " in raw(url, request % b"").splitlines()[0]
    assert b" 421 " in raw(url, request % b"Host: localhost\r\nHost: localhost\r\n").splitlines()[0]


def test_the_address_that_was_connected_to_is_ours() -> None:
    hosts = KnownHosts()
    assert hosts.knows(b"192.0.2.7:7433", "192.0.2.7")
    assert not hosts.knows(b"192.0.2.8:7433", "192.0.2.7")
    assert not hosts.knows(b"evil.example", "192.0.2.7")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://localhost",
        "http://localhost:9",
        "null",
        "file://",
        "http://localhost.evil.example",
        "chrome-extension://abc",
        "http://[",
        "",
    ],
)
def test_a_page_of_another_origin_changes_nothing(client: Client, origin: str) -> None:
    for method, path in (("POST", "/v1/jobs"), ("PUT", "/v1/queues/q"), ("POST", "/v1/driver/enqueue")):
        answer = client.ask(method, path, {"type": "t"}, Origin=origin)
        assert (answer.status, answer.body["code"]) == (403, "bad_origin")
    looked = client.get("/v1/jobs", Origin=origin)
    assert looked.body["jobs"] == []
    # Nothing lets the page read what it asked for.
    assert not [name for name in looked.headers if name.startswith("access-control-")]


def test_a_page_of_the_brokers_own_may(url: str, client: Client) -> None:
    assert client.ask("POST", "/v1/jobs", {"type": "t"}, Origin=url).status == 201
    proxied = client.ask("POST", "/v1/jobs", {"type": "t"}, Origin="https://localhost", Host="localhost")
    assert proxied.status == 201


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"]
)
def test_a_body_that_a_foreign_page_could_send_unasked_is_refused(client: Client, kind: str) -> None:
    answer = client.ask("POST", "/v1/jobs", data=b'{"type":"t"}', Content_Type=kind)
    assert (answer.status, answer.body["code"]) == (415, "unsupported_media_type")
    assert client.ask("POST", "/v1/jobs/x/cancel", data=b"{}", Content_Type=kind).status == 415


def test_every_answer_forbids_guessing_and_keeping(client: Client) -> None:
    for answer in (client.get("/v1/stats"), client.get("/nowhere"), client.post("/v1/jobs", [])):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


# -- limits -------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow() -> Iterator[str]:
    with running_broker(
        "memory://", max_body_bytes=2000, max_depth=8, max_batch=3, max_header_bytes=1000, body_seconds=0.05
    ) as url:
        yield url


def test_a_body_that_says_it_is_too_large_is_refused_unread(narrow: str) -> None:
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %s\r\n\r\n"
    for length in (b"2001", b"999999999999999999999999999"):
        answer = raw(narrow, head % length)
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_body_that_grows_too_large_is_refused_on_the_way(narrow: str) -> None:
    """Sent in pieces without a length, so only counting helps."""
    piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(narrow, head + piece * 50 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    with Client(narrow) as client:
        assert client.ok("GET", "/v1/jobs")["jobs"] == []


def test_a_large_body_gets_its_answer_not_a_broken_pipe(narrow: str) -> None:
    with Client(narrow) as client:
        answer = client.ask("POST", "/v1/jobs", data=b" " * 5_000_000, Content_Type="application/json")
        assert (answer.status, answer.body["code"]) == (413, "too_large")


def test_a_body_that_does_not_come_is_not_waited_for(narrow: str) -> None:
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    assert raw(narrow, head + b'{"type"').startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("place", ["payload", "result", "progress"])
def test_what_is_nested_too_deep_is_refused(narrow: str, place: str) -> None:
    deep, allowed = "[" * 9 + "]" * 9, "[" * 8 + "]" * 8
    paths = {
        "payload": "/v1/jobs",
        "result": "/v1/jobs/x/complete",
        "progress": "/v1/jobs/x/heartbeat",
    }
    given = '"type":"t"' if place == "payload" else '"token":"t"'
    with Client(narrow) as client:

        def send(value: str) -> Answer:
            data = f'{{{given},"{place}":{value}}}'.encode()
            return client.ask("POST", paths[place], data=data, Content_Type="application/json")

        assert send(deep).body["code"] == "too_deep"
        assert send(allowed).status in (201, 404)
        assert send('"' + "[" * 50 + '"').status in (201, 404)
        assert send("[" * 900 + "]" * 900).status == 422


@pytest.mark.parametrize(
    ("place", "path", "most"),
    [
        ("payload", "/v1/jobs", 1_048_576),
        ("result", "/v1/jobs/x/complete", 65_536),
        ("progress", "/v1/jobs/x/heartbeat", 4096),
    ],
)
def test_a_value_that_is_too_large_is_refused_before_it_is_read(
    client: Client, place: str, path: str, most: int
) -> None:
    """Reading many megabytes of brackets would keep all other callers waiting."""
    given = '"type":"t"' if place == "payload" else '"token":"t"'

    def send(value: str) -> Answer:
        data = f'{{{given},"{place}":{value}}}'.encode()
        return client.ask("POST", path, data=data, Content_Type="application/json")

    assert send("[" * 65 + " " * (most - 130) + "]" * 65).body["code"] == "too_deep"
    answer = send("[" * 65 + " " * most + "]" * 65)
    assert (answer.status, answer.body["code"]) == (422, "invalid_request")
    assert f"at most {most} are" in answer.body["detail"]


def test_a_nest_that_would_overflow_the_stack_is_refused(client: Client) -> None:
    for data in (
        b"[" * 200_000,
        b'{"type":"t","payload":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ):
        assert client.ask("POST", "/v1/jobs", data=data, Content_Type="application/json").status in (400, 422)
    assert client.get("/health").status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", {"jobs": [{"type": "t"}] * 4}),
        ("/v1/jobs/heartbeat", {"jobs": [{"id": "x", "token": "t"}] * 4}),
        ("/v1/jobs/settle", {"settlements": [{"action": "complete", "id": "x", "token": "t"}] * 4}),
        ("/v1/jobs/cancel", {"ids": ["x"] * 4}),
        ("/v1/jobs/requeue", {"ids": ["x"] * 4}),
    ],
)
def test_a_batch_that_is_too_long_is_refused(narrow: str, path: str, body: object) -> None:
    with Client(narrow) as client:
        answer = client.post(path, body)
        assert (answer.status, answer.body["code"]) == (413, "too_many_items")
        assert client.ok("GET", "/v1/jobs")["jobs"] == []


def test_headers_that_are_too_long_are_refused(narrow: str) -> None:
    request = b"GET /v1/stats%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n"
    assert raw(narrow, request % (b"", b"X: %s\r\n" % (b"x" * 800))).startswith(b"HTTP/1.1 200")
    assert raw(narrow, request % (b"", b"X: %s\r\n" % (b"x" * 1000))).startswith(b"HTTP/1.1 431")
    assert raw(narrow, request % (b"", b"X: y\r\n" * 300)).startswith(b"HTTP/1.1 431")
    assert raw(narrow, request % (b"?" + b"q" * 1000, b"")).startswith(b"HTTP/1.1 431")


def test_a_header_that_never_ends_is_cut(narrow: str) -> None:
    assert raw(narrow, b"GET / HTTP/1.1\r\nX: " + b"x" * 3000).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "after it"])
@pytest.mark.parametrize("trailers", [b"x: y\r\n" * 50_000, b"x: " + b"y" * 300_000], ids=["many", "endless"])
def test_trailers_that_are_too_long_are_cut(url: str, trailers: bytes, answered: bool) -> None:
    """The fields after the last piece of a body are headers too, and the parser keeps them."""
    path = b"/nowhere" if answered else b"/v1/jobs"
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n")
        answer = connection.recv(65536) if answered else b""
        # The broker hangs up on a client that is still sending.
        with suppress(ConnectionError):
            connection.sendall(trailers)
            while piece := connection.recv(65536):
                answer += piece
        assert answered == answer.startswith(b"HTTP/1.1 404")


def test_trailers_that_are_short_are_let_pass(narrow: str) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(narrow, head + b"0\r\nx: y\r\n\r\n").startswith(b"HTTP/1.1 404")


def test_who_says_nothing_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_seconds", 0.01)
    with running_broker("memory://") as url:
        assert raw(url, b"") == b""
        assert raw(url, b"GET /health HT") == b""


def test_what_strangers_send_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), running_broker("memory://") as url:
        assert raw(url, b"this is no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(url, b"GET /x HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 421"
        )
    assert not [
        record
        for record in caplog.records
        if record.levelno >= logging.INFO and "rocess" not in record.message
    ]


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_more_connections_than_allowed_are_closed() -> None:
    with broker_thread("memory://", max_connections=2) as broker:
        parts = urlsplit(broker.url)
        state = broker.server.server_state
        with socket.create_connection((parts.hostname, parts.port)), Client(broker.url) as client:
            assert client.get("/health").status == 200
            with suppress(ConnectionError):
                assert raw(broker.url, HEALTH) == b""
            wait_until(broker, lambda: len(state.connections) == 2)
            assert client.get("/health").status == 200


def test_more_calls_at_once_than_allowed_are_told_to_come_back() -> None:
    with (
        broker_thread("memory://", max_requests=1) as broker,
        ThreadPoolExecutor() as pool,
        Client(broker.url) as first,
        Client(broker.url) as second,
    ):
        claimed = pool.submit(first.claim, wait_seconds=PATIENCE)
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        refused = second.post("/v1/jobs", {"type": "t"})
        assert (refused.status, refused.body["code"]) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert second.get("/health").status == 200
        broker.loop.call_soon_threadsafe(broker.server.stop)
        assert claimed.result(PATIENCE) == []


def test_a_token_that_calls_too_often_is_told_when_to_come_back() -> None:
    with (
        running_broker("memory://", tokens=TOKENS, rate=0.001, burst=2) as url,
        Client(url, secret=SECRETS["work"]) as busy,
        Client(url, secret=SECRETS["admin"]) as other,
    ):
        assert [busy.get("/v1/time").status for _ in range(3)] == [200, 200, 429]
        refused = busy.get("/v1/time")
        assert refused.body["code"] == "rate_limited"
        assert int(refused.headers["retry-after"]) > 500
        assert other.get("/v1/time").status == 200
        assert busy.get("/health").status == 200


def test_a_bucket_fills_at_its_rate_and_holds_its_burst() -> None:
    now = 100.0
    rates = Rates(8, 3, lambda: now)
    assert [rates.take("a") for _ in range(4)] == [0, 0, 0, 0.125]
    assert rates.take("b") == 0
    now += 0.125
    assert [rates.take("a") == 0 for _ in range(2)] == [True, False]
    now += 1000
    assert [rates.take("a") == 0 for _ in range(4)] == [True, True, True, False]


def test_guessing_tokens_becomes_slow() -> None:
    with (
        running_broker("memory://", tokens=TOKENS) as url,
        Client(url, secret="a-guess-0123456789") as guessing,
    ):
        statuses = [guessing.get("/v1/time").status for _ in range(40)]
        assert statuses[:20] == [401] * 20
        assert 429 in statuses
        # The right ones go on.
        with Client(url, secret=SECRETS["work"]) as client:
            assert client.get("/v1/time").status == 200


# -- TLS ----------------------------------------------------------------------------------------------------


def test_over_tls_only_who_knows_the_certificate_is_sure(certificate: Certificate) -> None:
    with running_broker("memory://", tls=(certificate.chain, certificate.key)) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate.authority)
        with urllib.request.urlopen(f"{url}/health", context=trusting) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/health")
        assert not raw(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 2")


# -- what is not expected -------------------------------------------------------------------------------------


CANARY = "yranac-a-si-siht"
"""Written backwards, since a traceback shows the line of the code."""


class Broken(MemoryDriver):
    async def stats(self, **_: object) -> object:  # type: ignore[override]
        raise RuntimeError(CANARY[::-1])


def test_an_error_nobody_expected_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), running_broker(Broken()) as url, Client(url) as client:
        answer = client.get("/v1/stats")
        assert (answer.status, answer.body["code"]) == (500, "internal")
        assert CANARY[::-1] not in str(answer)
        assert client.get("/v1/time").status == 200
    assert CANARY[::-1] not in caplog.text
    assert "RuntimeError in GET /v1/stats" in caplog.text


def test_a_path_begins_no_line_of_its_own_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenQueues(MemoryDriver):
        async def settings(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise RuntimeError

    with caplog.at_level(logging.DEBUG), running_broker(BrokenQueues()) as url, Client(url) as client:
        assert client.get("/v1/queues/x%0Aforged").status == 500
    assert "/v1/queues/x" in caplog.text
    assert "\nforged" not in caplog.text


def test_the_table_of_operations_has_no_name_and_no_place_twice() -> None:
    def places(operations: tuple[Route, ...]) -> list[tuple[str, str]]:
        return [(one.method, one.path) for one in operations]

    assert len({one.name for one in ROUTES}) == len(ROUTES)
    assert len(set(places(ROUTES))) == len(ROUTES)
