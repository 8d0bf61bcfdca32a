"""The store, last part: what an operator does. Look, cancel, requeue, clean up, change settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from taskharbor.drivers.contract import AttemptPage, JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.memory.copies import as_read
from taskharbor.drivers.memory.leasing import LeasingStore
from taskharbor.drivers.memory.lines import PlaceLine
from taskharbor.drivers.memory.queues import CANCELLED, DEAD, DONE, INFLIGHT, READY, Queue, Slot
from taskharbor.errors import InvalidRequest, JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome


class MemoryRules(LeasingStore):
    """All jobs of one `memory://` store. Handles share it; every call happens under its `lock`."""

    # -- single jobs --------------------------------------------------------------------------------------

    def cancel(self, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
        return [self._cancel(job_id, now) for job_id in job_ids]

    def _cancel(self, job_id: str, now: Micros) -> JobState | JobError:
        slot = self._find(job_id)
        if slot is None:
            return JobNotFound(job_id)
        state = slot.record.state
        if state is DONE or state is DEAD:
            return JobFinished(job_id)
        if state is INFLIGHT:
            slot.record.cancel_requested = True
            return INFLIGHT
        if state is not CANCELLED:
            self._cancel_waiting(slot, now)
        return CANCELLED

    def _cancel_waiting(self, slot: Slot, now: Micros) -> None:
        self.log.append(slot.queue.log, slot.record, Outcome.CANCELLED, CANCELLED, None, now)
        if slot.record.key is not None:
            del slot.queue.waiting[slot.record.key]
        slot.queue.leave(slot)
        self._finish(slot, CANCELLED, now, now)

    def requeue(self, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
        answers = [self._requeue(job_id, now) for job_id in job_ids]
        self._wake()
        return answers

    def _requeue(self, job_id: str, now: Micros) -> JobState | JobError:
        slot = self._find(job_id)
        if slot is None:
            return JobNotFound(job_id)
        record, queue = slot.record, slot.queue
        if record.state is not DEAD:
            return JobNotDead(job_id)
        if record.key is not None and record.key in queue.waiting:
            return KeyConflict(job_id)
        is_blocked = record.key is not None and record.key in queue.inflight
        queue.leave(slot)
        self._start_over(record, now)
        if record.key is not None:
            queue.waiting[record.key] = slot
        if is_blocked:
            queue.block(slot)
        else:
            self._line_up(slot, now)
        self.log.append(queue.log, record, Outcome.REQUEUED, record.state, None, now)
        return record.state

    def _start_over(self, record: JobRecord, now: Micros) -> None:
        record.attempts = record.stalls = 0
        record.finished_at_us = None
        record.run_at_us = now

    # -- looking ------------------------------------------------------------------------------------------

    def get(self, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
        slots = [self._find(job_id) for job_id in job_ids]
        return [None if slot is None else as_read(slot.record, now) for slot in slots]

    def list_jobs(self, selection: JobFilter, now: Micros, limit: int, cursor: str | None) -> Page:
        slots = self.order.before(None if cursor is None else _number(cursor))
        if selection.until is not None:
            last = _number(selection.until)
            slots = takewhile(lambda slot: slot.seq >= last, slots)
        wanted = (slot for slot in slots if matches(slot.record, selection, now))
        # One more than asked for tells whether anything follows.
        found = list(islice(wanted, limit + 1))
        page = found[:limit]
        return Page(
            [as_read(slot.record, now) for slot in page], str(page[-1].seq) if len(found) > limit else None
        )

    def stats(self, now: Micros, name: str | None) -> list[QueueStats]:
        if name is not None:
            found = [self._stats(self.queues.get(name) or Queue(name), now)]
        else:
            found = [self._stats(self.queues[name], now) for name in sorted(self.queues)]
        self._wake()
        return found

    def _stats(self, queue: Queue, now: Micros) -> QueueStats:
        if queue.promote(now):
            self._stirred[queue.name] = None
        return QueueStats(
            queue=queue.name,
            counts=queue.counts(),
            done_total=queue.total(DONE),
            dead_total=queue.total(DEAD),
            cancelled_total=queue.total(CANCELLED),
            head_run_at_us=queue.head_run_at(),
            settings=queue.settings,
        )

    def read_attempts(self, after: str | None, limit: int) -> AttemptPage:
        rows, last = self.log.read(0 if after is None else _number(after), limit)
        return AttemptPage(rows, str(last))

    def job_attempts(self, job_id: str) -> list[Attempt]:
        return self.log.of_job(job_id)

    # -- settings -----------------------------------------------------------------------------------------

    def configure(self, name: str, settings: QueueSettings) -> None:
        self._queue(name).settings = settings
        self._stirred[name] = None
        self._wake()

    def settings(self, name: str) -> QueueSettings:
        queue = self.queues.get(name)
        return QueueSettings() if queue is None else queue.settings

    # -- cleaning up --------------------------------------------------------------------------------------

    def purge(self, selection: JobFilter, limit: int) -> int:
        slots = self._to_purge(selection, limit)
        for slot in slots:
            self._forget(slot)
        return len(slots)

    def _to_purge(self, selection: JobFilter, limit: int) -> list[Slot]:
        names = self.queues if selection.queue is None else [selection.queue]
        queues = [self.queues[name] for name in names if name in self.queues]
        wanted = (
            item[-1]
            for queue in queues
            for line in self._purgeable(queue)
            for item in line
            if matches(item[-1].record, selection, None)
        )
        return list(islice(wanted, max(limit, 0)))

    def _purgeable(self, queue: Queue) -> list[PlaceLine]:
        return [queue.done, queue.dead, queue.cancelled]

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        answers = {job_id: self._remove(job_id) for job_id in dict.fromkeys(job_ids)}
        return [answers[job_id] for job_id in job_ids]

    def _remove(self, job_id: str) -> JobState | JobError:
        slot = self._find(job_id)
        if slot is None:
            return JobNotFound(job_id)
        state = slot.record.state
        if not state.is_terminal:
            return JobError(job_id, f"the job is {state} and has not ended: cancel it first")
        self._forget(slot)
        return state

    def publish(self, records: Sequence[JobRecord], portion: tuple[str, int, int], now: Micros) -> int:
        """Enqueue a portion of a bulk write, unless it was before. How many jobs the write has added so far."""
        series, *place = portion
        known, added = self.portions.get(series, ([place[0], 0], 0))
        added = added if known[0] == place[0] else 0
        if known < place:
            added += sum(not answer.existed for answer in self.enqueue(records, now))
            self.portions[series] = (place, added)
        return added

    def prune(self, now: Micros, limit: int) -> int:
        jobs = rows = 0
        for queue in self.queues.values():
            settings = queue.settings
            for line, keep in (
                (queue.done, settings.keep_done_us),
                (queue.cancelled, settings.keep_done_us),
                (queue.dead, settings.keep_dead_us),
            ):
                if keep is not None:
                    jobs += self._prune_jobs(line, now - keep, limit - jobs)
            if settings.keep_attempts_us is not None:
                rows += self.log.prune(queue.log, now - settings.keep_attempts_us, limit - rows)
        return jobs + rows

    def _prune_jobs(self, line: PlaceLine, finished_by: Micros, limit: int) -> int:
        removed = 0
        while removed < limit:
            item = line.head()
            if item is None or item[0] > finished_by:
                break
            self._forget(item[-1])
            removed += 1
        return removed

    def _forget(self, slot: Slot) -> None:
        job_id, queue = slot.record.id, slot.queue
        queue.leave(slot)
        self.order.remove(slot.seq)
        del self.jobs[job_id]
        for idempotency_key in queue.led_here.pop(job_id, ()):
            del queue.accepted[idempotency_key]


def matches(record: JobRecord, selection: JobFilter, now: Micros | None) -> bool:
    """`now` None: the states of terminal jobs, which no time changes."""
    if selection.queue is not None and record.queue != selection.queue:
        return False
    if selection.states is not None:
        state = record.state
        if now is not None and state.is_waiting and state is not JobState.BLOCKED:
            state = JobState.SCHEDULED if record.run_at_us > now else READY
        if state not in selection.states:
            return False
    before = selection.finished_before_us
    return (
        (selection.types is None or record.type in selection.types)
        and (selection.key is None or record.key == selection.key)
        and (selection.worker is None or record.worker == selection.worker)
        and (before is None or (record.finished_at_us is not None and record.finished_at_us < before))
    )


def _number(cursor: str) -> int:
    if not cursor.isdecimal():
        raise InvalidRequest(f"{cursor!r} is not a cursor of this store: pass on what the last page gave")
    return int(cursor)
