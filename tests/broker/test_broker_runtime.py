"""What runs beside the requests, and what is said when the store is not well."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any
from unittest.mock import AsyncMock

import pytest

from broker.broker_client import Client, Unwell
from broker.broker_loops import wait_until
from taskharbor.broker.app import make_app, openapi_document
from taskharbor.broker.routes import ROUTES
from taskharbor.clock import FakeClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.testing.broker import broker_thread, running_broker


def test_expired_leases_are_ended_though_nobody_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of ours sweep on the side; clients in other languages do not."""
    monkeypatch.setattr("taskharbor.broker.runtime.TEND_SECONDS", 0.001)
    clock = FakeClock()
    with broker_thread("memory://", clock=clock) as broker, Client(broker.url) as client:
        job_id = client.submit(max_attempts=1)
        client.claim(lease_seconds=10)
        clock.advance(11)
        assert any(client.job(job_id)["state"] == "dead" for _ in range(10_000)), "nobody swept"


def test_where_clients_bring_their_own_time_nothing_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.runtime.TEND_SECONDS", 0.0)
    turns, driver = itertools.count(), MemoryDriver()
    sweep = AsyncMock()
    monkeypatch.setattr(driver, "reclaim", sweep)
    with broker_thread(driver, clock=FakeClock(), trust_client_time=True) as broker:
        wait_until(broker, lambda: next(turns) > 1000)
    sweep.assert_not_called()


def test_a_store_that_does_not_answer_is_told_apart_from_a_wrong_request() -> None:
    driver = Unwell()
    with running_broker(driver, sweeps=False) as url, Client(url) as client:
        assert client.get("/ready").status == 200
        driver.error = BackendUnavailable("at 10.0.0.7:5432: connection refused")
        answer = client.get("/v1/stats")
        assert answer.refusal == (503, "backend_unavailable")
        assert answer.headers["retry-after"] == "1"
        # Where the store is, is nobody's business.
        assert "10.0.0.7" not in str(answer.body)
        ready = client.get("/ready")
        assert (ready.status, ready.body["reason"]) == (503, "the store does not answer")
        assert client.get("/health").status == 200
        driver.error = SchemaMismatch("old")
        assert client.get("/v1/stats").refusal == (503, "schema_mismatch")
        driver.error = None
        assert client.get("/v1/stats").status == 200
    # At the start it is no broker.
    driver.error = BackendUnavailable("nobody is there")
    with pytest.raises(BackendUnavailable, match="nobody is there"), running_broker(driver):
        pass


def test_a_broker_that_is_stopping_takes_no_new_calls() -> None:
    with broker_thread("memory://") as broker, Client(broker.url) as client:
        broker.app.service.stopping.set()
        assert client.post("/v1/jobs", {"type": "t"}).refusal == (503, "stopping")
        assert client.get("/ready").status == 503


async def test_an_application_opens_and_closes_the_driver_with_the_server() -> None:
    driver = AsyncMock(MemoryDriver(), **{"time.return_value": 0})
    said: asyncio.Queue[Any] = asyncio.Queue()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(make_app(driver)({"type": "lifespan"}, said.get, heard.put))
    for event, called in (("startup", driver.open), ("shutdown", driver.close)):
        called.assert_not_called()
        await said.put({"type": f"lifespan.{event}"})
        assert await heard.get() == {"type": f"lifespan.{event}.complete"}
        called.assert_called_once()
    await life


def test_the_document_that_is_served_is_the_one_that_is_tested(client: Client) -> None:
    served = client.ok("GET", "/openapi.json")
    assert served == json.loads(json.dumps(openapi_document(ROUTES)))
    assert served["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in served["paths"].items() for method in methods}
    assert described == {(one.method, one.path) for one in ROUTES}


def test_a_wrong_method_is_told_which_are_right(client: Client) -> None:
    answer = client.ask("DELETE", "/v1/jobs")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")
    assert client.ask("HEAD", "/v1/jobs").status == 200
