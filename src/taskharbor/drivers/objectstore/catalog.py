"""The root object: which store this is, which queues it has, and who leads.

A queue is in here before its first object exists. So a new leader, who takes this object first, knows every object that the
leader before it could still write to.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Final, Self

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import Cell, Term
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch
from taskharbor.jobs import Micros

FORMAT: Final = 1
MAX_SHARDS: Final = 64


class Leader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: str
    url: str
    """Where clients find it."""
    term_us: Micros
    """How long it may be silent before another takes over."""
    renewals: int = 0
    """Grows as long as it lives; that is how others see it."""


class Entries(msgspec.Struct, array_like=True):
    """What the catalog holds."""

    format: int
    store_id: str
    shards: int
    """Objects per queue. Fixed when the store is made."""
    epoch: int
    """Of the newest leader there was."""
    leader: Leader | None
    queues: list[str]
    """In the order in which they were added; none is ever removed."""


class CatalogState:
    """Entries, or none yet, as a cell's state."""

    __slots__ = ("entries", "touched")

    def __init__(self, entries: Entries | None) -> None:
        self.entries = entries
        self.touched = False

    def made(self) -> Entries:
        if self.entries is None:
            raise BackendUnavailable("the store's catalog is gone: somebody removed it; open the store anew")
        return self.entries

    def set_leader(self, leader: Leader | None) -> None:
        self.made().leader = leader
        self.touched = True


class _CatalogCodec:
    def empty(self) -> CatalogState:
        return CatalogState(None)

    def decode(self, body: bytes) -> CatalogState:
        return CatalogState(_decode(body))

    def encode(self, state: CatalogState) -> bytes:
        return _encode(state.entries)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entries).decode


class Catalog:
    """A handle on it. `open()` before anything else."""

    def __init__(self, blobs: Blobs, *, shards: int | None = None, clock: Clock | None = None) -> None:
        """`shards`: as many as the URL asks for; None takes what the store has, and 1 for a new one."""
        self.blobs = blobs
        self.cell = Cell(blobs, CATALOG, _CatalogCodec(), clock=clock)
        self._wanted_shards = shards
        self._store_id = ""
        self._shards = 0
        self._known: dict[str, None] = {}

    @property
    def store_id(self) -> str:
        """Differs for every store that was ever made, at the same place too."""
        return self._store_id

    @property
    def shards(self) -> int:
        return self._shards

    @property
    def known_queues(self) -> Iterable[str]:
        """Those that this handle has heard of. They are never taken back."""
        return self._known.keys()

    async def open(self) -> Self:
        """Make the store, or check that it is one this version can work with. Opening twice is harmless."""
        if not self._store_id:
            entries = await self.cell.look(lambda state: state.entries)
            if entries is None:
                entries = await self.cell.change(self._make)
            self._check(entries)
            self._store_id, self._shards = entries.store_id, entries.shards
            self._learn(entries.queues)
        return self

    def _make(self, state: CatalogState) -> Entries:
        if state.entries is None:
            state.entries = Entries(FORMAT, secrets.token_hex(8), self._wanted_shards or 1, 0, None, [])
            state.touched = True
        return state.entries

    def _check(self, entries: Entries) -> None:
        if entries.format != FORMAT:
            raise SchemaMismatch(
                f"{self.blobs.place} has format {entries.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
            )
        if self._wanted_shards not in (None, entries.shards):
            raise InvalidRequest(
                f"{self.blobs.place} was made with shards={entries.shards}, and that is fixed: "
                f"write shards={entries.shards} or leave the option out"
            )

    # -- queues -------------------------------------------------------------------------------------------

    async def add_queues(self, queues: Iterable[str]) -> None:
        """Before a queue gets its first job or setting. Costs nothing for queues that are known."""
        unknown = [queue for queue in dict.fromkeys(queues) if queue not in self._known]
        if unknown:
            self._learn(await self.cell.change(lambda state: _with_queues(state, unknown)))

    async def queues(self) -> list[str]:
        """All there are now."""
        self._learn(await self.cell.look(lambda state: list(state.made().queues)))
        return list(self._known)

    def _learn(self, queues: Iterable[str]) -> None:
        self._known.update(dict.fromkeys(queues))

    def state_names(self, queues: Iterable[str]) -> Iterator[str]:
        """The objects of these queues."""
        return (state_name(queue, shard) for queue in queues for shard in range(self._shards))

    # -- leading ------------------------------------------------------------------------------------------

    def lead(self, term: Term | None) -> None:
        self.cell.lead(term)

    async def leading(self) -> tuple[int, Leader | None]:
        """Epoch and leader as the store says now."""
        self.cell.must_compare()
        return await self.cell.look(lambda state: (state.made().epoch, state.made().leader))

    async def close(self) -> None:
        await self.cell.close()


def _with_queues(state: CatalogState, wanted: list[str]) -> list[str]:
    queues = state.made().queues
    known = set(queues)
    for queue in wanted:
        if queue not in known:
            queues.append(queue)
            state.touched = True
    return list(queues)


CATALOG = "catalog"

_PLAIN = re.compile(rb"[a-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9a-f]{2})")
_LONGEST = 120
"""Characters of an escaped name; file systems allow 255, and other parts of a key need room too."""
_DIGEST = 32


def escaped(queue: str) -> str:
    """A queue's name as a folder's. Two queues never share one."""
    folder = "".join(chr(byte) if _PLAIN.match(bytes((byte,))) else f"={byte:02x}" for byte in queue.encode())
    if len(folder) <= _LONGEST:
        return folder
    # Too long to be spelled out, so this one cannot be read back; the catalog knows who it is.
    digest = hashlib.blake2b(queue.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{folder[: _LONGEST - _DIGEST - 2].rstrip('=')}=.{digest}"


def unescaped(folder: str) -> str | None:
    """The queue of a folder; None where its name was too long to be spelled out."""
    if "=." in folder:
        return None
    return b"".join(
        bytes((int(part, 16),)) if index % 2 else part.encode()
        for index, part in enumerate(_ESCAPE.split(folder))
    ).decode()


def shard_folder(queue: str, shard: int) -> str:
    return f"queues/{escaped(queue)}/{shard}"


def state_name(queue: str, shard: int) -> str:
    """The object with a shard's state."""
    return f"{shard_folder(queue, shard)}/state"


def log_folder(queue: str, shard: int) -> str:
    """Where a shard's log segments are."""
    return f"{shard_folder(queue, shard)}/log"
