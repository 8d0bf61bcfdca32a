"""The store, second part: how leases end, by their holder's word or by time, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taskharbor.drivers.contract import (
    EXPIRED_ERROR,
    Ack,
    Discard,
    Fail,
    Release,
    Retry,
    Settlement,
    failure_record,
)
from taskharbor.drivers.memory.copies import accepted, apply_update
from taskharbor.drivers.memory.producing import ProducingStore
from taskharbor.drivers.memory.queues import (
    BLOCKED,
    CANCELLED,
    DEAD,
    DONE,
    INFLIGHT,
    READY,
    SCHEDULED,
    Queue,
    Slot,
)
from taskharbor.errors import (
    JobError,
    JobNotFound,
    JobNotInflight,
    LeaseExpired,
    LeaseMismatch,
)
from taskharbor.jobs import DEFAULT_FLAGS, Failure, JobRecord, JobState, Micros, Outcome

_DONE, _RETRIED, _DEAD = Outcome.DONE, Outcome.RETRIED, Outcome.DEAD
_EXPIRED, _RELEASED, _CANCELLED = Outcome.EXPIRED, Outcome.RELEASED, Outcome.CANCELLED


class SettlingStore(ProducingStore):
    """Settlements, expiry, and the moves they share."""

    def _settlers(self) -> dict[type, Callable[[Slot, Any, Micros], None]]:
        return {
            Ack: self._ack,
            Retry: self._retry,
            Fail: self._fail,
            Release: self._release,
            Discard: self._discard,
        }

    def settle(self, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
        settlers = self._settlers()
        answers: list[JobError | None] = []
        find = self._find
        for settlement in settlements:
            job_id = settlement.job_id
            slot = find(job_id)
            error = self._objection(slot, job_id, settlement.token, now)
            if slot is not None:
                if error is None:
                    settlers[type(settlement)](slot, settlement, now)
                elif self._is_repeated(settlement, slot.record.state):
                    error = None
            answers.append(error)
        self._wake()
        return answers

    def _objection(self, slot: Slot | None, job_id: str, token: str, now: Micros) -> JobError | None:
        """Why a holder may not act, or None: the contract's checks in the contract's order."""
        if slot is None:
            return JobNotFound(job_id)
        record = slot.record
        if record.state is not INFLIGHT:
            return JobNotInflight(job_id)
        if record.token != token:
            return LeaseMismatch(job_id)
        if record.expires_at_us <= now:  # type: ignore[operator]  # an inflight job always has it
            return LeaseExpired(job_id)
        return None

    def _is_repeated(self, settlement: Settlement, state: JobState) -> bool:
        """Terminal idempotence: the job is already where the settlement would bring it."""
        kind = type(settlement)
        return (
            (kind is Ack and state is DONE)
            or (kind is Fail and (state is DONE or state is DEAD))
            or (kind is Discard and state is CANCELLED)
        )

    def _ack(self, slot: Slot, ack: Ack, now: Micros) -> None:
        ended_at = self._end_lease(slot, _DONE, DONE, None, now)
        slot.record.result = ack.result
        self._finish(slot, DONE, now, ended_at)

    def _retry(self, slot: Slot, retry: Retry, now: Micros) -> None:
        record = slot.record
        if record.cancel_requested:
            ended_at = self._end_lease(slot, _CANCELLED, CANCELLED, retry.error, now)
            self._record_failure(record, retry.attempts, retry.error, now)
            self._finish(slot, CANCELLED, now, ended_at)
        else:
            self._end_lease(slot, _RETRIED, _waiting_state(retry.run_at_us, now), retry.error, now)
            self._record_failure(record, retry.attempts, retry.error, now)
            record.run_at_us = retry.run_at_us
            self._go_back(slot, now)

    def _fail(self, slot: Slot, fail: Fail, now: Micros) -> None:
        ended_at = self._end_lease(slot, _DEAD, DEAD, fail.error, now)
        self._record_failure(slot.record, fail.attempts, fail.error, now)
        self._finish(slot, DEAD, now, ended_at)

    def _release(self, slot: Slot, release: Release, now: Micros) -> None:
        record = slot.record
        if record.cancel_requested:
            ended_at = self._end_lease(slot, _CANCELLED, CANCELLED, None, now)
            self._finish(slot, CANCELLED, now, ended_at)
        else:
            run_at = record.run_at_us if release.run_at_us is None else release.run_at_us
            self._end_lease(slot, _RELEASED, _waiting_state(run_at, now), None, now)
            record.run_at_us = run_at
            self._go_back(slot, now)

    def _discard(self, slot: Slot, discard: Discard, now: Micros) -> None:
        ended_at = self._end_lease(slot, _CANCELLED, CANCELLED, discard.reason, now)
        if discard.reason is not None:
            slot.record.last_error = discard.reason.text
        self._finish(slot, CANCELLED, now, ended_at)

    def _record_failure(self, record: JobRecord, attempts: int, error: Failure, now: Micros) -> None:
        record.attempts = attempts
        record.last_error = error.text
        record.failed_at_us = now

    # -- what every way out of a lease has in common ------------------------------------------------------

    def _end_lease(
        self, slot: Slot, outcome: Outcome, state: JobState, error: Failure | None, now: Micros
    ) -> Micros:
        """Log the lease and take it away; when it ended. The slot is nowhere until `_finish` or `_go_back`."""
        record, queue = slot.record, slot.queue
        ended_at = self._ended_at(record, now)
        expires_at = record.expires_at_us
        assert expires_at is not None
        over_at = ended_at if ended_at < expires_at else expires_at
        if over_at > queue.latest_end:
            queue.latest_end = over_at
        self.log.append(queue.log, record, outcome, state, error, ended_at)
        record.token = record.worker = record.reserved_at_us = record.expires_at_us = None
        if record.progress is not None:
            record.progress = None
        if record.cancel_requested:
            record.cancel_requested = False
        slot.place = None
        queue.leases.stale += 1
        if record.key is not None:
            del queue.inflight[record.key]
        if queue.settings.max_inflight is not None:
            self._stirred[queue.name] = None
        return ended_at

    def _ended_at(self, record: JobRecord, now: Micros) -> Micros:
        """`now` may have been read before the lease began."""
        reserved_at = record.reserved_at_us
        return now if reserved_at is None or reserved_at < now else reserved_at

    def _finish(self, slot: Slot, state: JobState, now: Micros, finished_at: Micros) -> None:
        slot.queue.end(slot, state, finished_at)
        if slot.record.key is not None:
            self._unblock(slot, now)
        if state is DEAD:
            self._serve_failure_queue(slot, now)

    def _unblock(self, ended: Slot, now: Micros) -> None:
        queue, key = ended.queue, ended.record.key
        assert key is not None
        blocked = queue.waiting.get(key)
        if blocked is not None and blocked.record.state is BLOCKED and key not in queue.inflight:
            queue.leave(blocked)
            self._line_up(blocked, now)

    def _serve_failure_queue(self, dead: Slot, now: Micros) -> None:
        name = dead.queue.settings.failure_queue
        if name is not None:
            notice = failure_record(dead.record, job_id=self._new_id(), queue=name, now=now)
            self._accept(accepted(notice), now)

    def _go_back(self, slot: Slot, now: Micros) -> None:
        """Waiting again: first absorb what waited for this one to end."""
        key = slot.record.key
        if key is not None:
            blocked = slot.queue.waiting.pop(key, None)
            if blocked is not None:
                self._absorb(slot, blocked, now)
            slot.queue.waiting[key] = slot
        self._line_up(slot, now)

    def _absorb(self, survivor: Slot, blocked: Slot, now: Micros) -> None:
        record = blocked.record
        apply_update(survivor.record, record, record.update or DEFAULT_FLAGS)
        self.log.append(blocked.queue.log, record, Outcome.MERGED, CANCELLED, None, now)
        record.merged_into = survivor.record.id
        blocked.queue.leave(blocked)
        blocked.queue.end(blocked, CANCELLED, now)

    # -- reclaiming ---------------------------------------------------------------------------------------

    def reclaim(self, now: Micros, name: str | None, limit: int) -> int:
        if name is None:
            queues = list(self.queues.values())
        else:
            queues = [self.queues[name]] if name in self.queues else []
        ended = 0
        for queue in queues:
            ended += self._reclaim_queue(queue, now, limit - ended)
        self._wake()
        return ended

    def _reclaim_queue(self, queue: Queue, now: Micros, limit: int | None = None) -> int:
        ended = 0
        while limit is None or ended < limit:
            item = queue.leases.head()
            if item is None or item[0] > now:
                break
            self._expire(item[-1], now)
            ended += 1
        return ended

    def _expire(self, slot: Slot, now: Micros) -> None:
        record = slot.record
        record.stalls += 1
        if record.cancel_requested:
            state = CANCELLED
        elif self._is_spent(record):
            state = DEAD
        else:
            state = _waiting_state(record.run_at_us, now)
        ended_at = self._end_lease(slot, _EXPIRED, state, EXPIRED_ERROR, now)
        if state is DEAD:
            record.last_error = EXPIRED_ERROR.text
        if state.is_terminal:
            self._finish(slot, state, now, ended_at)
        else:
            self._go_back(slot, now)

    def _is_spent(self, record: JobRecord) -> bool:
        return record.attempts + record.stalls >= record.max_attempts or (
            0 < record.max_stalls <= record.stalls
        )


def _waiting_state(run_at: Micros, now: Micros) -> JobState:
    return SCHEDULED if run_at > now else READY
