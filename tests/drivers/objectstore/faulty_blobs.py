"""Any object store, in bad weather: answers that are lost, writes that land late, refusals that hide a success, old contents.

    weather = Weather(random.Random(seed), Faults(lost_after=0.1, lost_before=0.1, late=0.05, stale=0.2))
    blobs = FaultyBlobs(real, weather)

Handles that are to live in the same weather share it. `clear_up()` ends it; `next_write(...)` plans the fate of single writes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from random import Random

import msgspec

from taskharbor.drivers.objectstore.blobs import (
    Blob,
    Blobs,
    Conflict,
    Data,
    Unclear,
    Version,
)
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros


class Fault(StrEnum):
    """What can happen to a conditional write."""

    LOST_AFTER = "lost_after"
    """Time-out after it landed."""
    LOST_BEFORE = "lost_before"
    """Time-out before it reached the store."""
    LATE = "late"
    """Time-out, and it lands later, if nobody else has written by then."""
    CONFLICT_409 = "conflict_409"
    """S3's "somebody else is writing, try again": nothing was written."""
    REFUSED_AFTER = "refused_after"
    """It landed, and was sent again on the way, so that the answer is 412."""
    ERROR_500_AFTER = "error_500_after"
    ERROR_500_BEFORE = "error_500_before"
    SLOW = "slow"


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each is, per request."""

    lost_after: float = 0.0
    lost_before: float = 0.0
    late: float = 0.0
    conflict_409: float = 0.0
    refused_after: float = 0.0
    error_500_after: float = 0.0
    error_500_before: float = 0.0
    slow: float = 0.0
    stale: float = 0.0
    """A read that shows one of the contents before."""
    unreadable: float = 0.0
    """A read, a listing, a plain write or a removal that fails even after several tries."""
    slow_seconds: float = 0.05
    write_seconds: float = 0.0
    """Added to every write, in any weather."""
    read_seconds: float = 0.0


STORM = Faults(
    lost_after=0.06, lost_before=0.06, late=0.06, conflict_409=0.05, refused_after=0.05, error_500_after=0.04,
    error_500_before=0.04, slow=0.1, stale=0.15, unreadable=0.02, slow_seconds=0.02,
)  # fmt: skip
"""All of it, often."""

_KEPT = 4
"""Contents per object that a stale read may show."""


class Weather:
    """What all handles on a store suffer together, and how much of it there was."""

    def __init__(self, random: Random | None = None, faults: Faults | None = None) -> None:
        self.random = Random() if random is None else random
        self.faults = Faults() if faults is None else faults
        self.met: dict[str, int] = {}
        """Faults so far."""
        self.reads = 0
        self.writes = 0
        """Requests so far, those that failed too."""
        self.planned: deque[Fault | None] = deque()
        self._late: list[Callable[[], Awaitable[object]]] = []
        self._past: dict[str, deque[Blob | None]] = {}

    def next_write(self, *faults: Fault | None) -> None:
        """What happens to the next conditional writes, in this order. None: nothing."""
        self.planned.extend(faults)

    def clear_up(self) -> None:
        """No more faults; what is under way as late still lands when it is told to."""
        self.faults = Faults(write_seconds=self.faults.write_seconds, read_seconds=self.faults.read_seconds)
        self.planned.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether something has yet to land."""
        return bool(self._late)

    def postpone(self, write: Callable[[], Awaitable[object]]) -> None:
        self._late.append(write)

    async def land(self) -> None:
        """One of the late writes arrives at the store."""
        if self._late:
            write = self._late.pop(self.random.randrange(len(self._late)))
            try:
                await write()
            except (Conflict, Unclear):
                pass  # Somebody else has written: it is too late for good.

    def strikes(self, name: str) -> bool:
        if self.random.random() >= getattr(self.faults, name):
            return False
        self.note(name)
        return True

    def note(self, name: str) -> None:
        self.met[name] = self.met.get(name, 0) + 1

    def fault(self) -> Fault | None:
        """Of the write that comes now."""
        if self.planned:
            planned = self.planned.popleft()
            if planned is not None:
                self.note(planned)
            return planned
        return next((fault for fault in Fault if self.strikes(fault)), None)

    def remember(self, name: str, blob: Blob | None) -> None:
        past = self._past.setdefault(name, deque(maxlen=_KEPT))
        if not past or past[-1] != blob:
            past.append(blob)

    def recall(self, name: str) -> Blob | None:
        past = self._past[name]
        return past[self.random.randrange(len(past))]


class FaultyBlobs(Blobs):
    def __init__(self, inner: Blobs, weather: Weather) -> None:
        self.place = inner.place
        self.is_remote = inner.is_remote
        self.weather = weather
        self._inner = inner

    # -- reading ------------------------------------------------------------------------------------------

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        await self._before_read()
        found = await self._inner.read(name, unless, size)
        if found is None and unless is not None:
            return found
        self.weather.remember(name, found)
        if self.weather.strikes("stale"):
            found = self.weather.recall(name)
            return None if found is not None and found.version == unless else found
        return found

    async def _before_read(self) -> None:
        self.weather.reads += 1
        if self.weather.faults.read_seconds:
            await asyncio.sleep(self.weather.faults.read_seconds)
        self._check_reachable()

    def _check_reachable(self) -> None:
        if self.weather.strikes("unreadable"):
            raise BackendUnavailable(f"{self.place} did not answer (bad weather)")

    async def names(self, prefix: str) -> list[str]:
        self._check_reachable()
        return await self._inner.names(prefix)

    async def now(self) -> Micros | None:
        return await self._inner.now()

    # -- writing ------------------------------------------------------------------------------------------

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        return await self._meet(lambda: self._inner.write(name, data, known))

    async def _meet(self, write: Callable[[], Awaitable[Version]]) -> Version:
        weather = self.weather
        weather.writes += 1
        if weather.faults.write_seconds:
            await asyncio.sleep(weather.faults.write_seconds)
        fault = weather.fault()
        match fault:
            case Fault.LOST_AFTER | Fault.ERROR_500_AFTER:
                await write()
                raise Unclear(f"{self.place}: no answer ({fault})")
            case Fault.LOST_BEFORE | Fault.ERROR_500_BEFORE | Fault.CONFLICT_409:
                raise Unclear(f"{self.place}: no answer ({fault})")
            case Fault.LATE:
                weather.postpone(write)
                raise Unclear(f"{self.place}: no answer ({fault})")
            case Fault.REFUSED_AFTER:
                await write()
                raise Conflict(f"{self.place}: another version is there ({fault})")
            case Fault.SLOW:
                await asyncio.sleep(weather.random.random() * weather.faults.slow_seconds)
        return await write()

    async def put(self, name: str, data: bytes) -> None:
        self.weather.writes += 1
        if self.weather.faults.write_seconds:
            await asyncio.sleep(self.weather.faults.write_seconds)
        self._check_reachable()
        await self._inner.put(name, data)

    async def delete(self, names: Sequence[str]) -> None:
        self._check_reachable()
        await self._inner.delete(names)

    async def close(self) -> None:
        await self._inner.close()
