"""`file://`: a folder with the one thing that folders lack, a write that depends on the version that is there.

A version is a random number at the head of the file: times repeat, and numbers that count up begin again after a removal. A
write prepares its file completely, takes a lock, compares, renames, and lets go; it is answered when the folder is on the disk
too. A crash at any moment leaves the old content or the new one, and the lock goes with its process.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Data, Refused, Version
from taskharbor.errors import BackendUnavailable, InvalidRequest

if sys.platform != "win32":
    import fcntl

R = TypeVar("R")

_MAGIC = b"TaskHarbor blob 1\n"
_TAG = 16
_HEAD = len(_MAGIC) + _TAG
_PRIVATE = ".taskharbor"
"""Locks and unfinished files are in one folder, so that a listing never finds them."""
_ANYTHING = "*"
"""Stands for any version."""
_LOCKS = 64
_ABANDONED_AFTER = 3600.0
_LOCK_WITHIN = 10.0
_THREADS = 8


class LocalFiles(Blobs):
    """Safe among threads and processes of one machine, and on file systems whose flock holds between machines."""

    is_remote = False

    def __init__(self, folder: str | Path, *, sync: bool = True) -> None:
        """Without `sync` no write waits for the disk: a crash of the machine may lose answered changes."""
        if sys.platform == "win32":
            raise InvalidRequest(
                "file:// needs flock and rename as POSIX has them: use sqlite:// on this machine"
            )
        self._root = Path(folder).absolute()
        self.place = f"file://{self._root}"
        self._sync = sync
        self._locks = self._root / _PRIVATE / "locks"
        self._unfinished = self._root / _PRIVATE / "unfinished"
        self._is_ready = False
        self._threads: ThreadPoolExecutor | None = None

    # -- the contract, each in a thread: the disk may keep us waiting, the loop must not be ----------------

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        return await self._in_thread(lambda: self._read(self._path(name), unless, size))

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        return await self._in_thread(lambda: self._write(name, data, None if known is None else known.tag))

    async def put(self, name: str, data: bytes) -> None:
        await self._in_thread(lambda: self._write(name, data, _ANYTHING))

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        await self._in_thread(lambda: self._delete(paths))

    async def names(self, prefix: str) -> list[str]:
        return await self._in_thread(lambda: sorted(self._walk(prefix)))

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], R]) -> R:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="taskharbor-files")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except OSError as error:
            if isinstance(error, BackendUnavailable):
                raise
            if isinstance(error, (IsADirectoryError, NotADirectoryError)):
                raise InvalidRequest(f"{self.place}: an object and a folder cannot have one name") from error
            raise BackendUnavailable(
                f"{self.place}: {error.strerror or error}; is this a folder, with room and rights to write?"
            ) from error

    # -- reading ------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or "\0" in part for part in parts):
            raise InvalidRequest(
                f"{name!r} is not a name for an object: no empty parts, none that begin with a dot"
            )
        return self._root.joinpath(*parts)

    def _read(self, path: Path, unless: Version | None = None, size: int | None = None) -> Blob | None:
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(_HEAD)
                version = Version(head[len(_MAGIC) :].hex())
                if unless is not None and version.tag == unless.tag:
                    return None
                data = file.read(-1 if size is None else size)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        if len(head) != _HEAD or not head.startswith(_MAGIC):
            raise BackendUnavailable(
                f"{path} is damaged, or was not written by TaskHarbor: restore it, or name a folder that is TaskHarbor's own"
            )
        return Blob(data, version)

    def _walk(self, prefix: str) -> Iterator[str]:
        top = self._path(prefix) if prefix else self._root
        if top.is_file():
            yield prefix
        for folder, folders, files in os.walk(top):
            folders[:] = [inner for inner in folders if not inner.startswith(".")]
            relative = Path(folder).relative_to(self._root)
            for file in files:
                if not file.startswith("."):
                    yield (relative / file).as_posix()

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self, name: str, data: Data, expected: str | None) -> Version:
        path = self._path(name)
        # Most conflicts are seen here, before anything is written.
        self._compare(name, path, expected)
        tag = secrets.token_bytes(_TAG)
        self._make_ready()
        self._make_folder(path.parent)
        prepared = self._unfinished / secrets.token_hex(12)
        try:
            descriptor = os.open(prepared, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines((_MAGIC + tag, *(data if isinstance(data, tuple) else (data,))))
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
            with self._locked(name):
                self._compare(name, path, expected)
                os.rename(prepared, path)
        except BaseException:
            prepared.unlink(missing_ok=True)
            raise
        # Not under the lock: a later write that builds on this rename brings it to the disk with its own.
        self._sync_folder(path.parent)
        return Version(tag.hex())

    def _compare(self, name: str, path: Path, expected: str | None) -> None:
        if expected == _ANYTHING:
            return
        blob = self._read(path, size=0)
        if (None if blob is None else blob.version.tag) != expected:
            raise Refused(f"{self.where(name)} has another version")

    def _delete(self, paths: list[Path]) -> None:
        self._make_ready()
        folders = set()
        for path in paths:
            with self._locked(path.relative_to(self._root).as_posix()):
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    continue
            folders.add(path.parent)
        for folder in folders:
            self._sync_folder(folder)

    # -- locks and folders --------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Exclude other writers of that name, in any process. Held for a comparison and a rename, never while the disk works."""
        # A few files serve all names. With one file per name, removing it would race with its next user.
        file = self._locks / f"{zlib.crc32(name.encode()) % _LOCKS:02d}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(descriptor)
            yield
        finally:
            # Closing is not enough where the process was forked meanwhile: the child has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        deadline = time.monotonic() + _LOCK_WITHIN
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BackendUnavailable(
                        f"{self.place}: another process has held a lock for {_LOCK_WITHIN:g} s; is it stopped?"
                    ) from None
            # Waiting in flock itself could never be given up, should the holder be frozen.
            time.sleep(random.uniform(0.0005, 0.0015))

    def _make_ready(self) -> None:
        """Make the folder before the first write. A reader makes nothing."""
        if not self._is_ready or not self._unfinished.is_dir():
            for folder in (self._locks, self._unfinished):
                self._make_folder(folder)
            # Killed writers leave files behind. Somebody else may sweep too.
            long_ago = time.time() - _ABANDONED_AFTER
            for file in self._unfinished.glob("*"):
                with suppress(FileNotFoundError):
                    if file.stat().st_mtime < long_ago:
                        file.unlink()
            self._is_ready = True

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            made.mkdir(0o700, exist_ok=True)
            self._sync_folder(made.parent)

    def _sync_folder(self, folder: Path) -> None:
        if not self._sync:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
