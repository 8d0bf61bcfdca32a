"""An S3 of one's own: moto's, in a process of its own, on a free loopback port, with conditional writes that hold.

    with S3Server.start() as s3:
        harbor = Harbor(s3.fresh_url())
        s3.plan("error_500_after", "cut_before")

A fault says what becomes of a conditional write: `cut_before`, `cut_after`, `silent_before`, `silent_after`,
`error_500_before`, `error_500_after`, `error_503_before`, `refused_after`, `conflict_409`, `forbidden_403`; the empty one:
nothing special.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Callable
from typing import Self
from urllib.parse import urlencode

from taskharbor_testkit.servers.discovery import ServerMissing
from taskharbor_testkit.servers.process import HOST, ServerProcess, once

BUCKET = "taskharbor"

_PLAN = "/_taskharbor/plan"


class S3Server(ServerProcess):
    """Made by `start()`; a context manager. All it holds is in memory, and gone with it."""

    is_ours = True

    @classmethod
    def start(cls) -> Self:
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            raise ServerMissing("the S3 server is not installed: pip install 'taskharbor-testkit[servers]'")
        server = cls("s3").start_on_free_port()
        server._ask("PUT", f"/{BUCKET}")
        return server

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

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

    def plan(self, *faults: str) -> None:
        """Set the faults of the next conditional writes, in this order. The rest of an earlier plan is forgotten."""
        self._ask("POST", _PLAN, json.dumps(faults).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        request = urllib.request.Request(f"{self.endpoint}{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def _launch(self) -> None:
        command = [sys.executable, "-m", "taskharbor_testkit.servers.s3_program", str(self.port)]
        self._run(command, lambda: f"ready {self.port}" in self.logged())


_shared: Callable[[str], S3Server] = once(lambda _: S3Server.start())


def fresh_s3_url() -> str:
    """A place that nobody has used: below the URL that TASKHARBOR_TEST_S3 gives, or else on the shared server."""
    given = os.environ.get("TASKHARBOR_TEST_S3")
    if not given:
        return _shared("").fresh_url()
    address, _, query = given.partition("?")
    return f"{address.rstrip('/')}/th-{secrets.token_hex(6)}?{query}".rstrip("?")
