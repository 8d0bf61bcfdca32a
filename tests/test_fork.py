"""Programs that use a client and then fork: gunicorn with preload, multiprocessing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskharbor_testkit.servers.broker import broker_process

PROGRAM = Path(__file__).with_name("forking_program.py")
SECRET = "s" * 32


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "http":
            environment = {"TASKHARBOR_BROKER_TOKENS": f"a:produce,read:{SECRET}"}
            with broker_process(f"sqlite:///{tmp_path}/jobs.db", environment=environment) as broker:
                yield broker.url.replace("://", f"://{SECRET}@")
        case "sqlite":
            yield f"sqlite:///{tmp_path}/jobs.db"
        case "file":
            yield f"file://{tmp_path}/store"
        case server:
            yield request.getfixturevalue(f"{server}_url")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
@pytest.mark.parametrize("url", ["sqlite", "postgres", "redis", "file", "http"], indirect=True)
def test_parent_and_children_enqueue_after_a_fork(url: str, way: str) -> None:
    command = [sys.executable, "-X", "dev", str(PROGRAM), url, way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("[0, 0] 14\n", 0), ended.stderr
    assert "Error" not in ended.stderr
    assert "unclosed" not in ended.stderr
