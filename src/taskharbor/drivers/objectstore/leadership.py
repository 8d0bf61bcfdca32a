"""Leadership: one broker at a time holds the store's state in memory and answers from it; others stand by.

No two clocks are ever compared. A leader renews by writing the catalog, and believes in its own term only until a term after
its last renewal *began*. A standby takes over when the catalog has shown no renewal for a whole term of its own clock, which
began after that renewal had landed. So when one begins to answer, the other has stopped, and even where a machine stood
still in between, the epoch in every object refuses the old one's writes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs, steady_us
from taskharbor.drivers.objectstore.cas import CasObject, Deposed, Term
from taskharbor.drivers.objectstore.catalog import Catalog, CatalogState, Leader, state_name
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Micros

if TYPE_CHECKING:
    from taskharbor.drivers.objectstore.queue import Store

_AT_ONCE = 16
_log = logging.getLogger(__name__)


class UnreadState(msgspec.Struct):
    """The unread body of an object: a new leader changes the epoch and keeps the body."""

    body: bytes
    touched: bool = False

    def sign(self) -> None:
        self.touched = True

    def serialize(self) -> bytes:
        return self.body


async def raise_epochs(blobs: Blobs, names: Iterable[str], term: Term) -> None:
    """Give the objects the epoch of this term. Their bodies stay. A missing object is made, empty."""
    remaining = iter(names)

    async def take_next() -> None:
        for name in remaining:
            await CasObject(blobs, name, UnreadState, term=term).change(UnreadState.sign)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(take_next())


class Leadership:
    """One candidate. `run()` stands by, leads, and stands by again if another leader takes over."""

    def __init__(
        self, store: Store, *, url: str, term: float, monotonic: Callable[[], Micros] = steady_us
    ) -> None:
        """`url`: the address of this broker for clients, if it leads. `term`: the longest silence in seconds."""
        self.leads = asyncio.Event()
        """Set while this candidate has the leadership and all queues know it."""
        self._store = store
        # A separate handle: the driver's handle is fenced off with the rest of the driver when leadership is lost.
        self._catalog = Catalog(store.catalog.blobs)
        self._length: Micros = round(term * SECOND)
        self._entry = Leader(secrets.token_hex(8), url, self._length)
        """This candidate's own entry, as it is written while it leads."""
        self._monotonic = monotonic
        self._term: Term | None = None
        self._leader: Leader | None = None
        self._seen: tuple[int, Leader | None] | None = None
        self._seen_since: Micros = 0
        self._fencing: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._is_failing = False

    @property
    def is_leader(self) -> bool:
        """True while calls may be answered here."""
        return self.leads.is_set() and self._term is not None and self._term.is_valid()

    @property
    def leader_url(self) -> str | None:
        """The address of the leader, as far as it is known."""
        return None if self._leader is None else self._leader.url

    @property
    def epoch(self) -> int | None:
        return None if self._term is None else self._term.epoch

    async def run(self) -> None:
        """Run until cancelled. Then give leadership back with `resign()`."""
        try:
            while True:
                await self.take_step()
                await self._rest()
        finally:
            await self._stop_fencing()

    def look_now(self) -> None:
        """Check now: a call got `Deposed`, so there is no need to wait for the next renewal."""
        self._nudged.set()

    async def _rest(self) -> None:
        """Wait until something is due: a renewal, a look, or the end of another's term."""
        rest = self._length // 3
        if self._term is None and self._leader is not None:
            rest = min(rest, self._seen_since + _longest_silence(self._leader) - self._monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(max(rest, 1000) / SECOND):
                await self._nudged.wait()
        self._nudged.clear()

    async def take_step(self) -> None:
        """Take the step that is due: renew, or look for a leader and take over if there is none."""
        try:
            await self._catalog.open()
            if self._term is None:
                await self._stand_by()
            else:
                await self._renew(self._term)
        except Deposed:
            _log.warning("another broker leads now (this one had epoch %s); standing by", self.epoch)
            await self._end_term()
        except BackendUnavailable as error:
            if not self._is_failing:
                _log.warning("the store does not answer, so nobody can lead for now: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    async def resign(self) -> None:
        """Give leadership back, so that another can take it at once. Harmless for a candidate that does not lead."""
        term = self._term
        if term is None:
            return
        await self._end_term()
        try:
            await self._catalog.object.change(lambda state: self._replace_entry(state, term.epoch, None))
        except BackendUnavailable as error:
            _log.warning(
                "leadership could not be given back; another takes it when the term is over: %s", error
            )

    async def _end_term(self) -> None:
        """Stop answering calls."""
        if self._term is not None:
            self._term.ends_at = ALWAYS
        self._term = self._leader = self._seen = None
        self.leads.clear()
        await self._stop_fencing()
        self._catalog.object.lead(None)

    # -- standing by --------------------------------------------------------------------------------------

    async def _stand_by(self) -> None:
        epoch, leader = seen = await self._catalog.leading()
        self._leader = leader
        if seen != self._seen:
            # By this machine's clock, and after the look: that is later than the beginning of the renewal that was seen.
            self._seen, self._seen_since = seen, self._monotonic()
        # The entry is our own, but we do not hold it: its answer was lost when we took it.
        if (
            leader is None
            or leader.id == self._entry.id
            or self._monotonic() - self._seen_since >= _longest_silence(leader)
        ):
            await self._take(epoch, leader)

    async def _take(self, epoch: int, leader: Leader | None) -> None:
        catalog = self._catalog
        term = Term(epoch + 1, ALWAYS, self._monotonic)
        began = self._monotonic()
        # The catalog's object carries the new epoch from this write on.
        catalog.object.lead(term)
        queues: list[str] | None = None
        try:
            queues = await catalog.object.change(lambda state: _take_over(state, epoch, leader, self._entry))
        finally:
            if queues is None:
                catalog.object.lead(None)
        if queues is None:
            return
        term.ends_at = began + self._length
        self._term, self._leader = term, self._entry
        _log.info("leading from now on, epoch %d, once all %d queues know it", term.epoch, len(queues))
        # Renewals go on beside it: a store may have many queues.
        self._fencing = asyncio.get_running_loop().create_task(
            self._fence(term, queues), name="taskharbor fencing"
        )
        await asyncio.wait((self._fencing,), timeout=self._length / SECOND / 6)

    async def _fence(self, term: Term, queues: list[str]) -> None:
        blobs, shards = self._catalog.blobs, range(self._catalog.shards)
        names = [state_name(queue, shard) for queue in queues for shard in shards]
        told: set[str] = set()
        while True:
            try:
                await raise_epochs(blobs, names, term)
                break
            except* BackendUnavailable as failed:
                # `take_step` goes on renewing, and knows nothing of a single object.
                for reason in {str(error) for error in failed.exceptions} - told:
                    _log.warning("cannot lead yet: %s", reason)
                    told.add(reason)
            await asyncio.sleep(self._length / SECOND / 10)
        if self._term is term:
            self._store.lead(term)
            self.leads.set()

    async def _stop_fencing(self) -> None:
        fencing, self._fencing = self._fencing, None
        if fencing is not None:
            fencing.cancel()
            await asyncio.gather(fencing, return_exceptions=True)

    # -- leading ------------------------------------------------------------------------------------------

    async def _renew(self, term: Term) -> None:
        began = self._monotonic()
        self._entry = entry = msgspec.structs.replace(self._entry, renewals=self._entry.renewals + 1)
        await self._catalog.object.change(lambda state: self._replace_entry(state, term.epoch, entry))
        self._leader = entry
        term.ends_at = began + self._length
        if self.leads.is_set():
            # Others may have added queues.
            await self._store.catalog.object.refresh()
            # Others may have added jobs too. Without a comparison, a queue that only others write to would never show them.
            self._store.compare_soon()

    def _replace_entry(self, state: CatalogState, epoch: int, entry: Leader | None) -> None:
        entries = state.made()
        if entries.epoch != epoch or entries.leader is None or entries.leader.id != self._entry.id:
            raise Deposed("another broker has taken over")
        state.set_leader(entry)


def _longest_silence(leader: Leader) -> Micros:
    """Return the longest silence of a leader. It is a little more than its term, because no two clocks run at the same rate."""
    return leader.term_us + leader.term_us // 10


def _take_over(state: CatalogState, epoch: int, seen: Leader | None, mine: Leader) -> list[str] | None:
    """Take over the leadership and return the queues. Returns None and changes nothing if the catalog has changed since it was
    seen: another candidate was quicker, or a renewal in between keeps its leader."""
    entries = state.made()
    if entries.epoch != epoch or entries.leader != seen:
        return None
    entries.epoch = epoch + 1
    state.set_leader(mine)
    return list(entries.queues)
