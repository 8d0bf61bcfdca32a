"""doctor and migrate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.cli_harness import Run
from taskharbor.broker.tokens import parse_token
from taskharbor.client import Client, portal
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.errors import BackendUnavailable
from taskharbor.testing.broker import running_broker


def verdicts(text: str) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in json.loads(text)["checks"]}


def test_doctor_on_a_store_in_memory_warns(run: Run, client: Client) -> None:
    client.pause("mail", create=True)
    found = verdicts(run("doctor", "--json").stdout)
    assert [name for name, verdict in found.items() if verdict != "ok"] == ["promises", "paused"]
    checks = ("python", "packages", "driver", "schema", "round trip", "write", "clock", "queues")
    assert [name for name in checks if name not in found] == []
    assert "-> taskharbor queues resume mail" in run("doctor").stdout


def test_doctor_on_sqlite(run: Run, tmp_path: Path) -> None:
    assert verdicts(run("doctor", "--json").stdout)["file"] == "warn"
    assert list(tmp_path.iterdir()) == []
    run("migrate")
    found = verdicts(run("doctor", "--json").stdout)
    assert (set(found.values()), found["schema"]) == ({"ok"}, "ok")


def test_doctor_says_what_fails_and_exits_with_1(run: Run, tmp_path: Path) -> None:
    assert verdicts(run("doctor", "--json", "--url", "what://", code=1).stdout)["driver"] == "fail"
    missing = f"sqlite:///{tmp_path}/no/such.db"
    assert f"mkdir -p {tmp_path}/no" in run("doctor", "--url", missing, code=1).stdout
    (tmp_path / "text.db").write_text("this is no database at all, only text" * 100)
    assert "not an SQLite database" in run("doctor", "--url", "sqlite:///text.db", code=1).stdout


def test_doctor_does_not_ask_for_a_scope_that_producers_and_workers_do_not_need(run: Run) -> None:
    token = parse_token("crew:work:a-secret-for-the-crew")
    with running_broker("memory://", tokens=(token,)) as url:
        checks = json.loads(
            run("doctor", "--json", "--url", url.replace("://", "://a-secret-for-the-crew@")).stdout
        )["checks"]
    (write,) = [check for check in checks if check["name"] == "write"]
    assert (write["verdict"], write["advice"]) == ("ok", "")
    assert "which only writers of DataFrames need" in write["found"]


def test_migrate(run: Run, tmp_path: Path) -> None:
    planned = json.loads(run("migrate", "--dry-run", "--json").stdout)["steps"]
    assert planned
    assert list(tmp_path.iterdir()) == []
    assert json.loads(run("migrate", "--json").stdout)["steps"] == planned
    assert run("migrate").stdout == "up to date\n"


def test_no_writes_are_found_out(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the look for them leaves nothing behind."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    run("enqueue", "greet", "--url", url)
    run("doctor", "--url", url)
    with Client(url) as client:
        assert portal().call(client.driver.list_blobs("staging")) == []

    async def refused(driver: SQLiteDriver, name: str, data: bytes) -> None:
        raise BackendUnavailable("the disk is full")

    monkeypatch.setattr(SQLiteDriver, "put_blob", refused)
    checks = json.loads(run("doctor", "--url", url, "--json", code=1).stdout)["checks"]
    assert [check["found"] for check in checks if check["verdict"] == "fail"] == ["the disk is full"]
