"""Refuses a store that does not keep its word: one that ignores a condition loses jobs, and says nothing.

Old or simple imitations of S3 accept `If-Match` and `If-None-Match`, and write all the same. So every store is asked, once per
process, before the first job is entrusted to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from taskharbor.drivers.objectstore.blobs import UNCHANGED, Blobs, Conflict, Unclear, Version
from taskharbor.drivers.objectstore.patience import pause, pauses
from taskharbor.errors import BackendUnavailable, InvalidRequest

_TRIES = 4

_trusted: set[str] = set()


async def probe(blobs: Blobs) -> None:
    """Raises InvalidRequest where the store lies. What was found good is not asked again.

    Bad luck can look like a lie (a request sent twice on its way, an answer lost); but a liar lies every time.
    """
    if blobs.identity in _trusted:
        return
    waits = pauses(tries=_TRIES)
    while True:
        # A name of its own each time: what became of one try must not spoil the next.
        name = f"probe/{secrets.token_hex(12)}"
        try:
            await _examine(blobs, name)
        except InvalidRequest:
            wait = next(waits, None)
            if wait is None:
                raise
        except Unclear as error:
            wait = next(waits, None)
            if wait is None:
                raise BackendUnavailable(
                    f"{blobs.place} gave no certain answer to a first write: {error}"
                ) from error
        else:
            _trusted.add(blobs.identity)
            return
        finally:
            await blobs.delete([name])
        await pause(wait)


async def _examine(blobs: Blobs, name: str) -> None:
    try:
        first = await blobs.create(name, b"first")
    except Conflict:
        raise _refusal(blobs, "refused to create an object that did not exist") from None
    await _must_refuse(
        blobs,
        lambda: blobs.create(name, b"again"),
        "created an object that was there already (If-None-Match: *)",
    )
    if await blobs.read_if_changed(name, first) is not UNCHANGED:
        raise _refusal(blobs, "showed another version of an object than the one it had just confirmed")
    try:
        second = await blobs.replace(name, b"second", first)
    except Conflict:
        raise _refusal(
            blobs, "refused to replace the very version it had just confirmed (If-Match)"
        ) from None
    if second == first:
        raise _refusal(blobs, "gave two contents the same version")
    await _must_refuse(
        blobs,
        lambda: blobs.replace(name, b"stale", first),
        "replaced a version that was not there any more (If-Match)",
    )
    blob = await blobs.read(name)
    if blob is None or blob.data != b"second" or blob.version != second:
        raise _refusal(blobs, "did not show what it had last confirmed")


async def _must_refuse(blobs: Blobs, write: Callable[[], Awaitable[Version]], what: str) -> None:
    try:
        await write()
    except Conflict:
        return
    raise _refusal(blobs, what)


def _refusal(blobs: Blobs, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{blobs.place} {what}: on such a store two writers can overwrite each other, and jobs would be lost. Use a store "
        "with conditional writes (Amazon S3, Google Cloud Storage, Azure, a current MinIO, Ceph or R2), or a newer version "
        "of this one"
    )
