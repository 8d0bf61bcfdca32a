"""Writing a new leader's epoch into objects, so that every write of the leader before it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from taskharbor.drivers.objectstore.blobs import Blobs, Conflict, Unclear
from taskharbor.drivers.objectstore.envelope import new_commit, new_header, seal, unseal
from taskharbor.drivers.objectstore.patience import pause, pauses
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros

_AT_ONCE = 16


async def raise_epoch(blobs: Blobs, name: str, epoch: int, *, now: Micros) -> None:
    """The object carries at least that epoch afterwards; its body stays as it is. Where there was none, it has an empty one.

    Nobody's change is in this write, so there is nothing to settle where its answer was lost: look, and try again.
    """
    waits = pauses(tries=20)
    while True:
        blob = await blobs.read(name)
        header, body = (new_header(), b"") if blob is None else unseal(blob.data, blobs.where(name))
        if header.epoch >= epoch:
            return
        data = seal(header.after(new_commit(), epoch=epoch, now=now), body)
        try:
            if blob is None:
                await blobs.create(name, data)
            else:
                await blobs.replace(name, data, blob.version)
            return
        except (Conflict, Unclear) as error:
            wait = next(waits, None)
            if wait is None:
                raise BackendUnavailable(
                    f"{blobs.where(name)}: the new leader could not sign it: {error}"
                ) from error
        await pause(wait)


async def raise_epochs(blobs: Blobs, names: Iterable[str], epoch: int, *, now: Micros) -> None:
    """Some at a time."""
    remaining = iter(names)

    async def take_next() -> None:
        for name in remaining:
            await raise_epoch(blobs, name, epoch, now=now)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(take_next())
