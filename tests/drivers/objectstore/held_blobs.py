"""An object store in a dictionary: what a real one promises and nothing else, without a thread, a file or a socket.

For tests that decide themselves what happens in which order. What the real ones do is tested on the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Conflict, Data, Version


class HeldBlobs(Blobs):
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
        version = self._keep(name, b"".join(data) if isinstance(data, tuple) else data)
        await asyncio.sleep(0)
        return version

    def _keep(self, name: str, data: bytes) -> Version:
        version = Version(str(next(self._versions)))
        self.objects[name] = Blob(data, version)
        return version

    async def put(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0)
        self._keep(name, data)

    async def delete(self, names: Sequence[str]) -> None:
        await asyncio.sleep(0)
        for name in names:
            self.objects.pop(name, None)

    async def names(self, prefix: str) -> list[str]:
        await asyncio.sleep(0)
        return sorted(
            name for name in self.objects if not prefix or name == prefix or name.startswith(f"{prefix}/")
        )

    async def close(self) -> None:
        pass
