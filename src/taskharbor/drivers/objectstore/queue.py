"""The queues of an open store. A queue has one shard or several. Each shard is an image in its own object, with its segments.

A shard acts on every image that has landed, whichever process wrote it: it wakes waiting workers, delivers jobs to the failure
queue, and begins compaction.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast
from weakref import WeakValueDictionary
from zlib import crc32

import msgspec

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.engine import bulk, inspect, settle
from taskharbor.drivers.engine import enqueue as engine
from taskharbor.drivers.engine.repair import set_aside, with_repair
from taskharbor.drivers.engine.tables import Transaction, load, to_json
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.archive import Segment, SegmentCache, Segments
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import MAX_BYTES, CasObject, Term
from taskharbor.drivers.objectstore.catalog import Catalog, log_folder, state_name
from taskharbor.drivers.objectstore.compaction import Compaction
from taskharbor.drivers.objectstore.image import Entry, Image, entries, holding_jobs, take_numbers
from taskharbor.drivers.objectstore.options import ObjectStoreOptions
from taskharbor.drivers.waiting import Look, shared_notifications
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobError, JobNotFound, TaskHarborError
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

A = TypeVar("A")
R = TypeVar("R")

MARKS = 2**15
_TRIES = 20
"""The most tries of a call that needs other segments than it has read. Other writers merge segments, but not all the time."""
_DELIVER_AGAIN = 1.0
"""Seconds after which a failed delivery to a failure queue is repeated."""
_UNMADE = 64
"""The number of shards without an object from which on a handle forgets them: each takes 170 kB."""
_KNOWN_JOBS = 100_000
"""The number of jobs whose shard a handle remembers."""
_ALL = 2**31 - 1
_SQL = load("image", __package__)


class Shard:
    """One shard of a queue."""

    def __init__(self, store: Store, queue: str, number: int) -> None:
        self.queue = queue
        self.number = number
        self.name = f"{number}:{queue}"
        self.store = store
        self.log_folder = log_folder(queue, number)
        self._mark = crc32(self.name.encode()) % MARKS
        self.state: CasObject[Image] = CasObject(
            store.blobs,
            state_name(queue, number),
            lambda body: Image(body, self.state.where, queue),
            term=store.term,
            every_pass=store.end_expired,
            on_news=self._on_news,
        )
        self._notified_of = 0
        self._delivery: asyncio.Task[None] | None = None
        self._second_try: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.compaction = Compaction(self)

    # -- numbers of rows of the log: two shards count alike, and to readers each row of a store has one of its own --

    def public_number(self, number: int) -> int:
        return number * MARKS + self._mark if number else 0

    def own_number(self, public: int) -> int:
        """Return the last own number that is not after the public one."""
        return (public - self._mark) // MARKS

    def public_rows(self, rows: Iterable[Attempt]) -> list[Attempt]:
        return [msgspec.structs.replace(row, seq=self.public_number(row.seq)) for row in rows]

    # -- running steps ------------------------------------------------------------------------------------

    async def change(self, step: Callable[[Transaction], R], *, is_claim: bool = False) -> R:
        """The answer of a step that may change the image, once it and all that follows from it for other queues has landed. A
        step may run several times, on different images. `is_claim`: who asked gets the leased jobs, even if another queue cannot
        be told of dead ones now; they wait in the outbox."""
        answer, has_notices = await self.state.change(lambda image: image.change(step))
        if has_notices:
            with suppress(*(TaskHarborError,) if is_claim else ()):
                await asyncio.shield(self._start_delivery())
        return answer

    async def change_mended(
        self, step: Callable[[Transaction], R], now: Micros, *, is_claim: bool = False
    ) -> R:
        """Run `change` for a worker. If it fails on jobs that cannot be loaded, they are set aside, and it runs again."""
        return cast("R", await with_repair(partial(self.change, is_claim=is_claim), step, now))

    async def look(self, step: Callable[[Transaction], R]) -> R:
        """Return the answer of a step that changes nothing."""
        return await self.state.look(lambda image: image.look(step))

    async def change_with(
        self, needs: Callable[[Transaction], list[Entry]], step: Callable[[Transaction, Segments], R]
    ) -> R:
        """Run `change` for a step that needs segments. They are read first."""
        loaded: dict[str, Segment] = {}

        def run_if_loaded(transaction: Transaction) -> tuple[list[Entry], list[R]]:
            wanted = needs(transaction)
            if missing := [entry for entry in wanted if entry.name not in loaded]:
                return missing, []
            return [], [step(transaction, [(entry, loaded[entry.name]) for entry in wanted])]

        for _ in range(_TRIES):
            missing, answers = await self.change(run_if_loaded)
            if not missing:
                return answers[0]
            loaded |= await self.read(missing)
        raise self._gone(missing)

    async def look_with(
        self, step: Callable[[Transaction], tuple[R, list[Entry]]], *, rows_only: bool = False
    ) -> tuple[R, Segments]:
        """The answer of a step that changes nothing, and the segments that it names, as they were in the image it saw."""
        for _ in range(_TRIES):
            answer, wanted = await self.look(step)
            found = await self.read(wanted, rows_only=rows_only) if wanted else {}
            if len(found) == len(wanted):
                return answer, [(entry, found[entry.name]) for entry in wanted]
        raise self._gone([entry for entry in wanted if entry.name not in found])

    async def read(self, wanted: Sequence[Entry], *, rows_only: bool = False) -> dict[str, Segment]:
        """The segments that are there, by name."""
        read, folder = self.store.cache.read, self.log_folder
        reads = (read(f"{folder}/{entry.name}", self.queue, entry, rows_only) for entry in wanted)
        found = await asyncio.gather(*reads)
        if None in found:
            # Most likely merged since: the newer image decides.
            self.state.must_compare()
        return {entry.name: one for entry, one in zip(wanted, found, strict=True) if one is not None}

    def _gone(self, missing: Sequence[Entry]) -> BackendUnavailable:
        return BackendUnavailable(
            f"{self.state.where}: segments of its log are missing, such as {missing[0].name}; if somebody removed them, "
            "restore them"
        )

    # -- jobs ---------------------------------------------------------------------------------------------

    async def enqueue(
        self, records: Sequence[JobRecord], numbers: Sequence[int], now: Micros
    ) -> list[Enqueued]:
        """`numbers`: the least number that each job may get, in rising order."""
        made = await self.change_with(
            lambda transaction: holding_jobs(transaction, [record.id for record in records]),
            lambda transaction, segments: accept(transaction, segments, records, numbers, now),
        )
        self.store.note((one.id for one in made), self)
        return made

    async def archived(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """Return the jobs that segments have, by id."""
        _, segments = await self.look_with(lambda transaction: (None, holding_jobs(transaction, job_ids)))
        return archive.get(segments, job_ids)

    async def known(self, job_ids: Sequence[str]) -> set[str]:
        """Return the ids that this shard has, in its image or in a segment."""

        def step(transaction: Transaction) -> tuple[set[str], list[Entry]]:
            rows = transaction.execute(_SQL["known_ids"], (to_json(list(job_ids)),))
            return {job_id for (job_id,) in rows}, holding_jobs(transaction, job_ids)

        here, segments = await self.look_with(step)
        return here | archive.get(segments, job_ids).keys()

    async def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        """Remove jobs that have ended, from the image and from segments."""

        def step(transaction: Transaction, segments: Segments) -> list[JobState | JobError]:
            archived: dict[str, JobState] = {}
            for segment in segments:
                archived |= archive.remove(transaction, *segment, job_ids)
            answers = bulk.remove(transaction, job_ids)
            return [archived.get(job_id, answer) for job_id, answer in zip(job_ids, answers, strict=True)]

        return await self.change_with(lambda transaction: holding_jobs(transaction, job_ids), step)

    async def refuse_when_full(self, records: Sequence[JobRecord]) -> None:
        """Refuse jobs for which the object has no room now. Known jobs need none."""
        if not self.state.size:
            await self.look(lambda transaction: None)
        if self.state.size + sum(len(record.payload) for record in records) > MAX_BYTES:
            known = await self.known([record.id for record in records])
            if new := [record for record in records if record.id not in known]:
                self.check_room(sum(len(record.payload) for record in new))

    def check_room(self, added: int) -> None:
        if self.state.size + added > MAX_BYTES:
            raise InvalidRequest(
                f"queue {self.queue!r} is full: its state has {self.state.size / 2**20:.0f} MiB, and {MAX_BYTES // 2**20} MiB "
                "is the most; work it off, remove dead jobs, or make a store with more shards"
            )

    # -- in the background --------------------------------------------------------------------------------

    def _on_news(self, image: Image) -> None:
        version, has_notices, may_be_compacted = image.news()
        if version != self._notified_of:
            self._notified_of = version
            if self.store.notifications.waiters:
                self.store.notifications.notify((self.queue,))
        if has_notices and not self.store.reads_only:
            self._start_delivery()
        if may_be_compacted and not self.store.reads_only:
            self.compaction.consider(image)

    def _start_delivery(self) -> asyncio.Task[None]:
        """Deliver jobs from the outbox to their queues, unless a delivery is under way."""
        if self._delivery is None or self._delivery.done():
            self._delivery = asyncio.get_running_loop().create_task(self._deliver())
            self._delivery.add_done_callback(self._end_delivery)
        return self._delivery

    async def _deliver(self) -> None:
        while notices := await self.state.look(Image.outbox):
            await self.store.deliver(notices)
            ids = to_json([notice.id for notice in notices])
            await self.change(
                lambda transaction, ids=ids: transaction.execute(_SQL["remove_notices"], (ids,))  # type: ignore[misc]
            )

    def _end_delivery(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._is_closing:
            # A caller that waits for the delivery gets the error. The jobs are safe in the image and still due.
            loop = asyncio.get_running_loop()
            self._second_try = loop.call_later(_DELIVER_AGAIN, self._start_delivery)

    async def settled(self) -> None:
        """Wait until no background work is left."""
        await self.compaction.settled()
        if self._delivery is not None:
            await asyncio.wait((self._delivery,))

    async def finish(self) -> None:
        """Stop the background work."""
        self._is_closing = True
        if self._second_try is not None:
            self._second_try.cancel()
        await self.compaction.close()
        await self.settled()


def accept(
    transaction: Transaction,
    segments: Segments,
    records: Sequence[JobRecord],
    numbers: Sequence[int],
    now: Micros,
) -> list[Enqueued]:
    """Store jobs. A job whose id is known, here or in a segment, changes nothing: a repeated try may come after its job has
    ended."""
    ids = [record.id for record in records]
    archived = archive.get(segments, ids) if segments else {}
    new = [at for at, job_id in enumerate(ids) if job_id not in archived]
    # No number is given out again, whatever the clock does, because segments of a queue are merged by number.
    last = max((one.last_job for one in entries(transaction)), default=0)
    made = engine.enqueue(
        transaction, [records[at] for at in new], now, numbers=[max(numbers[at], last + 1) for at in new]
    )
    answers = dict(zip(new, made, strict=True))
    return [answers.get(at) or Enqueued(job_id, True) for at, job_id in enumerate(ids)]


class Store:
    """A store that a handle has open: its catalog, the shards of its queues, and the shards in which jobs were seen."""

    trusts_notifications = False

    def __init__(self, blobs: Blobs, options: ObjectStoreOptions, *, reads_only: bool = False) -> None:
        """`reads_only`: other handles act on the images."""
        self.blobs = blobs
        self.options = options
        self.reads_only = reads_only
        self.catalog = Catalog(blobs, shards=options.shards)
        self.cache = SegmentCache(blobs)
        self.notifications = shared_notifications(blobs.place)
        self.term: Term | None = None
        self.expires_by: Callable[[], Micros] | None = None
        """If set, leases that have expired by this clock end with every write."""
        self._shards: WeakValueDictionary[tuple[str, int], Shard] = WeakValueDictionary()
        """All shards that anybody uses."""
        self._kept: set[Shard] = set()
        """Shards that stay: those with an object, and some of those that were only asked for. Callers can name any queue."""
        self._most_kept = _UNMADE
        self._homes: OrderedDict[str, Shard] = OrderedDict()

    async def close(self) -> None:
        # Jobs that are under way to failure queues end up in other shards, so those are closed after.
        await asyncio.gather(*(shard.finish() for shard in list(self._shards.values())))
        await asyncio.gather(*(shard.finish() for shard in list(self._shards.values())))
        await asyncio.gather(*(shard.state.close() for shard in list(self._shards.values())))
        await self.catalog.object.close()
        await self.blobs.close()

    async def settled(self) -> None:
        """Wait until no background work is left."""
        for shard in list(self._shards.values()):
            await shard.settled()

    def lead(self, term: Term | None) -> None:
        """Write under this term from now on, and answer from memory as long as it is valid. A lost term stays: an object that has
        it is never written."""
        self.term = term
        self.catalog.object.lead(term)
        for shard in list(self._shards.values()):
            shard.state.lead(term)

    def compare_soon(self) -> None:
        """Read the objects once before the next answer from memory: others may have written to them."""
        for shard in list(self._shards.values()):
            shard.state.must_compare()

    def end_expired(self, image: Image) -> None:
        if self.expires_by is not None:
            now = self.expires_by()
            try:
                image.change(lambda transaction: settle.reclaim(transaction, now, None, _ALL))
            except Exception:
                # A lease that cannot be loaded must not stop all writes of the queue.
                image.change(lambda transaction: set_aside(transaction, now))

    # -- shards -------------------------------------------------------------------------------------------

    def shard_of(self, record: JobRecord) -> Shard:
        """Return the shard of a new job. Jobs that must know of each other are in one shard: by key, else by idempotency key,
        else any shard."""
        return self.shard_for(record.queue, record.key or record.idempotency_key or record.id)

    def shard_for(self, queue: str, name: str) -> Shard:
        """Return the shard of the jobs with this key."""
        return self._shard(queue, crc32(name.encode()) % self.catalog.shards)

    def shards_of(self, queue: str) -> list[Shard]:
        return [self._shard(queue, number) for number in range(self.catalog.shards)]

    def shard_named(self, name: str) -> Shard:
        """Return the shard whose log is the stream of that name."""
        number, _, queue = name.partition(":")
        if not queue or number not in map(str, range(self.catalog.shards)):
            raise InvalidRequest(
                f"{name!r} is not a stream of this store's log: pass on what `log_streams` gave"
            )
        return self._shard(queue, int(number))

    async def shards(self, queue: str | None = None) -> list[Shard]:
        """Return the shards of one queue, or of all queues."""
        queues = await self.catalog.queues() if queue is None else [queue]
        return [shard for name in queues for shard in self.shards_of(name)]

    async def add_queues(self, shards: Iterable[Shard]) -> None:
        """Add the queues of these shards to the catalog before they get their first job or setting."""
        # The catalog is not asked for known queues: this is on the way of every enqueue.
        if unknown := [shard.queue for shard in shards if shard.queue not in self.catalog.known]:
            await self.catalog.add_queues(unknown)

    def _shard(self, queue: str, number: int) -> Shard:
        shard = self._shards.get((queue, number))
        if shard is None:
            if len(self._kept) >= self._most_kept:
                for unmade in [one for one in self._kept if not one.state.size]:
                    unmade.state.forget()
                    self._kept.discard(unmade)
                self._most_kept = 2 * len(self._kept) + _UNMADE
            shard = self._shards[queue, number] = Shard(self, queue, number)
        self._kept.add(shard)
        return shard

    async def change_each(
        self, queue: str | None, limit: int, step: Callable[[Shard, int], Awaitable[int]]
    ) -> int:
        """Run a step on one shard after the other, with how many it may still change, and sum up how many it did. A shard whose
        object is damaged or does not answer keeps nobody from the others: its error is raised at the end."""
        changed = 0
        errors: list[TaskHarborError] = []
        for shard in await self.shards(queue):
            try:
                changed += await step(shard, limit - changed)
            except TaskHarborError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return changed

    async def deliver(self, notices: list[JobRecord]) -> None:
        """Deliver each job to its queue. A job that is there already, or was there and has ended, changes nothing."""
        parts: dict[Shard, list[JobRecord]] = {}
        for notice in notices:
            parts.setdefault(self.shard_of(notice), []).append(notice)
        await self.add_queues(parts)
        await asyncio.gather(
            *(
                shard.enqueue(part, [take_numbers(1) for _ in part], part[0].created_at_us)
                for shard, part in parts.items()
            )
        )

    # -- waiting (see `waiting.Source`) --------------------------------------------------------------------

    def listen(self, queues: Sequence[str]) -> float | None:
        """Return the seconds between looks. Other processes do not notify; a conditional read of the queue's object shows their
        changes."""
        return self.options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        looks = await asyncio.gather(
            *(
                shard.look(lambda transaction, name=name: inspect.watch(transaction, [name], since))  # type: ignore[misc]
                for name in queues
                for shard in self.shards_of(name)
            )
        )
        due = min((due for _, due in looks if due is not None), default=None)
        return Look.at((sum(versions.values()) for versions, _ in looks), version, due)

    # -- by id --------------------------------------------------------------------------------------------

    def note(self, job_ids: Iterable[str], shard: Shard) -> None:
        """Remember the shards of jobs."""
        homes = self._homes
        for job_id in job_ids:
            homes[job_id] = shard
        while len(homes) > _KNOWN_JOBS:
            homes.popitem(last=False)

    async def known_elsewhere(self, targets: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the shards that have the jobs, which are meant for the given ones. A shard that cannot be asked is passed over:
        a repeated enqueue asks the queue of the first try."""
        # A single target checks its own ids.
        alone = set(targets.values()) if len(set(targets.values())) == 1 else set()
        shards = [shard for shard in await self.shards() if shard not in alone]
        answers = await asyncio.gather(
            *(shard.known(list(targets)) for shard in shards), return_exceptions=True
        )
        found: dict[str, Shard] = {}
        for shard, known in zip(shards, answers, strict=True):
            if not isinstance(known, BaseException):
                self.note(known, shard)
                found.update(dict.fromkeys(known, shard))
        return found

    async def by_id(
        self, job_ids: Sequence[str], ask: Callable[[Shard, list[int]], Awaitable[Sequence[A]]]
    ) -> list[A | JobNotFound]:
        """Ask for each job where it was seen, and everywhere for one that was not; `ask` gets positions of jobs. A shard that
        cannot be asked is an error only if a job is found nowhere else.

        All that one shard may have is asked for at once: a batch is one step there. Only where a job was seen that has been
        removed since, and whose id another queue may have accepted anew, its part comes after.
        """
        answers: dict[int, A] = {}
        errors: list[BaseException] = []

        async def ask_all(parts: dict[Shard, list[int]]) -> None:
            found = await asyncio.gather(*(ask(*part) for part in parts.items()), return_exceptions=True)
            for (shard, at), part in zip(parts.items(), found, strict=True):
                if isinstance(part, BaseException):
                    errors.append(part)
                    continue
                known = [one for one in zip(at, part, strict=True) if not isinstance(one[1], JobNotFound)]
                answers.update(known)
                self.note((job_ids[one] for one, _ in known), shard)

        homes = [self._homes.get(job_id) for job_id in job_ids]
        everywhere = await self.shards() if None in homes else []
        parts: dict[Shard, list[int]] = {}
        for at, home in enumerate(homes):
            for shard in everywhere if home is None else (home,):
                parts.setdefault(shard, []).append(at)
        await ask_all(parts)
        lost = [at for at, home in enumerate(homes) if home is not None and at not in answers]
        if lost and not errors:
            others = await self.shards()
            parts = {shard: [at for at in lost if homes[at] is not shard] for shard in others}
            await ask_all({shard: at for shard, at in parts.items() if at})
        if errors and len(answers) < len(job_ids):
            raise errors[0]
        return [answers[at] if at in answers else JobNotFound(job_id) for at, job_id in enumerate(job_ids)]
