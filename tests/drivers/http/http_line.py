"""What the tests of lost answers share: a handle whose connections run through somebody's hand, and one on the store itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.ids import new_ids
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Micros
from taskharbor.testing.broker import RunningBroker, broker_thread
from taskharbor_testkit.servers import Cable
from taskharbor_testkit.servers.conversation import Sent

NOW: Micros = 1_800_000_000 * SECOND
LEASE: Micros = 60 * SECOND
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class _Messages:
    """One direction of a connection, cut into requests or responses. Whoever speaks here says how long its bodies are."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return None
        length = _LENGTH.search(self._buffer, 0, head + 2)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[:end])
        del self._buffer[:end]
        return message


class HttpConversation:
    def __init__(self) -> None:
        self.client = _Messages()
        self.server = _Messages()
        self.unanswered = 0
        self.open = False

    def from_client(self) -> Iterator[Sent]:
        while (message := self.client.take()) is not None:
            self.unanswered += 1
            yield Sent(message, True, True)

    def from_server(self) -> Iterator[bytes]:
        while (message := self.server.take()) is not None:
            self.unanswered -= 1
            yield message

    def runs(self, message: bytes, match: bytes) -> bool:
        return match in message.partition(b"\r\n")[0]

    def answers(self, message: bytes) -> bool:
        return True

    def asks_for_more(self, message: bytes) -> bool:
        return False


def cable_to(url: str) -> Cable:
    parts = urlsplit(url)
    return Cable(parts.hostname or "", parts.port or 0, HttpConversation)


def records(count: int, *, queue: str = "q", now: Micros = NOW, **fields: Any) -> list[JobRecord]:
    return [
        JobRecord(id=job_id, type="t", queue=queue, run_at_us=now, created_at_us=now, **fields)
        for job_id in new_ids(count)
    ]


class Line:
    """A handle by way of a cable and a broker, and one on the broker's own store, to see what is true."""

    def __init__(self, near: HttpDriver, far: MemoryDriver, cable: Cable, broker: RunningBroker) -> None:
        self.near = near
        self.far = far
        self.cable = cable
        self.broker = broker

    async def store(self, count: int = 1, **fields: Any) -> list[str]:
        answers = await self.far.enqueue(records(count, **fields), now=NOW)
        return [one.id for one in answers]

    async def claim(self, limit: int = 1, *, now: Micros = NOW, **options: Any) -> list[JobRecord]:
        options = {"worker": "w", "lease_for": LEASE, **options}
        return await self.near.reserve("q", limit=limit, now=now, **options)

    async def jobs(self, *job_ids: str) -> list[JobRecord]:
        return [job for job in await self.far.get(job_ids, now=NOW) if job is not None]

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.far.job_attempts(job_id)

    async def counts(self, queue: str = "q") -> dict[JobState, int]:
        """The states of a queue that have any jobs."""
        (stats,) = await self.far.stats(now=NOW, queue=queue)
        return {state: count for state, count in stats.counts.items() if count}


@contextlib.asynccontextmanager
async def line(options: str = "", **config: Any) -> AsyncIterator[Line]:
    far = MemoryDriver()
    with (
        broker_thread(far.clone(), **{"trust_client_time": True, **config}) as broker,
        cable_to(broker.url) as cable,
    ):
        async with HttpDriver.from_url(cable.url_for(broker.url) + options) as near:
            yield Line(near, far, cable, broker)
