"""Where a lake is: a folder, or a prefix of an object store."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.errors import InvalidRequest

# Where libraries ask for credentials on machines of a cloud, if they were given none.
_METADATA = ("169.254.169.254", "metadata.google.internal")


def plain_failure(error: object) -> str:
    """Turn the coloured lines of an object store's library into one sentence."""
    text = re.sub(r"\x1b\[\d*m|\u21b3", "", str(error)).strip()
    if any(host in text for host in _METADATA):
        return "the object store is reached without credentials: give them in the environment of every process, or in the URL"
    answer = re.search(r"<Message>(.*?)</Message>", text)
    return answer[1] if answer else ": ".join(filter(None, map(str.strip, text.splitlines())))


class LakePlace(msgspec.Struct, frozen=True):
    """The root of a lake. It travels to the tasks, with the credentials that they need."""

    root: str
    # How the object store is reached; None for a folder.
    options: dict[str, str] | None = None

    def __repr__(self) -> str:
        """Without the options, which may hold a key."""
        return f"LakePlace({self.root!r})"

    @property
    def is_folder(self) -> bool:
        return self.options is None

    def uri(self, table: str) -> str:
        return f"{self.root}/{table.replace('.', '/')}"

    def filesystem(self, table: str) -> pafs.FileSystem:
        """Return the files below a table's root."""
        if self.is_folder:
            return pafs.SubTreeFileSystem(self.uri(table), pafs.LocalFileSystem())
        return pafs.PyFileSystem(DeltaStorageHandler(self.uri(table), self.options))


def parse_place(text: str | Path) -> LakePlace:
    """Parse a folder, or a URL like those of the object-store driver: `s3://bucket/prefix?region=...`, `gs://`, `az://`.

    Raises InvalidRequest for a URL that cannot be a lake.
    """
    if isinstance(text, Path) or "://" not in text:
        return LakePlace(str(Path(text).absolute()))
    store = parse_url(text)
    if store.is_in_memory:
        raise InvalidRequest(
            "a lake in memory would be gone at once: name a folder, or s3://, gs:// or az://"
        )
    is_folder = text.startswith("file:")
    return LakePlace(store.address, None if is_folder else store.storage_options)
