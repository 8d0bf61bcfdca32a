"""doctor and migrate."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.cli_harness import Run
from taskharbor.broker.tokens import parse_token
from taskharbor.client import Client, portal
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.errors import BackendUnavailable
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.servers import RedisServer


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
    checks = json.loads(run("doctor", "--json", "--url", f"sqlite:///{tmp_path}", code=1).stdout)["checks"]
    assert (checks[-1]["name"], checks[-1]["found"]) == ("file", f"{tmp_path} is a folder")
    (tmp_path / "text.db").write_text("this is no database at all, only text" * 100)
    assert "not an SQLite database" in run("doctor", "--url", "sqlite:///text.db", code=1).stdout


def test_doctor_says_that_data_are_damaged(run: Run, tmp_path: Path) -> None:
    run("enqueue", "mail", "--url", "sqlite:///jobs.db")
    with (tmp_path / "jobs.db").open("r+b") as file:
        file.seek(100)
        file.write(b"x" * 8000)
    run("enqueue", "mail", "--url", f"file://{tmp_path}/store")
    for part in (tmp_path / "store").rglob("*"):
        if part.is_file():
            part.write_bytes(b"x" * 100)
    for url in ("sqlite:///jobs.db", f"file://{tmp_path}/store"):
        *_, check = json.loads(run("doctor", "--json", "--url", url, code=1).stdout)["checks"]
        assert check["verdict"] == "fail"
        assert "damaged" in check["found"]
        assert "stored data are damaged" in check["advice"]


def test_doctor_does_not_ask_for_a_scope_that_producers_and_workers_do_not_need(run: Run) -> None:
    token = parse_token("crew:work:a-secret-for-the-crew")
    with running_broker("memory://", tokens=(token,)) as url:
        checks = json.loads(
            run("doctor", "--json", "--url", url.replace("://", "://a-secret-for-the-crew@")).stdout
        )["checks"]
    (write,) = [check for check in checks if check["name"] == "write"]
    assert (write["verdict"], write["advice"]) == ("ok", "")
    assert "which only writers of DataFrames need" in write["found"]


def test_doctor_repairs_a_store_with_a_damaged_job(run: Run, tmp_path: Path) -> None:
    run("enqueue", "mail", "{}")
    (file,) = tmp_path.glob("*.db")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE jobs SET spec = '{'")
    connection.close()
    assert "repair" not in verdicts(run("doctor", "--json").stdout)
    assert verdicts(run("doctor", "--json", "--repair").stdout)["repair"] == "warn"
    assert verdicts(run("doctor", "--json", "--repair").stdout)["repair"] == "ok"
    assert "DamagedJob" in run("dlq", "list", "--json").stdout


@pytest.mark.parametrize("runs", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_doctor_on_s3_that_does_not_answer_ends_in_order(runs: int) -> None:
    """A thread of the cloud library that is in Python when the interpreter ends aborts the process: three of eight did."""
    url = "s3://b?endpoint=http://127.0.0.1:1&allow_http=on&region=r&access_key_id=a&secret_access_key=s"
    command = [sys.executable, "-m", "taskharbor", "doctor", "--json", "--url", url]
    for _ in range(runs):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (1, "")
        assert verdicts(ended.stdout)["backend"] == "fail"


_NO = "appendfsync no: a power loss takes all that the operating system has yet to write"


@pytest.mark.parametrize(
    ("config", "rights", "said"),
    [
        ({"appendonly": "yes"}, "+@all", {}),
        ({"appendonly": "no", "save": '""'}, "+@all", {"persistence": "every job dies with the server"}),
        ({"appendonly": "no", "save": "60 1"}, "+@all", {"persistence": "snapshots only (save 60 1)"}),
        ({"appendonly": "yes", "appendfsync": "no"}, "+@all", {"persistence": _NO}),
        ({"appendonly": "yes"}, "-config", {"persistence": "could not tell its appendfsync"}),
        ({"appendonly": "no"}, "-config", {"persistence": "could not tell if the server writes to disk"}),
        (
            {"appendonly": "yes", "maxmemory": "50mb", "maxmemory-policy": "volatile-lru"},
            "+@all",
            {"eviction": "deletes staged jobs of bulk writes when its memory is full"},
        ),
        (
            {"appendonly": "yes", "maxmemory-policy": "allkeys-lru"},
            "+@all",
            {"eviction": "deletes whole queues when its memory gets a limit (maxmemory) and is full"},
        ),
    ],
)
def test_doctor_on_redis_says_what_its_server_can_lose(
    run: Run, config: dict[str, str], rights: str, said: dict[str, str]
) -> None:
    with RedisServer.start(config=config) as server:
        server.execute("ACL", "SETUSER", "app", "on", ">hunter2", "~*", "&*", "+@all", rights)
        url = server.url.replace("redis://", "redis://app:hunter2@")
        checks = json.loads(run("doctor", "--json", "--url", url).stdout)["checks"]
    assert {"persistence", "eviction"} <= {check["name"] for check in checks}
    warned = {check["name"]: check for check in checks if check["verdict"] != "ok"}
    assert warned.keys() == said.keys()
    for name, text in said.items():
        assert f"{urlsplit(server.url).port}: " in warned[name]["found"]
        assert text in warned[name]["found"]
        assert warned[name]["advice"]


def test_doctor_on_redis_that_does_not_answer_or_forbids_a_look(run: Run) -> None:
    """It promises nothing about a server that it has not seen."""
    told = run("doctor", "--json", "--url", "redis://app:hunter2@127.0.0.1:1/0", code=1).stdout
    assert {"promises", "schema"}.isdisjoint(verdicts(told))
    assert json.loads(told)["checks"][-1]["found"] == "127.0.0.1:1/0: Connection refused"
    assert "hunter2" not in told
    with RedisServer.start() as server:
        for name, value in (("maxmemory-policy", "allkeys-lru"), ("maxmemory", "50mb")):
            server.execute("CONFIG", "SET", name, value)
        told = run("doctor", "--url", server.url, code=1).stdout
        assert "set maxmemory-policy noeviction" in told
        assert "is it running" not in told
        server.execute("ACL", "SETUSER", "app", "on", ">hunter2", "~*", "&*", "+@all", "-info")
        url = server.url.replace("redis://", "redis://app:hunter2@")
        told = run("doctor", "--url", url, code=1).stdout
    assert "this user lacks a right: it needs INFO" in told
    assert "hunter2" not in told


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
