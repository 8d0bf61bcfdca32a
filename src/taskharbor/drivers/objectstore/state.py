"""The state of one queue, or of one shard of it: the rules of the memory store, over what is kept in one object.

What waits, runs or is dead is all here. Jobs that are done or cancelled and the rows of the attempt log stay until they are
folded into a segment; then the state has an entry for that segment, and whoever asks for such a job has to
bring the segment along (`recalling`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Protocol, cast

import msgspec

from taskharbor.drivers.contract import Enqueued, QueueSettings, failure_record
from taskharbor.drivers.memory.copies import accepted
from taskharbor.drivers.memory.lines import Item, Line
from taskharbor.drivers.memory.log import AttemptLog
from taskharbor.drivers.memory.operating import MemoryRules
from taskharbor.drivers.memory.queues import INFLIGHT, Queue, Slot
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.kept import AcceptedOrder, KeptQueue, KeptSlot
from taskharbor.drivers.objectstore.numbers import Numbering
from taskharbor.drivers.objectstore.published import PublishedWrites
from taskharbor.drivers.objectstore.rows import StoredRow, attempts_of, row_of
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Lease, Micros, Outcome

_encode = msgspec.msgpack.Encoder().encode


class Owner(Protocol):
    touched: bool


class TailLog(AttemptLog):
    """Rows in the order of their numbers, and beside each the bytes it is written as."""

    def __init__(self, queue: str, owner: Owner, numbering: Numbering) -> None:
        self.queue = queue
        self.rows: list[StoredRow] = []
        self.pieces: list[bytes] = []
        self.size = 0
        """Bytes of all pieces."""
        self.numbering = numbering
        self.trimmed = 0
        """The greatest number of a row that retention removed, from here or from a segment."""
        self._owner = owner

    def append(
        self,
        line: Line,
        record: JobRecord,
        outcome: Outcome,
        state: JobState,
        error: Failure | None,
        now: Micros,
    ) -> None:
        row = row_of(self.numbering.next(), record, outcome, state, error, now)
        self.restore(row, _encode(row))
        self._owner.touched = True

    def restore(self, row: StoredRow, piece: bytes) -> None:
        self.rows.append(row)
        self.pieces.append(piece)
        self.size += len(piece)

    def after(self, number: int) -> list[StoredRow]:
        return self.rows[bisect_right(self.rows, number, key=_number) :]

    def of_job(self, job_id: str) -> list[Attempt]:
        return attempts_of(self.queue, (row for row in self.rows if row.job_id == job_id))

    def prune(self, line: Line, ended_by: Micros, limit: int) -> int:
        due = [row.number for row in self.rows if row.ended_at <= ended_by][: max(limit, 0)]
        self.note_trimmed(due)
        self.remove(due)
        return len(due)

    def note_trimmed(self, numbers: Iterable[int]) -> None:
        self.trimmed = max(self.trimmed, *numbers, 0)

    def remove_first(self, count: int) -> None:
        if count:
            del self.rows[:count]
            self.size -= sum(map(len, self.pieces[:count]))
            del self.pieces[:count]
            self._owner.touched = True

    def remove(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        if not gone:
            return
        kept = [
            (row, piece) for row, piece in zip(self.rows, self.pieces, strict=True) if row.number not in gone
        ]
        self.rows = [row for row, _ in kept]
        self.pieces = [piece for _, piece in kept]
        self.size = sum(map(len, self.pieces))
        self._owner.touched = True


def _number(row: StoredRow) -> int:
    return row.number


class LiveState(MemoryRules):
    """One queue's jobs and settings. `touched` tells the cell that something changed."""

    slot_type: ClassVar[type[Slot]] = KeptSlot

    def __init__(self, name: str, shard: int = 0, shards: int = 1) -> None:
        super().__init__()
        self.name = name
        self.shard = shard
        self.shards = shards
        place = f"{name}/{shard}"
        self.touched = False
        self.stirs = 0
        """How often something may have become runnable, in all that has landed: the same number in every process."""
        self.promotions = 0
        """How often time alone made something runnable here. Nothing is written for that, so others see it for themselves."""
        self.outbox: list[JobRecord] = []
        """Jobs for other queues: notices of deaths. Whoever sees one brings it there and strikes it off."""
        self.segments: list[SegmentEntry] = []
        """In the order of their rows."""
        self.retired: list[tuple[str, Micros]] = []
        """Segments that were replaced, and when: somebody may still be reading them."""
        self.published: PublishedWrites = {}
        self.begun: list[tuple[str, Micros]] = []
        """Segments that somebody is writing, and since when. Only one of these can become part of the queue."""
        self.accepted_order = AcceptedOrder(Numbering(place))
        self.order = self.accepted_order
        self.tail = TailLog(name, self, Numbering(place))
        self.log = self.tail
        self.recalled: dict[str, Slot] = {}
        """Jobs of segments that the present call asks for."""
        self._find = self._find_anywhere
        self._in_state: Callable[[str], Slot | None] = self.jobs.get

    @property
    def queue(self) -> KeptQueue | None:
        """None: nobody ever used it."""
        return cast(KeptQueue | None, self.queues.get(self.name))

    def kept_slots(self) -> Collection[KeptSlot]:
        """All jobs of the state, in the order of their numbers."""
        return cast(Collection[KeptSlot], self.accepted_order.slots.values())

    def note_grants(self) -> None:
        """After a state was read: leases that are granted now come behind those it has."""
        queue = self.queue
        self._grants = 0 if queue is None else len(queue.leases)

    def changed(self, slot: Slot) -> None:
        cast(KeptSlot, slot).encoded = None
        self.touched = True

    def _queue(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = KeptQueue(name, self)
            self.touched = True
        return queue

    def _find_anywhere(self, job_id: str) -> Slot | None:
        return self._in_state(job_id) or self.recalled.get(job_id)

    def _wake(self) -> None:
        if self._stirred:
            self._stirred.clear()
            if self.touched:
                self.stirs += 1
            else:
                self.promotions += 1

    # -- what differs from the memory store ---------------------------------------------------------------

    def enqueue_stamped(
        self, records: Sequence[JobRecord], stamps: Sequence[int], now: Micros
    ) -> list[Enqueued]:
        """`records` as they may be stored, each with its place in the order of acceptance."""
        answers: list[Enqueued] = []
        for record, stamp in zip(records, stamps, strict=False):
            self.accepted_order.stamp = stamp
            # The state keeps what it is given; a step may be run again, on another state.
            answers.append(self._accept(accepted(record), now))
        self.accepted_order.stamp = None
        self._wake()
        return answers

    def _accept(self, record: JobRecord, now: Micros) -> Enqueued:
        if record.id in self.recalled:
            return Enqueued(record.id, True)
        return super()._accept(record, now)

    def _remember(self, queue: Queue, idempotency_key: str | None, job_id: str) -> None:
        super()._remember(queue, idempotency_key, job_id)
        self.touched = True

    def _update_waiting(self, slot: Slot, newer: JobRecord, now: Micros) -> None:
        super()._update_waiting(slot, newer, now)
        self.changed(slot)

    def _grant(self, slot: Slot, place: Item, token: str, worker: str, reserved_at: Micros) -> JobRecord:
        self.changed(slot)
        return super()._grant(slot, place, token, worker, reserved_at)

    def _extend(self, slot: Slot, expires_at: Micros, progress: bytes | None) -> Lease:
        self.changed(slot)
        return super()._extend(slot, expires_at, progress)

    def _cancel(self, job_id: str, now: Micros) -> JobState | JobError:
        slot = self._in_state(job_id)
        if slot is not None and slot.record.state is INFLIGHT and not slot.record.cancel_requested:
            self.changed(slot)
        return super()._cancel(job_id, now)

    def _serve_failure_queue(self, dead: Slot, now: Micros) -> None:
        name = dead.queue.settings.failure_queue
        if name is None:
            return
        notice = failure_record(dead.record, job_id=self._new_id(), queue=name, now=now)
        if name == self.name:
            self._accept(accepted(notice), now)
        else:
            self.outbox.append(notice)
            self.touched = True

    def _room(self, queue: Queue, now: Micros) -> int:
        """A shard grants its share of W: the rest of a division goes to the first shards."""
        most = queue.settings.max_inflight
        if self.shards == 1 or most is None or queue.settings.paused:
            return super()._room(queue, now)
        share = most // self.shards + (self.shard < most % self.shards)
        return share - queue.leases.live

    def configure(self, name: str, settings: QueueSettings) -> None:
        self.touched = True
        super().configure(name, settings)

    def has_work(self, now: Micros) -> bool:
        """Whether a reservation could find or change anything."""
        queue = self.queue
        if queue is None:
            return False
        due = queue.next_due()
        return bool(queue.ready) or (due is not None and due <= now)

    def next_expiry(self) -> Micros | None:
        """When the first lease is over."""
        queue = self.queue
        item = None if queue is None else queue.leases.head()
        return None if item is None else item[0]

    def expire(self, now: Micros) -> None:
        """End all leases that are over."""
        queue = self.queue
        if queue is not None:
            self._reclaim_queue(queue, now)
            self._wake()

    def strike_off(self, job_ids: Collection[str]) -> None:
        """These notices are where they belong."""
        left = [notice for notice in self.outbox if notice.id not in job_ids]
        if len(left) < len(self.outbox):
            self.outbox = left
            self.touched = True
