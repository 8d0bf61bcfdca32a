"""Two clients: one as anybody would write it, JSON over one connection; and one that calls the application without a server.
And a store that fails."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from taskharbor.broker.app import make_app
from taskharbor.broker.config import BrokerConfig
from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, JobFilter
from taskharbor.drivers.memory import MemoryDriver


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: Any
    """Decoded where it is JSON."""

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and code of a problem."""
        return self.status, self.body["code"]

    @classmethod
    def of(cls, status: int, headers: list[tuple[str, str]], content: bytes) -> Answer:
        named = {name.lower(): value for name, value in headers}
        is_json = named.get("content-type", "").partition(";")[0].endswith("json")
        return cls(status, named, json.loads(content) if content and is_json else content)


class Unwell(MemoryDriver):
    """A store that fails while `error` is set: in every call, or only in calls of some kinds."""

    def __init__(self, error: Exception | None = None, *kinds: type[op.Operation[Any]]) -> None:
        super().__init__()
        self.error = error
        self._kinds = kinds

    async def time(self) -> int:
        if self.error is not None and not self._kinds:
            raise self.error
        return await super().time()

    async def run(self, call: op.Operation[Any]) -> Any:
        if self.error is not None and (not self._kinds or isinstance(call, self._kinds)):
            raise self.error
        return await super().run(call)


async def contents(driver: Driver) -> Any:
    """All that a store holds, to see whether a request changed it."""
    # Always at the same time: a job that comes due is no change.
    page = await driver.list_jobs(JobFilter(), now=0, limit=100_000)
    stats = await driver.stats(now=0)
    log = await driver.read_attempts(limit=100_000)
    return page.jobs, [(one.queue, one.settings, one.done_total) for one in stats], log.attempts


class Client:
    def __init__(self, url: str, *, secret: str | None = None, timeout: float = 20) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def ask(
        self, method: str, path: str, body: Any = None, data: bytes | None = None, **headers: str
    ) -> Answer:
        """Header names are written with underscores."""
        sent = {**self._headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body is not None:
            data = json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        self._connection.request(method, path, data, sent)
        response = self._connection.getresponse()
        return Answer.of(response.status, response.getheaders(), response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, None, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, {} if body is None else body, None, **headers)

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The body of an answer that must be a success."""
        answer = self.ask(method, path, body)
        assert answer.status in (200, 201), answer
        return answer.body

    def submit(self, **job: Any) -> str:
        return str(self.ok("POST", "/v1/jobs", {"type": "t", **job})["id"])

    def claim(self, **asked: Any) -> list[dict[str, Any]]:
        return list(self.ok("POST", "/v1/jobs/claim", asked)["jobs"])

    def held(self, **job: Any) -> dict[str, Any]:
        """A job that was submitted and claimed."""
        self.submit(**job)
        (claimed,) = self.claim()
        return claimed

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ok("GET", f"/v1/jobs/{job_id}"))

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.ok("GET", "/v1/jobs")["jobs"])

    def act(self, job: dict[str, Any], action: str, **body: Any) -> Any:
        """An action of the holder of a claimed job."""
        return self.ok("POST", f"/v1/jobs/{job['id']}/{action}", {"token": job["token"], **body})


class Direct:
    """Requests straight to the application over a driver that is open."""

    def __init__(self, driver: Driver | None = None, *, clock: Clock | None = None, **config: Any) -> None:
        self.driver = driver or MemoryDriver()
        settings = BrokerConfig(**{"trust_client_time": clock is None, **config})
        self.app = make_app(self.driver, settings, clock=clock or SystemClock())

    async def ask(self, method: str, url: str, body: bytes = b"", /, **headers: str) -> Answer:
        """Header names are written with underscores."""
        given = {"Host": "localhost", "Content_Type": wire.MSGPACK, **headers}
        sent = [(key.replace("_", "-").lower().encode(), value.encode()) for key, value in given.items()]
        messages: list[dict[str, Any]] = []
        bodies = [body]

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        path, _, query = url.partition("?")
        scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode()}
        await self.app({**scope, "query_string": query.encode(), "headers": sent}, receive, send)
        answered = [(key.decode(), value.decode()) for key, value in messages[0]["headers"]]
        return Answer.of(messages[0]["status"], answered, messages[1]["body"])

    async def call(self, name: str, body: bytes, /, **headers: str) -> Answer:
        """A call of the driver protocol."""
        return await self.ask("POST", f"{wire.PATH}{name}", body, **headers)

    async def run(self, call: op.Operation[Any], **headers: str) -> Any:
        """The result of a call that must be a success."""
        answer = await self.call(call.name, wire.encode(call), **headers)
        assert answer.status == 200, answer
        return wire.read_answer(call, answer.body)
