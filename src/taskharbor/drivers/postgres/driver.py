"""A handle on a PostgreSQL store: the contract's methods, and the notifications that wake waiters. Functions in the database do
the work."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import psycopg
from msgspec.structs import astuple, replace

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Enqueued, Woken
from taskharbor.drivers.postgres import enqueue, leases, log, migrations, operate
from taskharbor.drivers.postgres.connections import Connections, Operation, Session, T, connect
from taskharbor.drivers.postgres.leases import Claimer
from taskharbor.drivers.postgres.options import NOTIFYING, SILENT, PostgresOptions, parse_url
from taskharbor.drivers.postgres.rows import escaped_texts, quoted, text_array
from taskharbor.drivers.postgres.transactions import Joined, join
from taskharbor.drivers.validation import functions_of
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within, wait
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError, not_open
from taskharbor.jobs import JobRecord, Micros

if TYPE_CHECKING:
    from taskharbor.bulk.store import BulkStore

_FOLD_EVERY = 20.0
_TEND_EVERY = 600.0
"""Seconds between two foldings of the counters, and between two looks at the days of history."""


# -- notifications: when to NOTIFY, and the source for `waiting.wait` ------------------------------------

_WINDOW = 0.01
_GRACE = 0.001
"""Seconds in which the next change may take over the notification of the last ones. That saves a round trip."""
_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""
_SNAPSHOT = re.compile(r"\d+:\d+:[\d,]*")


class NotifyThrottle:
    """One handle's notifications. `notify` sends one NOTIFY for each of the given queues.

    All commits in a cluster that notify wait for each other. So only the first change after a quiet moment notifies in its own
    transaction. Changes within the next few milliseconds share one notification: the first change after that sends it, or the
    throttle itself. If this process dies in between, waiters find the jobs when they next look by themselves.
    """

    def __init__(self, notify: Callable[[Iterable[str]], Awaitable[None]], mode: int) -> None:
        self._notify = notify
        self.mode = mode
        """The mode for changes that seldom make anything runnable. They are not throttled."""
        self._last: dict[str, float] = {}
        self._due: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def change(self, queues: set[str]) -> Iterator[int]:
        """Surround a change that makes something runnable in these queues. Yields the mode to write it with."""
        if self.mode == SILENT or len(queues) > 1:
            yield self.mode
            return
        (queue,) = queues
        instant = asyncio.get_running_loop().time()
        mode = SILENT if instant - self._last.get(queue, 0.0) < _WINDOW else NOTIFYING
        if mode == NOTIFYING:
            self._last[queue] = instant
            # The notification of this change also covers changes that are committed by now.
            self._due.discard(queue)
        try:
            yield mode
        except BaseException:
            # Other changes may have relied on its notification, and it may have been committed after all.
            self._notify_soon(queue)
            raise
        if mode == SILENT:
            self._notify_soon(queue)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _notify_soon(self, queue: str) -> None:
        self._due.add(queue)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._notify_later())

    async def _notify_later(self) -> None:
        try:
            while self._due:
                instant = asyncio.get_running_loop().time()
                due_at = {queue: self._last.get(queue, 0.0) + _WINDOW + _GRACE for queue in self._due}
                queues = {queue for queue, at in due_at.items() if at <= instant}
                if not queues:
                    await asyncio.sleep(min(due_at.values()) - instant)
                    continue
                self._due -= queues
                self._last |= dict.fromkeys(queues, instant)
                try:
                    await self._notify(queues)
                except TaskHarborError:
                    # The server is away. Waiters look by themselves, and the next notification includes these queues.
                    self._due |= queues
                    return
        finally:
            self._task = None


class Listener:
    """One handle's source for `waiting.wait`.

    The version of a queue is a snapshot: a stirring move that the snapshot does not show is a change. NOTIFY only says when to
    look. The listening connection also claims the jobs that it heard of. After an outage it connects again and wakes all waiters,
    because notifications of that time were lost. It is probed from time to time: if a firewall forgot the connection, it is
    silent.
    """

    trusts_notifications = True

    def __init__(self, options: PostgresOptions, connections: Connections, emptied: dict[str, str]) -> None:
        self.notifications = Notifications()
        self._options = options
        self._connections = connections
        self._emptied = emptied
        """The hint of a claim that left no job, by queue. Older changes need not wake anybody."""
        self._task: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self.is_up = False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def listen(self, queues: Sequence[str]) -> float | None:
        if self._options.notify and self._task is None:
            self._task = asyncio.create_task(keep_connected(self._listen_once, self._on_lost))
        return None if self.is_up else self._options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        seen = version if version is not None and _SNAPSHOT.fullmatch(version) else None
        hints = escaped_texts([self._emptied.pop(queue, None) for queue in queues])
        ((snapshot, is_changed, due),) = await self._connections.run(
            lambda session: session.named("inspect", "watch", text_array(queues), hints, seen, since)
        )
        return Look(snapshot, is_changed or seen is None, due)

    def _on_lost(self) -> None:
        self.is_up = False
        self.notifications.notify()

    async def _listen_once(self) -> None:
        """Listen until the connection breaks."""
        session = Session(await connect(self._options), self._options)
        connection = session.connection
        self._broken.clear()
        try:
            connection.add_notify_handler(lambda notify: self.notifications.notify((notify.payload,)))
            await connection.execute(f"LISTEN {quoted(self._options.channel)}")
            session.is_fresh = False
            connection.on_unasked = lambda: self._read(session)
            connection.begin_watching()
            self.is_up = True
            # Notifications from before LISTEN were lost.
            self.notifications.notify()
            self._connections.listening = session
            self._connections.listening_is_lost = self._broken.set
            while not await set_within(self._broken, _PROBE):
                async with asyncio.timeout(_PATIENCE):
                    # On the connection that also claims, so one after the other.
                    await session.rows("SELECT 1")
        finally:
            if self._connections.listening is session:
                self._connections.listening = None
            connection.on_unasked = None
            await connection.close()

    def _read(self, session: Session) -> None:
        """Read notifications between two claims. During a claim the library itself passes them on."""
        pgconn = session.connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self.notifications.notify((notify.extra.decode(),))
        except psycopg.Error:
            session.connection.end_watching()
            self._broken.set()


class PostgresDriver(Driver):
    """`postgresql://user@host/database`; `PostgresOptions` lists the options of the URL.

    Durability depends on the server: with its defaults, an answer means that the disk has the change.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True, multi_process=True, passes_over_busy=True, publishes_at_once=True, batch=2000
    )

    def __init__(self, options: PostgresOptions) -> None:
        self.options = options
        self._connections: Connections | None = None
        self._throttle = NotifyThrottle(self._notify, options.stir)
        self._claimer = Claimer()
        self._listener: Listener | None = None
        self._next_tending = 0.0
        self._giving_back: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    @classmethod
    def bulk_store(cls, url: str) -> BulkStore | None:
        # Imported here: pyarrow is not needed for anything else.
        from taskharbor.drivers.postgres.bulk import PostgresBulkStore

        return PostgresBulkStore(url)

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        if self._connections is not None:
            return
        self._connections = Connections(self.options, await migrations.open_ready(self.options))
        self._listener = Listener(self.options, self._connections, self._claimer.emptied)

    async def open_to_read(self) -> None:
        self._connections = self._connections or Connections(self.options)

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        if self._connections is not None:
            # Jobs that are being given back and notifications still need the connections.
            await asyncio.gather(*self._giving_back, return_exceptions=True)
            await self._throttle.close()
            connections, self._connections = self._connections, None
            await connections.close()

    def _opened(self, what: T | None) -> T:
        if what is None:
            raise not_open(self.options.place)
        return what

    async def _query(self, operation: Operation[T], *, where_heard: bool = False) -> T:
        return await self._opened(self._connections).run(operation, where_heard=where_heard)

    async def _store_call(self, function: str, *values: Any) -> Any:
        return await self._query(lambda session: session.call(function, *values))

    async def time(self) -> Micros:
        ((now,),) = await self._query(lambda session: session.named("inspect", "time"))
        return int(now)

    async def migrate(self, *, dry_run: bool = False) -> list[str]:
        async with await connect(self.options) as connection:
            return await migrations.migrate(Session(connection, self.options), self.options, dry_run=dry_run)

    # -- producing and working ----------------------------------------------------------------------------

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        records = call.records
        with self._throttle.change({record.queue for record in records}) as mode:
            return await self._query(
                lambda session: enqueue.store(session, records, call.now, mode, new_ids=call.new_ids)
            )

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        secret, tries = self._claimer.secret(call.queue, call.worker)
        try:
            return await self._unless_damaged(lambda: self._claim(call, secret, tries), call.now)
        except asyncio.CancelledError:
            # The caller went away, and with it the connection. Jobs that were leased would stall until their leases expire.
            back = asyncio.ensure_future(self._give_back(call, secret, tries + 2))
            self._giving_back.add(back)
            back.add_done_callback(self._giving_back.discard)
            raise

    async def _claim(self, call: op.Reserve, secret: str, tries: int) -> list[JobRecord]:
        try:
            return await self._query(
                lambda session: self._claimer.reserve(session, call, secret, tries),
                where_heard=True,
            )
        except BackendUnavailable:
            # Two claims may have been made: the first, and its repetition on a new connection.
            self._claimer.lose_answer(call.queue, call.worker, secret, tries + 2)
            raise

    async def _give_back(self, call: op.Reserve, secret: str, tries: int) -> None:
        """Repeat the same claim with limit 0. Jobs that the earlier try leased go back. If the server has yet to read that try,
        it does nothing."""
        with contextlib.suppress(TaskHarborError):
            await self._claim(replace(call, limit=0, types=None), secret, tries)

    async def _reclaim(self, call: op.Reclaim) -> int:
        arguments = call.queue, -1, call.now, call.limit, self._throttle.mode
        ended: int = await self._unless_damaged(lambda: self._store_call("reclaim", *arguments), call.now)
        await self._store_call("fold", _FOLD_EVERY)
        return ended

    async def _unless_damaged(self, run: Callable[[], Coroutine[Any, Any, T]], now: Micros) -> T:
        """Make a call whose arguments are right. If the server refuses a value, it is a damaged job's: set those aside."""
        try:
            return await run()
        except InvalidRequest:
            if not await self._query(lambda session: leases.set_aside(session, now)):
                raise
        return await run()

    async def repair(self) -> list[str]:
        """Set aside stored jobs that no call can load. Returns what was found."""
        now = await self.time()
        return [*(await self._query(lambda session: leases.set_aside(session, now, ended_too=True))).values()]

    # -- other operations ---------------------------------------------------------------------------------

    functions = functions_of(enqueue, leases, log, operate)
    """They take a session and the fields of the call."""

    def _apply(self, function: Callable[..., Any], call: op.Operation[T]) -> Coroutine[Any, Any, T]:
        return self._query(lambda session: function(session, *astuple(call)))

    async def _prune(self, call: op.Prune) -> int:
        removed: int = 0
        instant = asyncio.get_running_loop().time()
        if instant >= self._next_tending:
            self._next_tending = instant + _TEND_EVERY
            # The server's own clock decides which days get partitions: they are storage, not history.
            await self._store_call("add_days", await self.time())
            removed = await self._store_call("drop_days", call.now)
        removed += await self._store_call("prune", call.now, call.limit)
        return removed

    # -- in bulk ------------------------------------------------------------------------------------------

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        # Numbers of transactions do not tell where rows are.
        return []

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._opened(self._listener), call)

    async def _notify(self, queues: Iterable[str]) -> None:
        names = text_array(list(queues))
        await self._query(lambda session: session.named("inspect", "notify", session.channel, names))

    # -- within a transaction of the caller's ---------------------------------------------------------------

    def within(self, transaction: object) -> Joined:
        return join(transaction, self.options)
