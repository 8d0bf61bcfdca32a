"""`taskharbor broker`, as a user runs it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from broker.broker_client import Client
from cli.conftest import SEPARATE
from taskharbor.cli.root import root
from taskharbor_testkit.servers.broker import broker_process

SECRET = "cli-secret-0123456789"


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """The command sets up the logger; other tests want it as it was."""
    logger = logging.getLogger("taskharbor")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.level, logger.propagate, logger.handlers = before


def refused(*arguments: str) -> Result:
    """A broker that is not to start. Of an option that is given twice, the last counts."""
    given = ["broker", "--store", "memory://", "--bind", "127.0.0.1:0", *arguments]
    return CliRunner(**SEPARATE).invoke(root, given, env={"TASKHARBOR_BROKER_TOKENS": ""})


def test_a_broker_serves_says_where_and_stops_gracefully(tmp_path: Path) -> None:
    with broker_process(f"sqlite:///{tmp_path}/jobs.db") as broker:
        with Client(broker.url) as client:
            assert client.get("/ready").status == 200
            job_id = client.submit(payload={"a": 1})
        assert broker.stop() == 0
    text = "".join(broker.lines)
    for said in (f"serving sqlite:///{tmp_path}/jobs.db at {broker.url}", "SIGTERM", "stopped"):
        assert said in text
    with broker_process(f"sqlite:///{tmp_path}/jobs.db") as again, Client(again.url) as client:
        assert client.job(job_id)["payload"] == {"a": 1}


def test_a_second_signal_stops_at_once() -> None:
    """The first one waits for a body that never comes; the second does not."""
    with broker_process("memory://", "--grace", "1h") as broker:
        port = int(broker.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stuck:
            stuck.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            )
            # It is being read now: that is what the 100 says.
            assert stuck.recv(1000).startswith(b"HTTP/1.1 100")
            broker.process.send_signal(signal.SIGINT)
            with suppress(OSError):
                while True:
                    with Client(broker.url) as client:
                        client.get("/health")
            assert broker.process.poll() is None
            broker.process.send_signal(signal.SIGINT)
            assert broker.process.wait(20) == 0


def test_tokens_come_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# the crew\ntester:admin:{SECRET}\n")
    file.chmod(0o600)
    with broker_process("memory://", "--token-file", str(file)) as broker:
        with Client(broker.url) as nobody, Client(broker.url, secret=SECRET) as tester:
            assert [nobody.get("/v1/stats").status, tester.get("/v1/stats").status] == [401, 200]
        assert "can read" not in "".join(broker.lines)
    file.chmod(0o644)
    with broker_process("memory://", "--token-file", str(file)) as broker:
        assert "everybody on this machine can read" in "".join(broker.lines)
    # With tokens, others may be let in.
    environment = {"TASKHARBOR_BROKER_TOKENS": f"other:read:{SECRET}x"}
    with broker_process("memory://", "--bind", "0.0.0.0:0", environment=environment) as broker:
        local = broker.url.replace("0.0.0.0", "127.0.0.1")
        with Client(local, secret=f"{SECRET}x") as other:
            assert other.get("/v1/stats").status == 200
            assert other.post("/v1/jobs", {"type": "t"}).status == 403
    assert "unencrypted" in "".join(broker.lines)
    assert SECRET not in "".join(broker.lines)


def test_a_busy_port_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = refused("--bind", f"127.0.0.1:{port}")
    assert answer.exit_code == 1
    assert f"cannot listen at 127.0.0.1:{port}" in answer.stderr
    assert "--bind" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--store", "nosuch://x"), 2, "no installed driver answers to nosuch://"),
        (("--store", "hello"), 2, "is not a driver URL"),
        (("--token-file", "missing"), 2, "cannot read the token file missing"),
        (("--bind", "nowhere"), 2, "write it like 127.0.0.1:7433"),
        (("--bind", "0.0.0.0:0"), 2, "0.0.0.0 can be reached from other hosts, and no token is set"),
        (("--tls-cert", "missing.pem"), 2, "cannot read the TLS file missing.pem"),
        (("--tls-cert", __file__), 2, "PEM"),
        (("--tls-key", __file__), 2, "without --tls-cert"),
        (("--store", "redis://app:hunter2-password@127.0.0.1:1/0?prefix=x"), 3, "Connection refused"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(
    arguments: tuple[str, ...], code: int, said: str
) -> None:
    answer = refused(*arguments)
    assert (answer.exit_code, answer.stdout) == (code, "")
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "hunter2" not in answer.stderr
    as_json = refused(*arguments, "--json")
    assert as_json.stderr.startswith('{"error":')
