"""The health endpoint: what it answers, to whom, and what it keeps to itself."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from taskharbor.errors import InvalidRequest
from taskharbor.worker.health import HealthServer, is_loopback, parse_address


class State:
    ready = True


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, lambda: (state.ready, {"worker": "w", "held": 3}))
    server.start()
    yield server
    server.stop()


def ask(server: HealthServer, method: str, path: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        return response.status, dict(response.getheaders()), json.loads(body) if body else None
    finally:
        connection.close()


def test_alive_whatever_the_backend_does(server: HealthServer, state: State) -> None:
    state.ready = False
    status, headers, document = ask(server, "GET", "/health")
    assert (status, document["status"]) == (200, "alive")
    assert headers["Content-Type"] == "application/json"
    assert headers["Server"] == "taskharbor"


def test_ready_only_while_it_is(server: HealthServer, state: State) -> None:
    assert ask(server, "GET", "/ready")[0] == 200
    state.ready = False
    status, _, document = ask(server, "GET", "/ready?probe=1")
    assert (status, document["status"], document["held"]) == (503, "not ready", 3)


def test_head_has_no_body(server: HealthServer) -> None:
    status, headers, document = ask(server, "HEAD", "/ready")
    assert (status, document) == (200, None)
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(server: HealthServer, method: str) -> None:
    status, headers, _ = ask(server, method, "/ready")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/metrics", "/health/../ready", "/healthy"])
def test_other_paths_are_not_found(server: HealthServer, path: str) -> None:
    assert ask(server, "GET", path)[0] == 404


def test_addresses() -> None:
    assert parse_address("8080") == ("127.0.0.1", 8080)
    assert parse_address(":8080") == ("127.0.0.1", 8080)
    assert parse_address("localhost:1") == ("localhost", 1)
    assert parse_address("[::1]:8080") == ("::1", 8080)
    assert parse_address("0.0.0.0:80", public=True) == ("0.0.0.0", 80)
    for bad in ("0.0.0.0:80", "example.com:80", "[::]:80", "x", "1.2.3.4", ":99999", "127.0.0.1:"):
        with pytest.raises(InvalidRequest):
            parse_address(bad)
    assert not is_loopback("10.0.0.1")


def test_a_worker_becomes_ready_and_says_nothing_of_its_store() -> None:
    import threading

    from taskharbor.drivers.contract import Woken
    from taskharbor.drivers.memory import MemoryDriver
    from taskharbor.worker import Worker

    serving = threading.Event()

    class Driver(MemoryDriver):
        async def wait(self, *args: Any, **kwargs: Any) -> Woken:
            serving.set()
            return await super().wait(*args, **kwargs)

    worker = Worker(Driver(), name="w")
    server = HealthServer("127.0.0.1", 0, lambda: (bool(worker.snapshot()["serving"]), worker.snapshot()))
    server.start()
    thread = threading.Thread(target=worker.run)
    try:
        assert ask(server, "GET", "/ready")[0] == 503
        thread.start()
        assert serving.wait(10)
        status, _, document = ask(server, "GET", "/ready")
        assert (status, document["worker"]) == (200, "w")
        assert "url" not in json.dumps(document)
    finally:
        worker.stop()
        thread.join(10)
        server.stop()
