"""A compare-and-swap object: many callers, few writes, and no write that is guessed about.

Everything that arrives while a write is under way goes into the next one (group commit), and nobody is answered before the
write that holds their change has landed. A write that was refused, or of which nothing was heard, is settled by reading the
object: its ring of commit ids tells whether the write is part of it. State that was changed for a write that did not
land is thrown away, never undone.

Without a term, a handle is one of several writers: it works on what it has, and what it answers without a write it first
compares with the object. With a term, it is the only one that writes, and believes what it has as long as the term is valid.

An object is msgpack `[header, body]`. The serial counts commits, and the ring holds the ids of the last ones, so a writer can
tell from any later content whether its own write is part of it, as long as not too many others followed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar, cast
from zlib import crc32

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs, Conflict, Refused, Unclear, Version, retry_delays
from taskharbor.errors import BackendUnavailable, SchemaMismatch, TaskHarborError
from taskharbor.jobs import Micros

WARN_BYTES = 8 * 1024 * 1024
MAX_BYTES = 64 * 1024 * 1024
"""The size limit of a state. A change that makes it smaller is always written."""
COMPRESS_FROM = 64 * 1024
"""Bytes from which a state is compressed on its way to a remote store."""

FORMAT: Final = 3
RING: Final = 64
"""Commits whose ids are kept."""
ID_BYTES: Final = 8

_PLAIN, _ZLIB = 0, 1
_PAIR = b"\x92"
_BIN32 = b"\xc6"

_GATHER_SHARE = 0.5
"""Wait up to this share of the last pass's duration for callers to come back."""
_GATHER_SECONDS = 0.05
"""The longest wait for callers to come back, in seconds."""
_WORTH_GATHERING = 0.001
"""Waits shorter than this, in seconds, are skipped."""

_log = logging.getLogger(__name__)


# -- the envelope ---------------------------------------------------------------------------------------------


Fate: TypeAlias = Literal["landed", "refused", "open", "forgotten"]
"""The fate of a write, as a later content tells it. Refused: another commit has its place, so it can never land. Open: the
content is older than the write, which may still land. Forgotten: so many commits followed that the ring has lost its id."""


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The defaults are those of an object that does not exist yet."""

    format: int = FORMAT
    lineage: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(8))
    """Made with the object. It distinguishes an object that was removed and made again from an older content of itself."""
    epoch: int = 0
    """The epoch of the leader that may write without reading first; 0: there never was one."""
    serial: int = 0
    """The number of commits so far."""
    ring: bytes = b""
    """Ids of the last commits, the newest last."""
    packing: int = _PLAIN
    checksum: int = 0
    """CRC-32 of the header without this field and of the body: a database with a torn page can look whole."""

    def fate(self, serial: int, commit: bytes) -> Fate:
        """Return the fate of a write whose commit has that number."""
        back = self.serial - serial
        if back < 0:
            return "open"
        end = len(self.ring) - back * ID_BYTES
        if end < ID_BYTES:
            return "forgotten"
        return "landed" if self.ring[end - ID_BYTES : end] == commit else "refused"

    def is_before(self, other: Header) -> bool:
        """True for an older content of the same object."""
        return self.lineage == other.lineage and self.serial < other.serial

    def after(self, commit: bytes, *, epoch: int) -> Header:
        """The header of the next content."""
        ring = (self.ring + commit)[-RING * ID_BYTES :]
        return Header(FORMAT, self.lineage, epoch, self.serial + 1, ring)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Header, bytes]).decode


def seal(header: Header, body: bytes, *, compress: bool = False) -> tuple[bytes, bytes]:
    """The object's bytes, in two parts."""
    header = msgspec.structs.replace(header, packing=_ZLIB if compress else _PLAIN)
    header = msgspec.structs.replace(header, checksum=_checksum(header, body))
    if compress:
        body = zlib.compress(body, 1)
    return b"".join((_PAIR, _encode(header), _BIN32, len(body).to_bytes(4, "big"))), body


def _checksum(header: Header, body: bytes) -> int:
    return crc32(body, crc32(_encode(msgspec.structs.replace(header, checksum=0))))


def unseal(data: bytes, where: str) -> tuple[Header, bytes]:
    """Return header and body. `where` names the object in error messages."""
    try:
        header, body = _decode(data)
    except msgspec.MsgspecError:
        # Not a SchemaMismatch, which ends a worker: the objects of other queues are fine.
        raise BackendUnavailable(
            f"{where} is damaged, or not what TaskHarbor has written there: restore an earlier version of it, or name a place "
            "that is TaskHarbor's own"
        ) from None
    if header.format != FORMAT:
        raise SchemaMismatch(
            f"{where} has format {header.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    if header.packing == _ZLIB:
        with suppress(zlib.error):
            body = zlib.decompress(body)
    if _checksum(header, body) != header.checksum:
        raise BackendUnavailable(
            f"{where} is damaged: its checksum does not fit; restore an earlier version of it"
        )
    return header, body


# -- calls and writes -----------------------------------------------------------------------------------------


class Call(msgspec.Struct, eq=False):
    """A step, and the caller that waits for its outcome."""

    step: Callable[[Any], Any]
    is_look: bool
    is_of_a_caller: bool
    """True for a caller that may come back with the next change as soon as this one is answered."""
    future: asyncio.Future[Any]
    deadline: float

    def run(self, state: Any) -> Outcome:
        try:
            return self, self.step(state), None
        except Exception as error:
            return self, None, error


Outcome: TypeAlias = tuple[Call, Any, Exception | None]
"""A call, and the result or the error of one run of its step."""


def answer(outcomes: Iterable[Outcome]) -> None:
    for call, value, error in outcomes:
        if call.future.done():  # Its caller was cancelled, or has an answer already.
            continue
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(value)


def fail(calls: Iterable[Call], error: Exception) -> None:
    answer((call, None, error) for call in calls)


def keep_unanswered(calls: list[Call]) -> bool:
    """Drop the calls that have an answer. Returns True if calls are left."""
    calls[:] = [call for call in calls if not call.future.done()]
    return bool(calls)


class WriteAttempt(msgspec.Struct, eq=False):
    """A write without a certain answer, and the outcomes to report if it has landed."""

    serial: int
    commit: bytes
    outcomes: list[Outcome]

    def is_settled(self, header: Header, where: str) -> bool:
        """Return True if this content tells the fate of the write. Then its callers have an answer, or their calls run again."""
        match header.fate(self.serial, self.commit):
            case "open":
                return False
            case "landed":
                answer(self.outcomes)
            case "forgotten":
                error = BackendUnavailable(
                    f"{where}: so many others wrote meanwhile that it cannot be told whether this change was made; "
                    "repeating it is safe"
                )
                fail([call for call, _, _ in self.outcomes], error)
        return True


# -- the object -----------------------------------------------------------------------------------------------


class Term:
    """A leader's right to answer from the state that it holds. It lasts as long as it is renewed in time."""

    def __init__(self, epoch: int, ends_at: Micros, monotonic: Callable[[], Micros]) -> None:
        self.epoch = epoch
        self.ends_at = ends_at
        """Never later than the term's length after the beginning of a renewal that has landed."""
        self._monotonic = monotonic

    def is_valid(self) -> bool:
        """False: another leader may have taken over, so the object must be read before an answer."""
        return self._monotonic() < self.ends_at


class Deposed(BackendUnavailable):
    """There is a newer leader. This one never writes again; callers ask the other one."""


class StoredState(Protocol):
    touched: bool
    """Set by every change of the state, and reset before each pass."""

    def serialize(self) -> bytes: ...


S = TypeVar("S", bound=StoredState)
R = TypeVar("R")


class Content(msgspec.Struct, Generic[S], eq=False):
    """A content of the object, decoded. Without a version there is no object yet."""

    state: S
    header: Header
    version: Version | None


class CasObject(Generic[S]):
    """A handle on the object, used from one event loop."""

    def __init__(
        self,
        blobs: Blobs,
        name: str,
        decode: Callable[[bytes], S],
        *,
        term: Term | None = None,
        every_pass: Callable[[S], object] = lambda state: None,
        on_news: Callable[[S], object] = lambda state: None,
        give_up_after: float = 30.0,
    ) -> None:
        """`decode` makes a state of a body; no bytes are the empty state. `every_pass` may change the state before the steps
        of a pass; `on_news` sees each state that has landed, ours or another writer's. Neither may raise. A call is given up
        after so many seconds without a certain answer."""
        self.name = name
        self.size = 0
        """Bytes of the state as last written or read, before compression."""
        self._blobs = blobs
        self._decode = decode
        self._term = term
        self._every_pass = every_pass
        self._on_news = on_news
        self._give_up_after = give_up_after
        self._waiting: list[Call] = []
        self._passes: asyncio.Task[None] | None = None
        self._held: Content[S] | None = None
        self._newest: Header | None = None
        """The header of the newest content that is known to have landed."""
        self._attempts: list[WriteAttempt] = []
        self._last_failure = ""
        """The store's message about the last write that failed."""
        self._must_reload = False
        self._must_compare = False
        self._deposed = False
        self._closed = False
        self._has_warned = False
        self._gathered: asyncio.Future[None] | None = None
        """Set while a pass waits for callers to come back."""
        self._expected = 0

    @property
    def where(self) -> str:
        return self._blobs.where(self.name)

    # -- calls --------------------------------------------------------------------------------------------

    async def change(self, step: Callable[[S], R], *, is_housekeeping: bool = False) -> R:
        """Run a step that may change the state; its result, once that has landed. A step may be run several times, on
        different states: only the run that landed is answered. One that raises must have changed nothing."""
        return cast(R, await self._enter(step, is_look=False, is_of_a_caller=not is_housekeeping))

    async def look(self, step: Callable[[S], R]) -> R:
        """Run a step that changes nothing, on a state that has landed."""
        return cast(R, await self._enter(step, is_look=True, is_of_a_caller=False))

    async def refresh(self) -> None:
        """Read the changes of other writers, whatever the term says. `on_news` is called with them."""
        self.must_compare()
        await self.look(lambda state: None)

    def must_compare(self) -> None:
        """Make the next pass compare with the object before it answers."""
        self._must_compare = True

    def lead(self, term: Term | None) -> None:
        """From the next pass on write under this term, after reading again; None: as one of several writers."""
        self._term = term
        self._deposed = False
        self._must_reload = True

    def forget(self) -> None:
        """Let go of the content. The next pass reads it again."""
        if self._passes is None:
            self._held = None

    async def close(self) -> None:
        """Answer the calls that have arrived, and accept no more."""
        self._closed = True
        while self._passes is not None:
            await asyncio.wait((self._passes,))

    def _enter(self, step: Callable[[S], Any], *, is_look: bool, is_of_a_caller: bool) -> asyncio.Future[Any]:
        if self._closed:
            raise BackendUnavailable(f"{self.where} was closed")
        loop = asyncio.get_running_loop()
        call = Call(step, is_look, is_of_a_caller, loop.create_future(), loop.time() + self._give_up_after)
        self._waiting.append(call)
        self._note_arrival()
        if self._passes is None:
            self._passes = loop.create_task(self._pass_until_answered(), name=f"taskharbor {self.name}")
        return call.future

    # -- passes -------------------------------------------------------------------------------------------

    async def _pass_until_answered(self) -> None:
        calls: list[Call] = []
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                calls, self._waiting = self._waiting, []
                callers, began = _callers(calls), loop.time()
                try:
                    await self._settle(calls)
                except Exception as error:
                    self._fail_all(calls, error)
                if callers > 1:
                    await self._gather(callers, loop.time() - began)
        except BaseException:
            self._fail_all(calls, BackendUnavailable(f"{self.where} was closed"))
            raise
        finally:
            self._passes = None

    async def _gather(self, callers: int, spent: float) -> None:
        """Wait for callers to come back. Callers that were answered just now mostly come back at once. A pass without them would
        make each of their calls wait for two writes. So the pass begins when as many callers are there again, or a little later.
        A single caller never waits."""
        longest = min(spent * _GATHER_SHARE, _GATHER_SECONDS)
        if longest < _WORTH_GATHERING or self._closed:
            return
        # Callers that came meanwhile are waiting, and count beside the callers that come back.
        self._gathered = asyncio.get_running_loop().create_future()
        self._expected = callers + _callers(self._waiting)
        try:
            self._note_arrival()
            with suppress(TimeoutError):
                async with asyncio.timeout(longest):
                    await self._gathered
        finally:
            self._gathered = None

    def _note_arrival(self) -> None:
        gathered = self._gathered
        if gathered is not None and not gathered.done() and _callers(self._waiting) >= self._expected:
            gathered.set_result(None)

    def _fail_all(self, calls: list[Call], error: Exception) -> None:
        # The state in memory is unknown now.
        self._held = None
        fail(calls + self._waiting, error)
        self._waiting.clear()

    async def _settle(self, calls: list[Call]) -> None:
        """Run until each of the calls has its answer. Calls that arrive meanwhile join when the calls have to run again."""
        delays: Iterator[float] | None = None
        self._attempts.clear()
        try:
            while True:
                # Right after a write that failed: the ring forgets ids, so the fate of that write is read before anything else.
                is_fresh = await self._make_ready()
                if delays is not None and keep_unanswered(calls) and (delay := next(delays)) > 0:
                    await asyncio.sleep(delay)
                    self._give_up_late(calls)
                    await self._reread()
                    is_fresh = True
                if not keep_unanswered(calls) or await self._run(calls, is_fresh=is_fresh):
                    return
                # The first further run comes at once.
                delays = delays or chain([0.0], retry_delays(first=0.005, most=0.5, tries=1_000_000))
                calls += self._waiting
                self._waiting.clear()
        except TaskHarborError as error:
            if self._attempts and not isinstance(error, BackendUnavailable):
                # Other errors promise that nothing was changed, but this write may still land.
                raise BackendUnavailable(str(error)) from error
            raise

    async def _make_ready(self) -> bool:
        """Make sure that a state is held. Returns True if it was read just now."""
        if self._deposed:
            raise self._is_deposed()
        if self._must_reload:
            self._held, self._must_reload = None, False
        if self._held is not None:
            return False
        self._must_compare = False
        self._accept(await self._read())
        return True

    async def _run(self, calls: list[Call], *, is_fresh: bool) -> bool:
        """Run one pass over the calls. True: all are answered. False: they must run again, on the newer content."""
        looks = [call for call in calls if call.is_look]
        changes = [call for call in calls if not call.is_look]
        if looks and not is_fresh and not self._is_believed():
            await self._reread()
            is_fresh = True
        answer([call.run(self._content().state) for call in looks])
        while True:
            held = self._content()
            held.state.touched = False
            self._every_pass(held.state)
            outcomes = [call.run(held.state) for call in changes]
            if held.state.touched:
                return await self._write(held, outcomes)
            # An answer that needs no write must not be older than its question.
            if not outcomes or is_fresh or self._is_believed() or not await self._reread():
                answer(outcomes)
                return True
            is_fresh = True

    def _content(self) -> Content[S]:
        assert self._held is not None
        return self._held

    def _is_believed(self) -> bool:
        """Return True if the held content is current without a read."""
        term, held = self._term, self._held
        if term is None or held is None or self._must_compare:
            return False
        # An object that does not have our epoch yet can still be written by the leader before us.
        is_ours = held.version is None or held.header.epoch == term.epoch
        return is_ours and term.is_valid()

    def _give_up_late(self, calls: list[Call]) -> None:
        now = asyncio.get_running_loop().time()
        error = BackendUnavailable(
            f"{self.where}: no write got a certain answer in {self._give_up_after:g} s ({self._last_failure}); whether "
            "this change was made is not known, and repeating it is safe"
        )
        fail([call for call in calls if call.deadline <= now], error)

    # -- writing ------------------------------------------------------------------------------------------

    async def _write(self, held: Content[S], outcomes: list[Outcome]) -> bool:
        """Try once to replace the held content, under our epoch or as one of several writers."""
        commit = secrets.token_bytes(ID_BYTES)
        epoch = held.header.epoch if self._term is None else self._term.epoch
        header = held.header.after(commit, epoch=epoch)
        body = held.state.serialize()
        self._note_size(len(body))
        # Until the write has landed, this state may not be used.
        self._held = None
        if self._blobs.is_remote and len(body) >= COMPRESS_FROM:
            data = await asyncio.to_thread(seal, header, body, compress=True)
        else:
            data = seal(header, body)
        try:
            version = await self._blobs.write(self.name, data, held.version)
        except (Conflict, Unclear) as failure:
            self._last_failure = str(failure)
            if not isinstance(failure, Refused):
                self._attempts.append(WriteAttempt(header.serial, commit, outcomes))
            return False
        self._held, self._newest = Content(held.state, header, version), header
        answer(outcomes)
        self._on_news(held.state)
        return True

    def _settle_attempts(self, header: Header) -> None:
        """Settle the writes without an answer by the content of the object."""
        self._attempts = [one for one in self._attempts if not one.is_settled(header, self.where)]

    def _note_size(self, size: int) -> None:
        self.size = size
        if size >= WARN_BYTES and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has %.1f MiB, and every change writes all of it: spread the queue over shards (?shards=N in the URL of "
                "a new store), keep dead jobs for less time, or let fewer jobs wait; at %d MiB no more are accepted",
                self.where, size / 2**20, MAX_BYTES // 2**20,
            )  # fmt: skip

    # -- reading ------------------------------------------------------------------------------------------

    async def _read(self) -> Content[S]:
        """Return the stored content. It is never older than a content that is known to have landed."""
        newest = self._newest
        for delay in chain([0.0], retry_delays()):
            if delay:
                await asyncio.sleep(delay)
            found = await self._fetch()
            if newest is None or (found is not None and not found.header.is_before(newest)):
                break
        else:
            if found is not None:
                raise BackendUnavailable(
                    f"{self.where} shows an older content than it had before; try again later"
                )
        # If it was removed, making it again is as safe as making it for the first time.
        return found or Content(self._decode(b""), Header(), None)

    async def _reread(self) -> bool:
        """Compare with the object. Returns True if there was another content, which is held from now on."""
        self._must_compare = False
        held = self._content()
        other = await self._fetch(held.version)
        if other is None or other.header.is_before(held.header):
            return False
        self._accept(other)
        return True

    async def _fetch(self, unless: Version | None = None) -> Content[S] | None:
        blob = await self._blobs.read(self.name, unless)
        if blob is None:
            return None
        header, body = unseal(blob.data, self.where)
        self._note_size(len(body))
        return Content(self._decode(body), header, blob.version)

    def _accept(self, found: Content[S]) -> None:
        """Hold this content, which is current."""
        self._held = found
        if found.version is not None:
            self._newest = found.header
        self._settle_attempts(found.header)
        if self._term is not None and found.header.epoch > self._term.epoch:
            self._deposed = True
            raise self._is_deposed()
        self._on_news(found.state)

    def _is_deposed(self) -> Deposed:
        return Deposed(f"{self.where}: another broker leads now; this one has stopped writing")


def _callers(calls: list[Call]) -> int:
    return sum(call.is_of_a_caller for call in calls)
