"""Object stores for tests: one in a dictionary, and any store in bad weather.

    weather = Weather(random.Random(seed), {"lost_after": 0.1, "late": 0.05, "stale": 0.2})
    blobs = FaultyBlobs(HeldBlobs(), weather)

In bad weather answers are lost, writes land late, refusals hide a success, and reads show old contents. Handles that live in the
same weather share it. `clear_up()` ends it; `next_write(...)` plans the fate of single writes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from random import Random
from typing import TypeAlias

from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Conflict, Data, Unclear, Version
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros


class HeldBlobs(Blobs):
    """The promises of a real store and nothing else, without a thread, a file or a socket. The test decides on the order."""

    is_remote = False
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.place = f"held#{next(self._numbers)}"
        self.objects: dict[str, Blob] = {}
        self._versions = itertools.count(1)

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        await asyncio.sleep(0)
        blob = self.objects.get(name)
        return None if blob is not None and blob.version == unless else blob

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        await asyncio.sleep(0)
        there = self.objects.get(name)
        if (None if there is None else there.version) != known:
            raise Conflict(f"{name} has another version")
        version = self.keep(name, b"".join(data) if isinstance(data, tuple) else data)
        await asyncio.sleep(0)
        return version

    def keep(self, name: str, data: bytes) -> Version:
        version = Version(str(next(self._versions)))
        self.objects[name] = Blob(data, version)
        return version

    async def put(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0)
        self.keep(name, data)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    async def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if f"{name}/".startswith(f"{prefix}/" if prefix else ""))


class Fault(StrEnum):
    """The fate of a conditional write."""

    LOST_AFTER = "lost_after"
    """Time-out or server error after it landed."""
    LOST_BEFORE = "lost_before"
    """Time-out or server error before it reached the store."""
    LATE = "late"
    """Time-out, and it lands later, if nobody else has written by then."""
    REFUSED_AFTER = "refused_after"
    """It landed, and was sent again on the way, so that the answer is a refusal."""
    REFUSED_BEFORE = "refused_before"
    """S3's "somebody else is writing, try again": nothing was written."""
    SLOW = "slow"


FAULTS = list(Fault)


Faults: TypeAlias = Mapping[str, float]
"""The probability of each fault per request: those of writes; `stale` for a read that shows one of the contents before; and
`unreadable` for a read, a listing, a plain write or a removal that fails even after several tries."""

LOST_ANSWERS: Faults = {
    **{"lost_after": 0.13, "lost_before": 0.13, "late": 0.08},
    **{"refused_after": 0.08, "refused_before": 0.05, "slow": 0.1},
}
STORM: Faults = {
    **{"lost_after": 0.1, "lost_before": 0.1, "late": 0.06, "refused_after": 0.05, "refused_before": 0.05},
    **{"slow": 0.1, "stale": 0.15, "unreadable": 0.02},
}
"""All of it, often."""


class Weather:
    """The faults that all handles on a store meet together."""

    def __init__(self, random: Random | None = None, faults: Faults | None = None) -> None:
        self.random = Random() if random is None else random
        self.faults: Faults = faults or {}
        self.write_seconds = 0.0
        """Added to every write, in any weather."""
        self.met: Counter[str] = Counter()
        """Faults so far."""
        self.reads = 0
        self.writes = 0
        """Requests so far, those that failed too."""
        self.late: list[Callable[[], Awaitable[object]]] = []
        """Writes that have yet to land."""
        self._planned: deque[Fault | None] = deque()
        self._past: dict[str, deque[Blob | None]] = {}

    def next_write(self, *faults: Fault | None) -> None:
        """Plan the fate of the next conditional writes, in this order. None: nothing happens."""
        self._planned.extend(faults)

    def clear_up(self) -> None:
        """End all faults. Late writes still land when they are told to."""
        self.faults = {}
        self._planned.clear()

    async def land(self) -> None:
        """Let one of the late writes arrive at the store."""
        if self.late:
            write = self.late.pop(self.random.randrange(len(self.late)))
            # Somebody else has written: it is too late for good.
            with suppress(Conflict, Unclear):
                await write()

    def strikes(self, name: str) -> bool:
        does_strike = self.random.random() < self.faults.get(name, 0.0)
        self.met[name] += does_strike
        return does_strike

    def fault(self) -> Fault | None:
        """Return the fault of the next write."""
        if self._planned:
            return self._planned.popleft()
        return next((fault for fault in Fault if self.strikes(fault)), None)

    def seen(self, name: str, blob: Blob | None) -> Blob | None:
        """Return the content that a read shows."""
        past = self._past.setdefault(name, deque(maxlen=4))
        if not past or past[-1] != blob:
            past.append(blob)
        return self.random.choice(past) if self.strikes("stale") else blob


class FaultyBlobs(Blobs):
    def __init__(self, inner: Blobs, weather: Weather) -> None:
        self.place = inner.place
        self.is_remote = inner.is_remote
        self.weather = weather
        self._inner = inner

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        self.weather.reads += 1
        self._check_reachable()
        found = await self._inner.read(name, unless, size)
        if found is None and unless is not None:
            return None
        found = self.weather.seen(name, found)
        return None if found is not None and found.version == unless else found

    def _check_reachable(self) -> None:
        if self.weather.strikes("unreadable"):
            raise BackendUnavailable(f"{self.place} did not answer (bad weather)")

    async def names(self, prefix: str) -> list[str]:
        self._check_reachable()
        return await self._inner.names(prefix)

    async def now(self) -> Micros | None:
        return await self._inner.now()

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        weather = self.weather
        weather.writes += 1
        fault = weather.fault()
        if seconds := weather.write_seconds + (
            weather.random.random() * 0.02 if fault is Fault.SLOW else 0.0
        ):
            await asyncio.sleep(seconds)
        version = None
        if fault in (None, Fault.SLOW, Fault.LOST_AFTER, Fault.REFUSED_AFTER):
            version = await self._inner.write(name, data, known)
        if fault in (Fault.REFUSED_AFTER, Fault.REFUSED_BEFORE):
            raise Conflict(f"{self.place}: another version is there ({fault})")
        if fault is Fault.LATE:
            weather.late.append(lambda: self._inner.write(name, data, known))
        if version is None or fault is Fault.LOST_AFTER:
            raise Unclear(f"{self.place}: no answer ({fault})")
        return version

    async def put(self, name: str, data: bytes) -> None:
        self.weather.writes += 1
        self._check_reachable()
        await self._inner.put(name, data)

    async def delete(self, names: Sequence[str]) -> None:
        self._check_reachable()
        await self._inner.delete(names)

    async def close(self) -> None:
        await self._inner.close()
