"""An S3 of one's own: moto's, in a process of its own, on a free loopback port, with conditional writes that hold.

with S3Server.start() as s3:
    harbor = Harbor(s3.fresh_url())
    s3.plan("error_500_after", "cut_before")
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import urllib.request
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlencode

from taskharbor_testkit.servers.binaries import ServerMissing
from taskharbor_testkit.servers.process import ServerFailed

BUCKET = "taskharbor"
TEST_S3 = "TASKHARBOR_TEST_S3"

S3Fault = Literal[
    "",
    "conflict_409",
    "cut_after",
    "cut_before",
    "error_500_after",
    "error_500_before",
    "error_503_before",
    "forbidden_403",
    "refused_after",
    "silent_after",
    "silent_before",
]
"""What becomes of a conditional write; the empty one: nothing special."""

_PLAN = "/_taskharbor/plan"


class S3Server:
    """Made by `start()`; a context manager. All it holds is in memory, and gone with it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._process = process
        self._owner = os.getpid()
        atexit.register(self.close)

    @classmethod
    def start(cls) -> Self:
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            raise ServerMissing("the S3 server of the tests is not installed: pip install 'moto[server]'")
        process = subprocess.Popen(
            [sys.executable, "-m", "taskharbor_testkit.servers.s3_program", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Out of reach of the terminal's Ctrl-C: the tests that are being interrupted still tidy up.
            start_new_session=True,
        )
        assert process.stdout is not None
        word, _, port = process.stdout.readline().strip().partition(" ")
        if word != "ready":
            process.kill()
            process.communicate()
            raise ServerFailed("the S3 server did not start; what it said is on the standard error above")
        server = cls(process, int(port))
        server.make_bucket(BUCKET)
        return server

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str, *, bucket: str = BUCKET, **options: str) -> str:
        """A store's URL, with keys that this server does not look at."""
        given = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "allow_http": "on",
            "access_key_id": "test",
            "secret_access_key": "test",
            **options,
        }
        return f"s3://{bucket}/{prefix}?{urlencode(given)}"

    def fresh_url(self, **options: str) -> str:
        """The URL of a place that nobody has used."""
        return self.url(f"th-{secrets.token_hex(6)}", **options)

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    def plan(self, *faults: S3Fault) -> None:
        """What becomes of the next conditional writes, in this order; what is left of an earlier plan is forgotten."""
        self._ask("POST", _PLAN, json.dumps(faults).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        request = urllib.request.Request(f"{self.endpoint}{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """In a forked child this does nothing: the server is the parent's."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_shared: list[S3Server] = []
_lock = threading.Lock()


def shared_s3() -> S3Server:
    """This process's server. It ends with us; do not stop it or plan faults for it, others are on it."""
    with _lock:
        if not _shared:
            _shared.append(S3Server.start())
        return _shared[0]


def fresh_s3_url() -> str:
    """A place that nobody has used: below the URL that TASKHARBOR_TEST_S3 gives, or else on the shared server."""
    given = os.environ.get(TEST_S3)
    if not given:
        return shared_s3().fresh_url()
    address, _, query = given.partition("?")
    return f"{address.rstrip('/')}/th-{secrets.token_hex(6)}?{query}".rstrip("?")
