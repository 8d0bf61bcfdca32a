"""S3, Google Cloud Storage, Azure and memory, through obstore.

obstore's own repeated tries are off: a repeated conditional write can be refused by what its first try did, and only the
compare-and-swap object, which knows its commit ids, can tell. Reads are repeated here, for a while.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from traceback import walk_stack
from typing import TYPE_CHECKING, TypeVar

from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Conflict, Data, Unclear, Version, retry_delays
from taskharbor.drivers.urls import shown_text
from taskharbor.errors import BackendUnavailable, InvalidRequest, MissingExtra, TaskHarborError
from taskharbor.jobs import Micros, to_micros

try:
    import obstore
    from obstore import exceptions
except ImportError as error:  # pragma: no cover - the tests have it
    raise MissingExtra(
        "object stores need a package that is not installed: pip install 'taskharbor[objectstore]'"
    ) from error

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ObjectStore

R = TypeVar("R")

_RETRY_FOR = 15.0
"""Seconds after which nothing is tried again."""
_LOOKS = 500
_LOOK_AGAIN = 0.001
"""Looks at obstore's threads when a store is closed, and the seconds between them."""
_CLOCK = "clock"
"""An object that is written only to see by which time the store stamps it."""
_MISSING = (exceptions.NotFoundError, FileNotFoundError)
_NOT_LET_IN = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
_REFUSED = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError)
_FAILED = (exceptions.BaseError, OSError)
_NOT_THERE = ("nosuchbucket", "containernotfound", "bucket does not exist", "bucket not found")


class ObstoreBlobs(Blobs):
    def __init__(self, store: ObjectStore, place: str, *, is_remote: bool = True) -> None:
        self.place = place
        self.is_remote = is_remote
        self._store = store

    # -- reading ------------------------------------------------------------------------------------------

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        options: GetOptions = {} if size is None else {"range": (0, size)}
        if unless is not None:
            options["if_none_match"] = unless.tag
        blob = await self._retried("read", lambda: self._get(name, options))
        # A store that does not know conditional reads sends it all again.
        return None if blob is not None and blob.version == unless else blob

    async def _get(self, name: str, options: GetOptions) -> Blob | None:
        try:
            found = await obstore.get_async(self._store, name, options=options)
            data = bytes(await found.bytes_async())
        except exceptions.NotModifiedError:
            return None
        except _MISSING as error:
            self._check_bucket(error)
            return None
        return Blob(data, self._version(found.meta["e_tag"], found.meta["version"]))

    async def names(self, prefix: str) -> list[str]:
        return await self._retried("list", lambda: self._list(prefix))

    async def _list(self, prefix: str) -> list[str]:
        found: list[str] = []
        async for metas in obstore.list(self._store, prefix or None):
            found += [meta["path"] for meta in metas]
        return sorted(found)

    async def now(self) -> Micros | None:
        if not self.is_remote:
            return None
        await self.put(_CLOCK, b"")
        meta = await self._retried("read", lambda: obstore.head_async(self._store, _CLOCK))
        return to_micros(meta["last_modified"])

    # -- writing ------------------------------------------------------------------------------------------

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        mode: PutMode = "create"
        if known is not None:
            mode = {"e_tag": known.tag}
            # What is None must not be in there.
            if known.generation is not None:
                mode["version"] = known.generation
        whole = b"".join(data) if isinstance(data, tuple) else data
        try:
            put = await obstore.put_async(self._store, name, whole, mode=mode, use_multipart=False)
        except _REFUSED as error:
            raise Conflict(f"{self.where(name)} has another version") from error
        except _MISSING as error:
            self._check_bucket(error)
            raise Conflict(f"{self.where(name)} is not there any more") from error
        except _FAILED as error:
            self._check_reason(error)
            raise Unclear(f"{self.place}: {_words(error)}") from error
        return self._version(put["e_tag"], put["version"])

    async def put(self, name: str, data: bytes) -> None:
        await self._retried(
            "write", lambda: obstore.put_async(self._store, name, data, mode="overwrite", use_multipart=False)
        )

    async def delete(self, names: Sequence[str]) -> None:
        if names:
            await self._retried("delete", lambda: self._delete(list(names)))

    async def _delete(self, names: list[str]) -> None:
        try:
            await obstore.delete_async(self._store, names)
        except _MISSING as error:
            # Some stores say so of one that is gone already, and stop there.
            self._check_bucket(error)
            for name in names:
                with suppress(*_MISSING):
                    await obstore.delete_async(self._store, name)

    async def close(self) -> None:
        # The answer is here before the thread that brought it has left Python. A thread that wants the interpreter back while
        # it ends aborts the process.
        for _ in range(_LOOKS):
            if not _is_answering():
                return
            await asyncio.sleep(_LOOK_AGAIN)

    # -- what went wrong ----------------------------------------------------------------------------------

    async def _retried(self, what: str, call: Callable[[], Awaitable[R]]) -> R:
        waits = retry_delays()
        began = time.monotonic()
        while True:
            try:
                return await call()
            except _FAILED as error:
                self._check_reason(error)
                # Where each try takes its whole time-out, few are enough.
                wait = next(waits, None) if time.monotonic() - began < _RETRY_FOR else None
                if wait is None:
                    raise BackendUnavailable(
                        f"{self.place} did not {what}: {_words(error)}; is it there, and can it be reached from here?"
                    ) from error
            await asyncio.sleep(wait)

    def _version(self, tag: str | None, generation: str | None) -> Version:
        if not tag:
            raise TaskHarborError(
                f"{self.place} names no version (ETag) of its objects, so writers could overwrite each other: "
                "use a store with conditional writes"
            )
        return Version(tag, generation)

    def _check_reason(self, error: Exception) -> None:
        """Raises for what no further try would change."""
        if isinstance(error, BackendUnavailable | InvalidRequest):
            raise error
        if isinstance(error, _NOT_LET_IN):
            # The store's own words may quote the key that was used.
            raise InvalidRequest(
                f"{self.place} refused us: check the credentials, and that they may read, write, list and delete there"
            ) from None
        if isinstance(error, exceptions.NotSupportedError):
            raise InvalidRequest(
                f"{self.place} has no conditional writes: use a store that has them"
            ) from error
        self._check_bucket(error)

    def _check_bucket(self, error: Exception) -> None:
        if any(words in str(error).lower() for words in _NOT_THERE):
            raise InvalidRequest(
                f"{self.place}: there is no such bucket or container; make it first"
            ) from None


def _is_answering() -> bool:
    """Return True if a thread that Python did not start is giving an answer to an event loop."""
    ours = {thread.ident for thread in threading.enumerate()}
    foreign = (frame for thread, frame in sys._current_frames().items() if thread not in ours)
    return any(
        one.f_code.co_name == "call_soon_threadsafe" for frame in foreign for one, _ in walk_stack(frame)
    )


def _words(error: Exception) -> str:
    """The store's own, short: what follows is a dump of the request."""
    return shown_text(" ".join(str(error).partition("Debug source")[0].split()))[:300]
