"""A client as anybody would write one: JSON over one connection, no knowledge of the server's code."""

from __future__ import annotations

import http.client
import json
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: Any
    """Decoded where it is JSON."""


class Client:
    def __init__(self, url: str, *, secret: str | None = None, timeout: float = 20) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def ask(
        self, method: str, path: str, body: Any = None, *, data: bytes | None = None, **headers: str
    ) -> Answer:
        """Header names are written with underscores."""
        sent = {**self._headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body is not None:
            data = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        self._connection.request(method, path, data, sent)
        response = self._connection.getresponse()
        content = response.read()
        kind = response.getheader("Content-Type") or ""
        decoded = json.loads(content) if content and kind.partition(";")[0].endswith("json") else content
        return Answer(
            response.status, {name.lower(): value for name, value in response.getheaders()}, decoded
        )

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, {} if body is None else body, **headers)

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The body of an answer that must be a success."""
        answer = self.ask(method, path, body)
        assert answer.status in (200, 201), answer
        return answer.body

    def submit(self, **job: Any) -> str:
        job_id: str = self.ok("POST", "/v1/jobs", {"type": "t", **job})["id"]
        return job_id

    def claim(self, **asked: Any) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = self.ok("POST", "/v1/jobs/claim", asked)["jobs"]
        return jobs

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.ok("GET", f"/v1/jobs/{job_id}")
        return job
