"""The root object: the id of the store, its queues, and its leader.

A queue is in here before its first object exists. A new leader takes this object first, so it knows every object that the leader
before it could still write to.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import CasObject
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import Micros

CATALOG: Final = "catalog"
MAX_SHARDS: Final = 64


class Leader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: str
    url: str
    """The URL at which clients find it."""
    term_us: Micros
    """The longest silence before another leader takes over."""
    renewals: int = 0
    """Grows as long as the leader lives, so that others see that it does."""


class Entries(msgspec.Struct, array_like=True):
    """The content of the catalog."""

    store_id: str
    shards: int
    """Objects per queue. Fixed when the store is made."""
    epoch: int = 0
    """The epoch of the newest leader so far."""
    leader: Leader | None = None
    queues: list[str] = []
    """In the order in which they were added; none is ever removed."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entries).decode


class CatalogState:
    """The entries, or none yet, as the state of a compare-and-swap object."""

    def __init__(self, body: bytes) -> None:
        self.entries = _decode(body) if body else None
        self.touched = False

    def serialize(self) -> bytes:
        return _encode(self.entries)

    def made(self) -> Entries:
        if self.entries is None:
            raise BackendUnavailable("the store's catalog is gone: somebody removed it; open the store anew")
        return self.entries

    def add_queues(self, wanted: Sequence[str]) -> list[str]:
        """Add queues, and return all queues."""
        queues = self.made().queues
        new = [queue for queue in dict.fromkeys(wanted) if queue not in queues]
        queues += new
        self.touched |= bool(new)
        return list(queues)

    def set_leader(self, leader: Leader | None) -> None:
        self.made().leader = leader
        self.touched = True


class Catalog:
    """A handle on the catalog. Call `open()` first."""

    def __init__(self, blobs: Blobs, *, shards: int | None = None) -> None:
        """`shards`: the number that the URL asks for; None takes the store's number, and 1 for a new store."""
        self.blobs = blobs
        self.object = CasObject(blobs, CATALOG, CatalogState)
        self.store_id = ""
        """Unique for every store that was ever made, even at the same place."""
        self.shards = 0
        self.known: set[str] = set()
        """The queues that this handle knows. A queue is never removed."""
        self._wanted_shards = shards

    async def open(self, *, makes: bool = True) -> Self:
        """Make the store, or check that it has the shards that the URL asks for. Opening twice is harmless.

        `makes`: if False, a store that is not there is an error.
        """
        if not self.store_id:
            entries = await self.object.look(lambda state: state.entries)
            if entries is None and not makes:
                raise BackendUnavailable(
                    f"{self.blobs.place}: there is no such store; it is made when the first job is enqueued"
                )
            if entries is None:
                entries = await self.object.change(self._make)
            if self._wanted_shards not in (None, entries.shards):
                raise InvalidRequest(
                    f"{self.blobs.place} was made with shards={entries.shards}, and that is fixed: "
                    f"write shards={entries.shards} or leave the option out"
                )
            self.store_id, self.shards = entries.store_id, entries.shards
            self.known.update(entries.queues)
        return self

    def _make(self, state: CatalogState) -> Entries:
        if state.entries is None:
            state.entries = Entries(secrets.token_hex(8), self._wanted_shards or 1)
            state.touched = True
        return state.entries

    async def add_queues(self, queues: Sequence[str]) -> None:
        """Add queues before they get their first job or setting."""
        self.known.update(await self.object.change(lambda state: state.add_queues(queues)))

    async def queues(self) -> list[str]:
        """Return all queues."""
        found = await self.object.look(lambda state: list(state.made().queues))
        self.known.update(found)
        return found

    async def leading(self) -> tuple[int, Leader | None]:
        """Return epoch and leader as the store has them now."""
        self.object.must_compare()
        return await self.object.look(lambda state: (state.made().epoch, state.made().leader))


_PLAIN = re.compile(rb"[a-z0-9_-]")
_LONGEST = 120
"""Characters of an escaped name; file systems allow 255, and other parts of a key need room too."""
_DIGEST = 32


def escaped(queue: str) -> str:
    """Return the folder name of a queue. Two queues never share one."""
    folder = "".join(chr(byte) if _PLAIN.match(bytes((byte,))) else f"={byte:02x}" for byte in queue.encode())
    if len(folder) <= _LONGEST:
        return folder
    # Too long to be spelled out, so the name cannot be read back; the catalog has it.
    digest = hashlib.blake2b(queue.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{folder[: _LONGEST - _DIGEST - 2].rstrip('=')}=.{digest}"


def state_name(queue: str, shard: int) -> str:
    """The object with a shard's state."""
    return f"queues/{escaped(queue)}/{shard}/state"


def log_folder(queue: str, shard: int) -> str:
    """The folder of a shard's log segments."""
    return f"queues/{escaped(queue)}/{shard}/log"
