"""Who may call, from where, and how much. Every rule has a test that fails without it."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import taskharbor.broker.tokens as tokens
from broker.broker_client import Answer, Client, Direct, Unwell
from broker.broker_loops import PATIENCE, rounds_until, wait_until, waiting_claim
from needing import Certificate
from taskharbor.broker import calls, server
from taskharbor.broker.admission import host_names, is_known_host
from taskharbor.broker.config import Rates
from taskharbor.broker.routes import ROUTES
from taskharbor.broker.server import BoundedProtocol, check_exposure
from taskharbor.broker.tokens import find_caller, parse_token, read_token_file
from taskharbor.drivers.operations import OPERATIONS, Settings, Stats
from taskharbor.errors import InvalidRequest
from taskharbor.testing.broker import broker_thread, running_broker

SECRETS = {name: f"{name}-secret-0123456789" for name in ("read", "produce", "work", "admin")}
TOKENS = tuple(parse_token(f"{name}-er:{name}:{secret}") for name, secret in SECRETS.items())


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with running_broker("memory://", tokens=TOKENS) as url:
        yield url


POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n\r\n"


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)


def raw(url: str, data: bytes) -> bytes:
    """Send bytes as they are; all that comes back until the server hangs up."""
    with connected(url) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


# -- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        None,
        *("Bearer wrong-secret-0123456789", f"Bearer {SECRETS['work'][:-1]}", "Bearer ", "Bearer"),
        *("Basic d29yazp3b3Jr", SECRETS["work"], f"Token {SECRETS['work']}"),
    ],
)
async def test_without_a_right_bearer_token_nothing_is_answered(header: str | None) -> None:
    direct = Direct(tokens=TOKENS)
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/v1/stats"), ("POST", "/v1/jobs"), ("POST", "/v1/driver/time")):
        answer = await direct.ask(method, path, **headers)
        assert answer.refusal == (401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert ("no token was sent" in answer.body["detail"]) == (header is None)
        assert ("token file" in answer.body["hint"]) == (header is not None)
    for path in ("/health", "/ready"):
        assert (await direct.ask("GET", path, **headers)).status == 200


def test_a_token_that_comes_twice_is_none(guarded: str) -> None:
    head = b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer %s\r\n"
    head %= SECRETS["work"].encode()
    assert raw(guarded, head + b"\r\n").startswith(b"HTTP/1.1 200")
    assert raw(guarded, head + b"Authorization: Bearer other\r\n\r\n").startswith(b"HTTP/1.1 401")


NEEDED = [(one.method, one.path, one.scope) for one in ROUTES if not one.is_public] + [
    ("POST", f"/v1/driver/{name}", call.scope) for name, call in OPERATIONS.items()
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_token_opens_what_its_scope_says_and_no_more(guarded: str, name: str) -> None:
    with Client(guarded, secret=SECRETS[name]) as client:
        for method, path, scope in NEEDED:
            path = path.replace("{id}", "x").replace("{name}", "x")
            answer = client.ask(method, path, data=b"?" if method != "GET" else None)
            is_allowed = scope == "read" or name in (scope, "admin")
            assert (answer.status != 403) == is_allowed, (path, answer)
            if not is_allowed:
                assert answer.body["code"] == "forbidden"
                assert scope in answer.body["hint"]


@pytest.mark.parametrize("name", SECRETS)
def test_a_lease_token_is_shown_to_the_worker_that_claims_and_to_nobody_else(guarded: str, name: str) -> None:
    with Client(guarded, secret=SECRETS["admin"]) as client:
        job_id = client.submit(queue=name)
        (claimed,) = client.claim(queue=name)
        now = client.ok("GET", "/v1/time")["microseconds"]
    with Client(guarded, secret=SECRETS[name]) as client:
        (job, nobody) = client.ok("POST", "/v1/driver/get", {"job_ids": [job_id, "nobody"], "now": now})
        page = client.ok("POST", "/v1/driver/list_jobs", {"selection": {"queue": name}, "now": now})
    assert claimed["token"]
    assert nobody is None
    assert page == {"jobs": [job], "cursor": None}
    assert (job["id"], job["state"], job["token"]) == (job_id, "inflight", None)


def test_every_token_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes must not say which one matched, or how far."""
    compared: list[bytes] = []

    class Spied:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.extend((a, b))
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(tokens, "hmac", Spied)
    for secret, name in ((SECRETS["read"], "read-er"), ("nobody", None)):
        compared.clear()
        caller = find_caller(TOKENS, f"Bearer {secret}".encode())
        assert (caller and caller.name) == name
        assert [len(one) for one in compared] == [32] * 2 * len(TOKENS)
    # Only digests are kept.
    assert SECRETS["work"] not in repr(TOKENS)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "cannot read the token file"),
        (b"# nobody", "no token"),
        (b"\xff\xfe", "not text"),
        (b"a:work:xxxxxxxxxxxxxxxx\na:admin:yyyyyyyyyyyyyyyy", "two tokens named a"),
        (b"just-a-secret-0123456789", "line 3 of .*form"),
        (b"name:work", "line 3 of .*form"),
        (b"name:wurk:0123456789abcdef", "line 3 of .*scope"),
        (b"name::0123456789abcdef", "line 3 of .*scope"),
        (b"na me:work:0123456789abcdef", "line 3 of .*name"),
        (b":work:0123456789abcdef", "line 3 of .*name"),
        (b"name:work:short", "line 3 of .*16 characters"),
        (b"name:work:0123456789abcdef with spaces", "line 3 of .*characters"),
    ],
)
def test_a_token_file_that_is_none_is_refused_without_repeating_it(
    tmp_path: Path, text: bytes | None, wrong: str
) -> None:
    if text is not None:
        (tmp_path / "tokens").write_bytes(b"# who\n\n" + text)
    with pytest.raises(InvalidRequest, match=wrong) as refused:
        read_token_file(tmp_path / "tokens")
    assert text is None or text.rpartition(b":")[2] not in str(refused.value).encode()


def test_a_scope_brings_what_it_implies(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# ours\na:work, produce:{'x' * 16}\nb:admin:{'y' * 16}\n")
    first, second = read_token_file(tmp_path / "tokens")
    assert first.caller.scopes == {"work", "produce", "read"}
    assert second.caller.scopes == {"read", "produce", "bulk", "work", "admin"}


def test_other_hosts_are_let_in_only_with_tokens() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_exposure(host, has_tokens=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "queue.example"):
        check_exposure(host, has_tokens=True)
        with pytest.raises(InvalidRequest, match="no token"):
            check_exposure(host, has_tokens=False)


# -- host and origin ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    names = {"host_names": ("Queue.Example",), "advertise": "http://broker-1.internal:7433"}
    with running_broker("memory://", **names) as url:
        yield url


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7433", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_name_that_is_not_ours_is_refused(named: str, host: str) -> None:
    """A page that made its own name lead here cannot even look."""
    with Client(named) as client:
        for answer in (
            client.get("/v1/stats", Host=host),
            client.get("/health", Host=host),
            client.post("/v1/jobs", {"type": "t"}, Host=host),
        ):
            assert answer.refusal == (421, "unknown_host")
        assert client.jobs() == []


def test_loopback_names_that_were_told_and_the_address_that_was_connected_to_are_ours(named: str) -> None:
    with Client(named) as client:
        for host in (
            *("localhost", "LOCALHOST:1", "127.0.0.1:7433", "[::1]:7433", "localhost."),
            *("queue.example", "queue.example:7433", "broker-1.internal:7433"),
        ):
            assert client.get("/v1/stats", Host=host).status == 200, host
    hosts = (b"192.0.2.7:7433", b"192.0.2.8:7433", b"evil.example", None)
    assert [is_known_host(host, host_names(()), "192.0.2.7") for host in hosts] == [True, False, False, False]


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "https://localhost", "http://localhost:9", "http://localhost.evil.example"),
        *("null", "file://", "chrome-extension://abc", "http://[", ""),
    ],
)
def test_a_page_of_another_origin_changes_nothing(client: Client, origin: str) -> None:
    for method, path in (("POST", "/v1/jobs"), ("PATCH", "/v1/queues/q"), ("POST", "/v1/driver/enqueue")):
        assert client.ask(method, path, {"type": "t"}, Origin=origin).refusal == (403, "bad_origin")
    looked = client.get("/v1/jobs", Origin=origin)
    assert looked.body["jobs"] == []
    # Nothing lets the page read what it asked for.
    assert not [name for name in looked.headers if name.startswith("access-control-")]


def test_a_page_of_the_brokers_own_may(url: str, client: Client) -> None:
    proxied = {"Origin": "https://localhost", "Host": "localhost"}
    for headers in ({"Origin": url}, proxied):
        assert client.post("/v1/jobs", {"type": "t"}, **headers).status == 201


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"]
)
def test_a_body_that_a_foreign_page_could_send_unasked_is_refused(client: Client, kind: str) -> None:
    answer = client.ask("POST", "/v1/jobs", data=b'{"type":"t"}', Content_Type=kind)
    assert answer.refusal == (415, "unsupported_media_type")
    for data in (b"{}", b""):
        assert client.ask("POST", "/v1/jobs/x/cancel", data=data, Content_Type=kind).status == 415


def test_settings_make_no_more_new_queues_than_jobs_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "NEW_QUEUES_AT_ONCE", 1)
    monkeypatch.setattr(calls, "NEW_QUEUES_PER_SECOND", 1e-6)
    with running_broker("memory://") as url, Client(url) as client:
        answers = [client.ask("PATCH", f"/v1/queues/{name}", {"create": True}) for name in "aab"]
        assert [one.status for one in answers] == [200, 200, 429]
        assert [one["queue"] for one in client.ok("GET", "/v1/stats")["queues"]] == ["a"]


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


GET = b"GET /v1/stats%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s"
CHUNKED = (
    b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        # A body that says that it is too large, that grows too large on the way, and that does not come.
        (POST % b"Content-Length: 2001", b"413"),
        (POST % b"Content-Length: 999999999999999999999999999", b"400"),
        (POST % b"Transfer-Encoding: chunked" + b"3e8\r\n%s\r\n" % (b" " * 1000) * 50 + b"0\r\n\r\n", b"413"),
        (POST % b"Content-Length: 100" + b'{"type"', b"408"),
        # Headers that are long enough, too long, too many, in the query, and without an end.
        (GET % (b"", b"X: %s\r\n\r\n" % (b"x" * 800)), b"200"),
        (GET % (b"", b"X: %s\r\n\r\n" % (b"x" * 1000)), b"431"),
        (GET % (b"", b"X: y\r\n" * 300 + b"\r\n"), b"431"),
        (GET % (b"?" + b"q" * 1000, b"\r\n"), b"431"),
        (GET % (b"", b"X: " + b"x" * 3000), b"431"),
        # Trailers, which are headers too.
        (CHUNKED + b"0\r\nx: y\r\n\r\n", b"404"),
        # No host, and two.
        (b"GET /v1/stats HTTP/1.1\r\nConnection: close\r\n\r\n", b"421"),
        (GET % (b"", b"Host: localhost\r\n\r\n"), b"421"),
    ],
)
def test_a_request_that_no_client_should_send_is_cut(
    narrow: str, request_bytes: bytes, status: bytes
) -> None:
    assert raw(narrow, request_bytes).startswith(b"HTTP/1.1 " + status)
    with Client(narrow) as client:
        assert client.jobs() == []


@pytest.mark.parametrize(
    ("place", "path", "needed", "most"),
    [
        ("payload", "/v1/jobs", "type", 1_048_576),
        ("result", "/v1/jobs/x/complete", "token", 65_536),
        ("progress", "/v1/jobs/x/heartbeat", "token", 4096),
    ],
)
def test_a_value_that_is_nested_too_deep_or_too_large_is_refused(
    url: str, narrow: str, place: str, path: str, needed: str, most: int
) -> None:
    """The size is looked at first: reading many megabytes of brackets would keep all other callers waiting."""

    def send(client: Client, value: str) -> Answer:
        return client.ask("POST", path, data=f'{{"{needed}":"t","{place}":{value}}}'.encode())

    with Client(narrow) as client:
        assert send(client, "[" * 9 + "]" * 9).body["code"] == "too_deep"
        assert send(client, "[" * 8 + "]" * 8).status in (201, 404)
        assert send(client, '"' + "[" * 50 + '"').status in (201, 404)
        assert send(client, "[" * 900 + "]" * 900).status == 422
    with Client(url) as client:
        assert send(client, "[" * 65 + " " * (most - 130) + "]" * 65).body["code"] == "too_deep"
        answer = send(client, "[" * 65 + " " * most + "]" * 65)
        assert answer.refusal == (422, "invalid_request")
        assert f"at most {most} are" in answer.body["detail"]


def test_a_large_body_gets_its_answer_and_a_nest_overflows_no_stack(client: Client, narrow: str) -> None:
    with Client(narrow) as small:
        answer = small.ask("POST", "/v1/jobs", data=b" " * 5_000_000)
        assert answer.refusal == (413, "too_large"), "not a broken pipe"
    nest = b'{"type":"t","payload":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"
    for data in (b"[" * 200_000, nest):
        assert client.ask("POST", "/v1/jobs", data=data).status in (400, 422)
    assert client.get("/health").status == 200


def test_a_batch_that_is_too_long_is_refused(narrow: str) -> None:
    with Client(narrow) as client:
        for path, body in (
            ("", {"jobs": [{"type": "t"}] * 4}),
            ("/heartbeat", {"jobs": [{"id": "x", "token": "t"}] * 4}),
            ("/settle", {"settlements": [{"action": "complete", "id": "x", "token": "t"}] * 4}),
            *((action, {"ids": ["x"] * 4}) for action in ("/cancel", "/requeue")),
        ):
            assert client.post(f"/v1/jobs{path}", body).refusal == (413, "too_many_items"), path
        assert client.jobs() == []


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "after it"])
@pytest.mark.parametrize("trailers", [b"x: y\r\n" * 50_000, b"x: " + b"y" * 300_000], ids=["many", "endless"])
def test_trailers_that_are_too_long_are_cut(url: str, trailers: bytes, answered: bool) -> None:
    """The fields after the last piece of a body are headers too, and the parser keeps them."""
    path = b"/nowhere" if answered else b"/v1/jobs"
    head = CHUNKED.replace(b"Connection: close\r\n", b"").replace(b"/nowhere", path)
    with connected(url) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n")
        answer = connection.recv(65536) if answered else b""
        # The broker hangs up on a client that is still sending.
        with suppress(ConnectionError):
            connection.sendall(trailers)
            while piece := connection.recv(65536):
                answer += piece
        assert answered == answer.startswith(b"HTTP/1.1 404")


def test_who_says_nothing_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_seconds", 0.01)
    with running_broker("memory://") as url:
        assert raw(url, b"") == b""
        assert raw(url, b"GET /health HT") == b""


def test_what_strangers_send_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    foreign = b"GET /x HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    with caplog.at_level(logging.INFO), running_broker("memory://") as url:
        assert raw(url, b"this is no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(url, foreign).startswith(b"HTTP/1.1 421")
    assert not [record for record in caplog.records if "rocess" not in record.message]


def test_more_connections_than_allowed_are_closed() -> None:
    with broker_thread("memory://", max_connections=2) as broker:
        state = broker.server.server_state
        with connected(broker.url), Client(broker.url) as client:
            assert client.get("/health").status == 200
            with suppress(ConnectionError):
                assert raw(broker.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
            wait_until(broker, lambda: len(state.connections) == 2)
            assert client.get("/health").status == 200


def test_a_handshake_that_does_not_end_counts_and_is_cut(
    monkeypatch: pytest.MonkeyPatch, certificate: Certificate
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    tls = ssl.create_default_context(cafile=str(certificate.authority))
    with broker_thread("memory://", max_connections=3, tls=(certificate.chain, certificate.key)) as broker:
        with ExitStack() as stack:
            silent = [stack.enter_context(connected(broker.url)) for _ in range(20)]
            # All but three are closed at once, and those when their time is over.
            assert [connection.recv(1) for connection in silent] == [b""] * 20
        with (
            connected(broker.url) as plain,
            tls.wrap_socket(plain, server_hostname="127.0.0.1") as open_to_all,
        ):
            open_to_all.sendall(GET.replace(b"%s", b"") + b"\r\n")
            assert open_to_all.recv(65536).startswith(b"HTTP/1.1 200")


def test_connections_leave_files_to_the_store_and_a_network_counts_as_one_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = pytest.importorskip("resource")
    for files, most in ((1024, 896), (100, 36), (10, 1), (resource.RLIM_INFINITY, 4096), (65_536, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert server.most_connections(4096) == most
    places = ["192.0.2.1", "2001:db8::1", "2001:db8::2%eth0", "::ffff:192.0.2.1", "nothing"]
    network = "2001:db8::/64"
    assert list(map(server.place_of, places)) == ["192.0.2.1", network, network, "192.0.2.1", "nothing"]


async def test_a_failing_accept_is_tried_again_and_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the process has no file left."""
    monkeypatch.setattr(server, "_ACCEPT_AGAIN_SECONDS", 0.0)
    app, tried = Direct().app, 0

    async def fail(listener: socket.socket) -> Any:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise OSError(errno.EMFILE, "no file left")
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "sock_accept", fail)
    with socket.socket() as listener:
        accepting = asyncio.create_task(server.Door(listener, BoundedProtocol, app).run(None))
        await rounds_until(lambda: tried == 3)
        accepting.cancel()
    assert [one.getMessage() for one in caplog.records] == [
        "cannot accept connections: no file left; trying again"
    ] * 2


def test_more_calls_at_once_than_allowed_are_told_to_come_back() -> None:
    with waiting_claim(max_requests=1) as (broker, claimed, second):
        refused = second.post("/v1/jobs", {"type": "t"})
        assert refused.refusal == (429, "too_many_requests")
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


# -- what is not expected -------------------------------------------------------------------------------------


CANARY = "this-is-a-canary"


def test_an_error_nobody_expected_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    broken = Unwell(RuntimeError(CANARY), Stats, Settings)
    with caplog.at_level(logging.DEBUG), running_broker(broken) as url, Client(url) as client:
        # A path begins no line of its own in the log.
        for path in ("/v1/stats", "/v1/queues/x%0Aforged"):
            answer = client.get(path)
            assert answer.refusal == (500, "internal")
            assert CANARY not in str(answer)
        assert client.get("/v1/time").status == 200
    assert CANARY not in caplog.text
    assert "RuntimeError in GET /v1/stats" in caplog.text
    assert "/v1/queues/x" in caplog.text
    assert "\nforged" not in caplog.text


def test_the_table_of_routes_has_no_place_twice_and_no_change_for_readers() -> None:
    assert len({one.name for one in ROUTES}) == len({(one.method, one.path) for one in ROUTES}) == len(ROUTES)
    assert all((one.scope == "read") == (one.method == "GET") for one in ROUTES)
