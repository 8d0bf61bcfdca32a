"""Claims, extends and ends leases. A claim whose answer was lost is repeated under its own name, so no job that it leased is
forgotten.

A blocking claim is sent to the server ahead of time, behind an `XREAD BLOCK` on the queue's stream of notifications. The server
runs it as soon as something may have become runnable, so the answer already brings the job. It claims by the caller's clock,
which the function computes from the server's. Each blocking claim has its own connection while it blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace
from redis.exceptions import ResponseError

from taskharbor.clock import BackendClock
from taskharbor.drivers.contract import Ack, Extension, Settlement
from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.redis.connection import ConnectionLost, Server, SharedConnection, pack
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.errors import code_of
from taskharbor.drivers.redis.library import RedisCall, Word
from taskharbor.drivers.redis.records import NONCE_LENGTH, LeaseFront, encode, leased_records, record_from
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.drivers.validation import check_records
from taskharbor.errors import (
    BackendUnavailable,
    JobError,
    JobFinished,
    JobNotDead,
    JobNotFound,
    JobNotInflight,
    KeyConflict,
    LeaseExpired,
    LeaseMismatch,
    TaskHarborError,
)
from taskharbor.jobs import SECOND, JobRecord, Lease, Micros
from taskharbor.requests import new_id, new_token

log = logging.getLogger("taskharbor.redis")

_FIRST = 5
"""The index of the first job in the answer."""
_REST = 1.0
_LONG_REST = 60.0
"""Seconds without blocking claims after the server refused one, and after it refused XREAD to this user."""
_VIEWS = 1000
UNLOADABLE = (ValueError, LookupError, TypeError, struct.error)
"""Errors of reading a stored job."""


class Claims:
    """One handle's claims."""

    def __init__(self, store: RedisStore, emptied: dict[str, str]) -> None:
        self._store = store
        self._emptied = emptied
        """The number of each queue's moves, as seen by a claim of all types that left no job."""
        self._unclear: dict[tuple[str, str], list[str]] = defaultdict(list)
        """Tokens of claims whose answer never came, by queue and worker. The next claim asks for their jobs first."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._server_clock = BackendClock(store.time)
        self._views: dict[tuple[str, str, tuple[str, ...] | None], tuple[int, Micros]] = {}
        """The view of a claim that left no job: the number of the queue's moves, and the next due instant (-1: none)."""
        self._idle: dict[str, list[SharedConnection]] = {}
        """Connections for blocking claims, by queue."""
        self._rests_until: dict[str, float] = {}

    async def close(self) -> None:
        """Close the handle's claims. Claims that are still under way need the store to give jobs back."""
        await asyncio.gather(*self._giving_back, return_exceptions=True)

    async def reserve(self, call: Reserve) -> list[JobRecord]:
        unclear = self._unclear.get((call.queue, call.worker))
        is_again = bool(unclear)
        token = unclear.pop() if unclear else new_token()
        try:
            (answer,) = await self._store.run([self._call(call, token)], is_again=is_again)
        except asyncio.CancelledError:
            self._take_back(call, token)
            raise
        except BackendUnavailable:
            self._unclear[call.queue, call.worker].append(token)
            raise
        return await self._claimed(call, token, answer)

    def _call(self, call: Reserve, token: str, sent_at: Word = "") -> RedisCall:
        """Make the call of a claim. `sent_at` is the server's time when the caller's is `now`, for a call that is sent ahead and
        run later."""
        types = b"" if call.types is None else encode(call.types)
        words = (call.lease_for, call.limit, call.worker, token, new_id(), types, sent_at)
        return self._store.call("reserve", call.queue, call.now, *words)

    async def _claimed(self, call: Reserve, token: str, answer: Sequence[Any]) -> list[JobRecord]:
        """Read an answer, and remember its view of the queue for the next claim."""
        untold, moves, due, reserved_at, expires_at = answer[:_FIRST]
        self._views.pop(_key(call), None)
        if moves >= 0:
            if len(self._views) >= _VIEWS:
                # A handle that claims for so many workers, as a broker's does, makes no blocking claims for them.
                self._views.clear()
            self._views[_key(call)] = moves, due
            if call.types is None:
                self._emptied[call.queue] = str(moves)
        if untold:
            # The next caller that moves jobs of this queue delivers them. The leased jobs must not be lost because of an error
            # here.
            with contextlib.suppress(TaskHarborError):
                await deliver(self._store, call.queue)
        lease = LeaseFront(call.worker, expires_at, reserved_at)
        ids, values = answer[_FIRST::2], answer[_FIRST + 1 :: 2]
        try:
            return leased_records(ids, values, call.queue, token, lease)
        except UNLOADABLE:
            await set_aside(self._store, call.queue, call.now)
        records: list[JobRecord] = []
        for job_id, value in zip(ids, values, strict=True):
            with contextlib.suppress(*UNLOADABLE):
                records += leased_records([job_id], [value], call.queue, token, lease)
        return records

    def _take_back(self, call: Reserve, token: str) -> None:
        """Give back the jobs of a claim whose caller went away. Otherwise they would stall until their leases expire."""
        back = asyncio.ensure_future(self._give_back(call, token))
        self._giving_back.add(back)
        back.add_done_callback(self._giving_back.discard)

    async def _give_back(self, call: Reserve, token: str) -> None:
        """Repeat the same claim with limit 0. Jobs that the earlier try leased go back. If the server has yet to read that try,
        it does nothing."""
        nothing = Reserve(call.queue, 0, call.lease_for, call.now, call.worker, None)
        with contextlib.suppress(TaskHarborError):
            await self._store.run([self._call(nothing, token)], is_again=True)

    # -- blocking claims ----------------------------------------------------------------------------------

    async def reserve_next(self, call: Reserve, timeout: float) -> list[JobRecord] | None:
        """Claim once the queue has moved, something came due, or the time is up. Returns None if that is not possible: the last
        claim left something, or the server refuses to block."""
        loop = asyncio.get_running_loop()
        store, options, queue = self._store, self._store.options, call.queue
        began = loop.time()
        view = self._views.pop(_key(call), None)
        # With `wait_replicas` or `wait_aof` a change is confirmed behind the call, and the confirmation would block with it.
        if view is None or not options.notify or options.waits or self._unclear.get((queue, call.worker)):
            return None
        if began < self._rests_until.get(queue, 0.0):
            return None
        try:
            await self._server_clock.refresh()
            server = store.server_for(store.keys(queue).channel)
            connection = await self._connection(queue, server)
        except (BackendUnavailable, ConnectionLost):
            return None  # Nothing was claimed.
        elapsed = loop.time() - began
        seconds = min(timeout, options.timeout / 2)
        moves, due = view
        if due >= 0:
            seconds = min(seconds, (due - call.now) / SECOND - elapsed)
        # Rather too early than too late: a job that is due by its producer's clock should be due by the claim's clock.
        sent_at = max(0, self._server_clock.now() - int(elapsed * SECOND) - self._server_clock.error)
        milliseconds = max(1, math.ceil(seconds * 1000))  # 0 would mean for ever.
        token = new_token()
        block = pack(("XREAD", "BLOCK", milliseconds, "STREAMS", store.keys(queue)["notify"], f"{moves}-0"))
        claim = server.packed(self._call(call, token, sent_at))
        try:
            blocked, answer = await connection.ask(block + claim, 2)
        except ConnectionLost:
            self._unclear[queue, call.worker].append(token)
            return None
        except asyncio.CancelledError:
            # If the server has not run the claim yet, nothing happens; else its leases are given back.
            connection.abort("nobody waits for its answer any more")
            self._take_back(call, token)
            raise
        if isinstance(blocked, ResponseError) or isinstance(answer, ResponseError):
            # An ordinary call learns the reason, or goes to the server that has the queue now.
            is_forbidden = isinstance(blocked, ResponseError) and code_of(blocked) == "NOPERM"
            if is_forbidden:
                log.warning(
                    "%s: this user may not use XREAD on the keys of its queues; idle workers wait by other means",
                    options.place,
                )
            self._rests_until[queue] = loop.time() + (_LONG_REST if is_forbidden else _REST)
            connection.abort("the server refused a blocking claim")
        else:
            self._idle.setdefault(queue, []).append(connection)
        if isinstance(answer, ResponseError):
            return None
        return await self._claimed(call, token, answer)

    async def _connection(self, queue: str, server: Server) -> SharedConnection:
        idle = self._idle.get(queue, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return await server.another_connection()


def _key(call: Reserve) -> tuple[str, str, tuple[str, ...] | None]:
    return call.queue, call.worker, None if call.types is None else tuple(call.types)


# -- settlements and heartbeats -------------------------------------------------------------------------------

T = TypeVar("T")
L = TypeVar("L", Settlement, Extension)
Words: TypeAlias = Callable[[list[T]], Iterable[Word]]
"""Makes the arguments of a function for some items."""

_NOT_FOUND = -1
_ERRORS = (JobNotFound, JobNotInflight, LeaseMismatch, LeaseExpired, JobFinished, KeyConflict, JobNotDead)
"""The errors of `lua/leases.lua`, from -1 down."""


def job_error(job_id: str, code: int) -> JobError:
    return _ERRORS[-1 - code](job_id)


async def ask_items(
    store: RedisStore,
    name: str,
    now: Micros,
    items: Sequence[T],
    queues: Sequence[str | None],
    words: Words[T],
) -> list[Any]:
    """Ask the queue of each item about it, in one round trip, and return the answers in order. An item without a queue is not
    found."""
    groups: dict[str, list[int]] = {}
    for n, queue in enumerate(queues):
        if queue is not None:
            groups.setdefault(queue, []).append(n)
    told = {queue: words([items[n] for n in ns]) for queue, ns in groups.items()}
    said = await store.ask_queues(name, now, told)
    answers: list[Any] = [_NOT_FOUND] * len(queues)
    for queue, (untold, *several) in said.items():
        # No answers mean that all settlements succeeded. `untold` deaths are those that a settlement caused or found.
        for n, answer in zip(groups[queue], several or repeat(0), strict=False):
            answers[n] = answer
        if untold:
            await deliver(store, queue)
    return answers


async def settle(store: RedisStore, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    codes = await _ask_holders(store, "settle", settlements, now, _endings)
    ended = zip(settlements, codes, strict=True)
    return [job_error(one.job_id, code) if code else None for one, code in ended]


async def extend_lease(
    store: RedisStore, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    answers = await _ask_holders(store, "extend", extensions, now, lambda items: [lease_for, *_beats(items)])
    return [_lease(one, answer) for one, answer in zip(extensions, answers, strict=True)]


async def _ask_holders(
    store: RedisStore, name: str, items: Sequence[L], now: Micros, words: Words[L]
) -> list[Any]:
    """Ask the queue of each item, which is part of its token. An item that is not found there is searched for in all queues, so
    that a caller with a wrong token gets the right error."""
    named = [item.token[NONCE_LENGTH:] for item in items]
    answers = await ask_items(store, name, now, items, named, words)
    if _NOT_FOUND in answers:
        lost = [n for n, answer in enumerate(answers) if answer == _NOT_FOUND]
        # A token of another queue is no lease's: the rest of it must not count there.
        others = [replace(items[n], token="") for n in lost]
        homes = await store.located([item.job_id for item in others])
        queues = [homes.get(item.job_id) for item in others]
        again = await ask_items(store, name, now, others, queues, words)
        for n, answer in zip(lost, again, strict=True):
            answers[n] = answer
    return answers


def _endings(settlements: Sequence[Settlement]) -> list[Word]:
    leases: list[Word] = []
    others: list[Word] = []
    place = 0
    # The leases of one claim have one token, and mostly end together.
    for token, run in groupby(settlements, attrgetter("token")):
        ids: list[Word] = []
        for one in run:
            place += 1
            ids.append(one.job_id)
            if type(one) is not Ack:
                others += (place, encode(one), b"")
            elif one.result is not None:
                # Binary values are separate: the server's unpacker only reads text.
                others += (place, b"", one.result)
        leases += (token[:NONCE_LENGTH], len(ids), *ids)
    return [new_id(), place, *leases, *others]


def _beats(extensions: Sequence[Extension]) -> Iterator[Word]:
    for one in extensions:
        progress = b"" if one.progress is None else b"+" + one.progress
        yield from (one.job_id, one.token[:NONCE_LENGTH], progress)


def _lease(extension: Extension, answer: Any) -> Lease | JobError:
    if isinstance(answer, int):
        return job_error(extension.job_id, answer)
    expires_at, is_cancelled = answer
    return Lease(extension.job_id, extension.token, expires_at, bool(is_cancelled))


# -- stored jobs that no call could have stored: damaged, or written by another program -------------------------
# One such job would stop every call that meets it. They are removed from the queue. Their bytes stay in the hash `damaged`
# beside the queue's keys.


async def set_aside(store: RedisStore, queue: str, now: Micros) -> list[str]:
    """Remove the jobs of a queue that cannot be loaded. Returns what was found."""
    keys = store.keys(queue)
    damaged = [
        (job_id, value)
        for family in ("waiting_job", "active_job", "finished_job")
        async for job_id, value in _pairs(store, keys[family])
        if not _is_whole(job_id, queue, value)
    ]
    named = [pair for family in ("waiting_key", "active_key") async for pair in _pairs(store, keys[family])]
    found: list[str] = []
    for job_id, value in damaged:
        own = [key for key, holder in named if holder == job_id]
        # The server looks again: a job that was moved meanwhile stays.
        _, is_removed = await store.ask("set_aside", queue, now, keys["damaged"], job_id, value, *own)
        if is_removed:
            name = job_id[:200].decode(errors="backslashreplace")
            found.append(f"job {name!r} of queue {queue!r} could not be loaded: it was removed")
            log.error("%s; its bytes are in the hash %s", found[-1], keys["damaged"])
    return found


def _is_whole(job_id: bytes, queue: str, value: bytes) -> bool:
    try:
        record = record_from(job_id.decode(), queue, value, 0)
        record.payload = b""  # A copy of a dead job may be larger than a request.
        check_records([record])
    except UNLOADABLE:
        return False
    return True


async def _pairs(store: RedisStore, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
    cursor: Any = 0
    while True:
        cursor, found = await store.command("HSCAN", key, cursor, "COUNT", 1000)
        for pair in zip(found[::2], found[1::2], strict=True):
            yield pair
        if int(cursor) == 0:
            return
