"""The store behind `memory://`, first part: what it holds and how jobs come in.

The store is every transition of the contract, once, in plain synchronous code, in four layers (producing, settling,
leasing, operating). It is what other drivers are read against, so each rule has a method of its own. Nothing in it
awaits, reads a clock or locks: the driver holds `lock` around each call, and passes `now` in. Whatever can be
refused is refused before the first change, so a call that raises changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from taskharbor import ids
from taskharbor.drivers.contract import Enqueued, gather_flags
from taskharbor.drivers.memory.copies import accepted, apply_update
from taskharbor.drivers.memory.lines import Ledger
from taskharbor.drivers.memory.log import AttemptLog
from taskharbor.drivers.memory.queues import BLOCKED, READY, SCHEDULED, Queue, Slot
from taskharbor.drivers.waiting import Notifications
from taskharbor.jobs import DEFAULT_FLAGS, JobRecord, Micros


class ProducingStore:
    """What the store holds, and how jobs come into it."""

    slot_type: ClassVar[type[Slot]] = Slot
    queue_type: ClassVar[type[Queue]] = Queue
    """What the store is made of; a store that is kept elsewhere has more to remember of each."""

    def __init__(
        self, *, new_token: Callable[[], str] = ids.new_token, new_id: Callable[[], str] = ids.new_id
    ) -> None:
        self.lock = threading.Lock()
        self.notifications = Notifications()
        self.versions: dict[str, int] = {}
        """By queue, how often something may have become runnable."""
        self.jobs: dict[str, Slot] = {}
        self.queues: dict[str, Queue] = {}
        self.order: Ledger[Slot] = Ledger()
        """All jobs by insertion; a slot's `seq` is its number here."""
        self.log = AttemptLog()
        self.store_id = ids.new_token()
        self.blobs: dict[str, bytes] = {}
        self.portions: dict[str, tuple[list[int], int]] = {}
        """By series of bulk writes: number and portion that was published last, and the jobs that the write added."""
        self._find: Callable[[str], Slot | None] = self.jobs.get
        """A job by its id. Where ended jobs are kept apart, this finds them too."""
        self._new_token = new_token
        self._new_id = new_id
        self._grants = 0
        self._stirred: dict[str, None] = {}
        """Queues where something may have become runnable in this call."""

    def _wake(self) -> None:
        """Tell those who wait. Every call that moved jobs ends with this."""
        if self._stirred:
            for queue in self._stirred:
                self.versions[queue] = self.versions.get(queue, 0) + 1
            self.notifications.notify(self._stirred)
            self._stirred.clear()

    def _queue(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = self.queue_type(name)
        return queue

    def enqueue(self, records: Sequence[JobRecord], now: Micros) -> list[Enqueued]:
        fresh = [accepted(record) for record in records]
        answers = [self._accept(record, now) for record in fresh]
        self._wake()
        return answers

    def _accept(self, record: JobRecord, now: Micros) -> Enqueued:
        job_id = record.id
        if job_id in self.jobs:
            return Enqueued(job_id, True)
        queue = self.queues.get(record.queue) or self._queue(record.queue)
        idempotency_key = record.idempotency_key
        if idempotency_key is not None:
            known = queue.accepted.get(idempotency_key)
            if known is not None:
                return Enqueued(known, True)
        if record.key is not None:
            waiting = queue.waiting.get(record.key)
            if waiting is not None:
                self._update_waiting(waiting, record, now)
                self._remember(queue, idempotency_key, waiting.record.id)
                return Enqueued(waiting.record.id, True)
        self._insert(queue, record, now)
        if idempotency_key is not None:
            self._remember(queue, idempotency_key, job_id)
        return Enqueued(job_id)

    def _insert(self, queue: Queue, record: JobRecord, now: Micros) -> None:
        slot = self.jobs[record.id] = self.slot_type(record, queue, self.order)
        key = record.key
        if key is not None:
            queue.waiting[key] = slot
            if key in queue.inflight:
                record.update = record.update or DEFAULT_FLAGS
                queue.block(slot)
                return
        queue.line_up(slot, SCHEDULED if record.run_at_us > now else READY)
        self._stirred[queue.name] = None

    def _remember(self, queue: Queue, idempotency_key: str | None, job_id: str) -> None:
        if idempotency_key is not None:
            queue.accepted[idempotency_key] = job_id
            queue.led_here.setdefault(job_id, []).append(idempotency_key)

    def _update_waiting(self, slot: Slot, newer: JobRecord, now: Micros) -> None:
        record = slot.record
        flags = newer.update or DEFAULT_FLAGS
        if record.state is BLOCKED:
            apply_update(record, newer, flags)
            record.update = gather_flags(record.update or DEFAULT_FLAGS, flags)
        else:
            slot.queue.leave(slot)
            apply_update(record, newer, flags)
            self._line_up(slot, now)

    def _line_up(self, slot: Slot, now: Micros) -> None:
        """A waiting job takes its place, which is that of its run_at."""
        queue = slot.queue
        queue.line_up(slot, SCHEDULED if slot.record.run_at_us > now else READY)
        self._stirred[queue.name] = None
