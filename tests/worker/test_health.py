"""The health endpoint: what it answers, to whom, and what it keeps to itself."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from taskharbor.errors import InvalidRequest
from taskharbor.worker import Worker
from taskharbor.worker.health import HealthServer, is_loopback, parse_address
from worker.stage import eventually, running


@pytest.fixture
def worker() -> Worker:
    return Worker("memory://", name="w", every_type=True)


@pytest.fixture
def server(worker: Worker) -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, lambda: (bool(worker.snapshot()["serving"]), worker.snapshot()))
    server.start()
    yield server
    server.stop()


def ask(server: HealthServer, method: str, path: str) -> tuple[int, dict[str, str], Any]:
    with closing(http.client.HTTPConnection(server.address, timeout=10)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        return response.status, dict(response.getheaders()), json.loads(body) if body else None


async def test_a_worker_is_alive_then_ready_and_hides_its_store(server: HealthServer, worker: Worker) -> None:
    status, headers, document = ask(server, "GET", "/health")
    assert (status, document["status"]) == (200, "alive")
    assert (headers["Content-Type"], headers["Server"]) == ("application/json", "taskharbor")
    status, _, document = ask(server, "GET", "/ready?probe=1")
    assert (status, document["status"], document["held"]) == (503, "not ready", 0)
    async with running(worker):
        await eventually(lambda: bool(worker.snapshot()["serving"]))
        status, _, document = ask(server, "GET", "/ready")
        assert (status, document["worker"]) == (200, "w")
        assert "url" not in json.dumps(document)
        status, headers, document = ask(server, "HEAD", "/ready")
        assert (status, document) == (200, None)
        assert int(headers["Content-Length"]) > 0


def test_other_methods_and_paths_are_refused(server: HealthServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(server, method, "/ready")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    for path in ("/", "/metrics", "/health/../ready", "/healthy"):
        assert ask(server, "GET", path)[0] == 404


def test_addresses() -> None:
    good = {"8080": ("127.0.0.1", 8080), ":8080": ("127.0.0.1", 8080), "[::1]:8080": ("::1", 8080)}
    good["localhost:1"] = ("localhost", 1)
    assert {text: parse_address(text) for text in good} == good
    assert parse_address("0.0.0.0:80", public=True) == ("0.0.0.0", 80)
    for bad in ("0.0.0.0:80", "example.com:80", "[::]:80", "x", "1.2.3.4", ":99999", "127.0.0.1:"):
        with pytest.raises(InvalidRequest):
            parse_address(bad)
    assert not is_loopback("10.0.0.1")
