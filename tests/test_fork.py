"""Programs that use a client and then fork: gunicorn with preload, multiprocessing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from taskharbor.client import Client
from taskharbor.jobs import JobState
from taskharbor_testkit.servers.broker import broker_process

PROGRAM = Path(__file__).with_name("forking_program.py")
SECRET = "s" * 32
PATIENCE = 60


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "url",
    ["sqlite", "postgres", *(pytest.param(one, marks=pytest.mark.slow) for one in ("redis", "file", "http"))],
    indirect=True,
)
def test_an_app_enqueues_in_the_workers_of_gunicorn_that_has_preloaded_it(url: str) -> None:
    command = [sys.executable, "-X", "dev", "-m", "gunicorn", "--preload", "--workers", "2"]
    command += ["--bind", "127.0.0.1:0", "--chdir", str(Path(__file__).parent), "gunicorn_app:app"]
    environment = {**os.environ, "TASKHARBOR_URL": url}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    with server:
        try:
            said: list[str] = []
            for line in server.stderr:
                said.append(line)
                if found := re.search(r"Listening at: (http://\S+)", line):
                    break
            else:
                pytest.fail("".join(said))
            reading = threading.Thread(target=said.extend, args=(server.stderr,))
            reading.start()
            pids: list[bytes] = []
            while len({*pids}) < 2 or len(pids) < 6:
                with urlopen(f"{found[1]}/{len(pids)}", timeout=PATIENCE) as answer:
                    pids.append(answer.read())
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
            reading.join(PATIENCE)
        finally:
            server.kill()
    # gunicorn does not close the socket it listens on.
    own = f"laddr=('127.0.0.1', {urlsplit(found[1]).port})>"
    assert not [line for line in said if "Error" in line or ("unclosed" in line and own not in line)]
    with Client(url) as client:
        assert sum(queue.counts[JobState.READY] for queue in client.stats()) == 2 + 2 * len(pids)
