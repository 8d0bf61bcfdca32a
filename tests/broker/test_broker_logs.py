"""What a broker writes down: who asked for what and how it went. Never what a job carries, never a secret."""

from __future__ import annotations

import io
import logging
import unicodedata
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from broker.broker_client import Client
from taskharbor.broker.routes import ROUTES
from taskharbor.broker.tokens import parse_token
from taskharbor.drivers.operations import OPERATIONS
from taskharbor.testing.broker import running_broker
from taskharbor.worker.logs import JSONFormatter, TextFormatter

CANARY = "canary-5f0c9d1e"
SECRET = f"{CANARY}-secret-0123456789"


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> Iterator[Client]:
    with (
        caplog.at_level(logging.DEBUG),
        running_broker("memory://", tokens=(parse_token(f"tester:admin:{SECRET}"),), access_log=True) as url,
        Client(url, secret=SECRET) as client,
    ):
        yield client


def test_no_payload_no_secret_and_no_value_of_a_query_reaches_a_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation once with the canary wherever it fits, and once with it where it does not belong."""
    client.submit(payload={CANARY: CANARY}, headers={"x": CANARY}, key=CANARY)
    (job,) = client.claim(worker=CANARY)
    client.act(job, "heartbeat", progress=CANARY)
    client.act(job, "fail", error={"message": CANARY, "detail": CANARY})
    client.submit(type="u", payload=CANARY)
    (other,) = client.claim(types=["u"])
    client.act(other, "complete", result=CANARY)
    client.ok("GET", f"/v1/jobs?key={CANARY}&worker={CANARY}&payload=true")
    for operation in ROUTES:
        path = operation.path.replace("{id}", "x").replace("{name}", "q")
        for body in ({"jobs": CANARY}, {CANARY: CANARY}, [CANARY], {"type": CANARY, "payload": CANARY}):
            client.ask(operation.method, path, body)
        client.ask(operation.method, f"{path}?queue={CANARY}&{'x'}={CANARY}")
        client.ask(operation.method, path, data=f'"{CANARY}'.encode(), Content_Type="application/json")
    for name in OPERATIONS:
        client.ask("POST", f"/v1/driver/{name}", [CANARY])
        client.ask("POST", f"/v1/driver/{name}", data=CANARY.encode(), Content_Type="application/msgpack")
    client.get("/v1/stats", Authorization=f"Bearer wrong-{CANARY}")
    client.get("/v1/stats", Host=f"{CANARY}.example")
    client.post("/v1/jobs", {}, Origin=f"http://{CANARY}.example")
    assert CANARY not in caplog.text
    assert not [record for record in caplog.records if CANARY in str(record.args)]
    assert "POST /v1/jobs 201" in caplog.text


def test_an_access_line_says_who_what_and_how_it_went(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/v1/jobs?queue=q&limit=5", "/v1/jobs/a%0Ab", "/health"):
        client.get(path)
    lines = [one.getMessage() for one in caplog.records if one.name == "taskharbor.broker.access"]
    assert lines[0].startswith("GET /v1/jobs?queue&limit 200 ")
    assert lines[0].endswith(" ms tester")
    # A path cannot begin a line of its own.
    assert "\n" not in lines[1]


def test_lines_that_strangers_cause_are_limited_and_no_name_begins_a_line(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(300):
        client.get("/nowhere")
    client.submit()
    client.get("/health")  # Its line comes after the one before.
    lines = [one.getMessage() for one in caplog.records if one.name == "taskharbor.broker.access"]
    refused = [line for line in lines if "/nowhere 404" in line]
    assert 200 <= len(refused) < 300
    assert any(line.startswith("POST /v1/jobs 201") for line in lines)


ODD = "a\nb\r\x1b[31mc\x7f\x9b\u2028\u202e\td"


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_name_in_a_line_has_no_raw_control_character(style: Literal["text", "json"]) -> None:
    stream = io.StringIO()
    form = (JSONFormatter if style == "json" else TextFormatter)()

    def lines(logger: str, message: str, *args: Any, **extra: Any) -> str:
        record = logging.LogRecord(logger, logging.WARNING, "", 0, message, args, None)
        record.__dict__.update(extra)
        return form.format(record)

    stream.write(lines("taskharbor.worker", "job %s of %s: %s, %d", ODD, ODD, ValueError(ODD), 7))
    stream.write(lines("their.app", "fine", job_id=ODD, job_type=ODD, attempt=1, queue=ODD, worker=ODD))
    assert not [one for one in stream.getvalue() if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")]


def test_without_an_access_log_a_request_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), running_broker("memory://") as url, Client(url) as client:
        caplog.clear()
        client.get("/v1/jobs?queue=q")
        assert "/v1/jobs" not in caplog.text
