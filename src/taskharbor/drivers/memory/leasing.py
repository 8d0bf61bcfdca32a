"""The store, third part: who gets which job, for how long, and when there is something to get."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from taskharbor.drivers.contract import Extension
from taskharbor.drivers.memory.copies import copied
from taskharbor.drivers.memory.lines import Item
from taskharbor.drivers.memory.queues import INFLIGHT, Queue, Slot
from taskharbor.drivers.memory.settling import SettlingStore
from taskharbor.errors import JobError
from taskharbor.jobs import JobRecord, Lease, Micros


class LeasingStore(SettlingStore):
    """Claims, heartbeats, and the next instant at which something comes due."""

    def reserve(
        self,
        name: str,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None,
    ) -> list[JobRecord]:
        queue = self.queues.get(name)
        if queue is None:
            return []
        # Even of a paused queue: what is due must not keep waking those who wait for it.
        self._reclaim_queue(queue, now)
        promoted = queue.promote(now)
        slots = self._claim(queue, min(limit, self._room(queue, now)), now, types)
        leased: list[JobRecord] = []
        if slots:
            token = self._new_token()
            reserved_at = self._reserved_at(queue, now)
            first, expires_at = self._grants, reserved_at + lease_for
            self._grants += len(slots)
            places: list[Item] = [(expires_at, number, slot) for number, slot in enumerate(slots, first)]
            queue.leases.push_sorted(places)
            leased = [
                self._grant(slot, place, token, worker, reserved_at)
                for slot, place in zip(slots, places, strict=True)
            ]
        queue.leases.tidy()
        if promoted and queue.ready:
            # Nobody who begins to wait now finds these among the scheduled.
            self._stirred[name] = None
        self._wake()
        return leased

    def _reserved_at(self, queue: Queue, now: Micros) -> Micros:
        """`now` may have been read before another call ended a lease: the log must not show them as one beside the other."""
        return max(now, queue.latest_end)

    def _room(self, queue: Queue, now: Micros) -> int:
        """How many leases may be granted now. Every due lease was ended just before, so all inflight ones are valid."""
        settings = queue.settings
        if settings.paused:
            return 0
        if settings.max_inflight is None:
            return sys.maxsize
        return settings.max_inflight - queue.leases.live

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        return queue.take(limit, now, types) if limit > 0 else []

    def _grant(self, slot: Slot, place: Item, token: str, worker: str, reserved_at: Micros) -> JobRecord:
        """Lease a slot that was taken out of its line; the record as its holder gets it."""
        record = slot.record
        slot.place = place
        record.state = INFLIGHT
        record.token = token
        record.worker = worker
        record.reserved_at_us = reserved_at
        record.expires_at_us = place[0]
        record.fence += 1
        if record.key is not None:
            del slot.queue.waiting[record.key]
            slot.queue.inflight[record.key] = slot
        return copied(record)

    def extend(
        self, extensions: Sequence[Extension], lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        checked = [(extension.job_id, extension.token, extension.progress) for extension in extensions]
        answers: list[Lease | JobError] = []
        for job_id, token, progress in checked:
            slot = self._find(job_id)
            error = self._objection(slot, job_id, token, now)
            if error is not None:
                answers.append(error)
                continue
            assert slot is not None
            answers.append(self._extend(slot, now + lease_for, progress))
        return answers

    def _extend(self, slot: Slot, expires_at: Micros, progress: bytes | None) -> Lease:
        record, leases = slot.record, slot.queue.leases
        assert record.token is not None
        if progress is not None:
            record.progress = progress
        record.expires_at_us = expires_at = self._held_until(record, expires_at)
        slot.place = place = (expires_at, self._grants, slot)
        self._grants += 1
        leases.push(place)
        leases.stale += 1
        leases.tidy()
        return Lease(record.id, record.token, expires_at, record.cancel_requested)

    def _held_until(self, record: JobRecord, expires_at: Micros) -> Micros:
        """A heartbeat that arrives late, with an old `now`, takes nothing away."""
        assert record.expires_at_us is not None
        return max(record.expires_at_us, expires_at)

    def next_due(self, names: Sequence[str], since: Micros) -> Micros | None:
        """When the first scheduled job or lease of these queues comes due after `since`."""
        queues = [self.queues[name] for name in names if name in self.queues]
        return min((due for queue in queues if (due := queue.next_due(since)) is not None), default=None)
