"""What the tests of lost answers share: a handle whose connections run through a fault proxy, and one on the store itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

from records import make_record
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Micros
from taskharbor.testing.broker import RunningBroker, broker_thread
from taskharbor_testkit.servers import FaultProxy
from taskharbor_testkit.servers.protocols import Received, Sent

NOW: Micros = 1_800_000_000 * SECOND
LEASE: Micros = 60 * SECOND
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def _whole_messages(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    """Requests or responses of one direction. Both ends say here how long their bodies are."""
    buffer += data
    while (head := buffer.find(b"\r\n\r\n")) >= 0:
        length = _LENGTH.search(buffer, 0, head + 2)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(buffer) < end:
            return
        message = bytes(buffer[:end])
        del buffer[:end]
        yield message


class HttpProtocol:
    def __init__(self) -> None:
        self.unanswered = 0
        self.open = False
        self._client = bytearray()
        self._server = bytearray()

    def from_client(self, data: bytes) -> Iterator[Sent]:
        for message in _whole_messages(self._client, data):
            self.unanswered += 1
            yield Sent(message, True, True)

    def from_server(self, data: bytes) -> Iterator[Received]:
        for message in _whole_messages(self._server, data):
            self.unanswered -= 1
            yield Received(message, True)

    def runs(self, message: bytes, match: bytes) -> bool:
        return match in message.partition(b"\r\n")[0]


def proxy_to(url: str) -> FaultProxy:
    parts = urlsplit(url)
    return FaultProxy(parts.hostname or "", parts.port or 0, HttpProtocol)


def records(count: int, *, now: Micros = NOW, **fields: Any) -> list[JobRecord]:
    return [make_record(now=now, **fields) for _ in range(count)]


class Line:
    """A handle by way of a fault proxy and a broker, and one on the broker's own store, to see what is true."""

    def __init__(self, near: HttpDriver, far: MemoryDriver, proxy: FaultProxy, broker: RunningBroker) -> None:
        self.near = near
        self.far = far
        self.proxy = proxy
        self.broker = broker

    async def store(self, count: int = 1, **fields: Any) -> list[str]:
        answers = await self.far.enqueue(records(count, **fields), now=NOW)
        return [one.id for one in answers]

    async def claim(self, limit: int = 1, *, now: Micros = NOW, **options: Any) -> list[JobRecord]:
        options = {"worker": "w", "lease_for": LEASE, **options}
        return await self.near.reserve("q", limit=limit, now=now, **options)

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.far.job_attempts(job_id)

    async def counts(self) -> dict[JobState, int]:
        """The states that have any jobs."""
        (stats,) = await self.far.stats(now=NOW, queue="q")
        return {state: count for state, count in stats.counts.items() if count}


@contextlib.asynccontextmanager
async def line(options: str = "", **config: Any) -> AsyncIterator[Line]:
    far = MemoryDriver()
    with (
        broker_thread(far.clone(), **{"trust_client_time": True, **config}) as broker,
        proxy_to(broker.url) as proxy,
    ):
        async with HttpDriver.from_url(proxy.url_for(broker.url) + options) as near:
            yield Line(near, far, proxy, broker)
