"""Jobs loaded, moved in memory and written back at once.

Whatever is not a plain batch goes through a unit: it reads all the jobs a call is about in one step, applies the
contract's rules to them one by one in Python (so the second settlement of a job sees the first), and writes rows,
log and counters in a few steps. A batch of a thousand retries costs a dozen statements, not three thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from taskharbor.drivers.contract import failure_record
from taskharbor.drivers.engine.tables import (
    INLINE_PAYLOAD,
    OUTCOME_NUMBERS,
    Counts,
    Spec,
    State,
    Transaction,
    lease_token,
    load,
    to_json,
)
from taskharbor.jobs import DEFAULT_FLAGS, Failure, JobRecord, Micros, Outcome, UpdateFlags
from taskharbor.requests import new_id

UNIT = load("unit")
_ENQUEUE = load("enqueue")


class QueueRow(msgspec.Struct, frozen=True):
    name: str
    max_inflight: int | None
    failure_queue: str | None


class JobRow(msgspec.Struct, array_like=True, eq=False):
    """A row of `jobs`, in the order of `unit.sql`'s columns; then what only the unit knows."""

    seq: int
    id: str
    queue_id: int
    priority: int
    run_at: Micros
    created_at: Micros
    max_attempts: int
    max_stalls: int
    type: str
    key: str | None
    spec: str | None
    payload_size: int
    state: int = State.READY
    expires_at: Micros | None = None
    token: str | None = None
    worker: str | None = None
    reserved_at: Micros | None = None
    fence: int = 0
    attempts: int = 0
    stalls: int = 0
    cancel_requested: int = 0
    finished_at: Micros | None = None
    failed_at: Micros | None = None
    last_error: str | None = None
    merged_into: str | None = None

    payload: bytes | None = None
    is_new: bool = False
    has_new_spec: bool = False
    has_new_payload: bool = False
    result: bytes | None = None

    @property
    def full_token(self) -> str | None:
        return None if self.token is None else lease_token(self.token, self.seq)

    @property
    def inline_payload(self) -> bytes | None:
        return None if self.payload_size > INLINE_PAYLOAD else self.payload


_decode_jobs = msgspec.json.Decoder(list[JobRow]).decode


# Values of the statements of those names, in the order of their columns.
_moved = attrgetter(
    *("seq", "state", "run_at", "expires_at", "token", "worker", "reserved_at", "attempts", "stalls"),
    *("cancel_requested", "finished_at", "failed_at", "last_error", "merged_into"),
)
_inserted = attrgetter(
    *("seq", "queue_id", "state", "priority", "run_at", "created_at", "max_attempts", "max_stalls", "id"),
    *("type", "key", "spec", "payload_size", "inline_payload"),
)
_rewritten = attrgetter(
    *("type", "spec", "priority", "max_attempts", "max_stalls", "payload_size", "has_new_payload"),
    *("inline_payload", "seq"),
)
_logged = attrgetter(
    *("id", "queue_id", "type", "key", "priority", "fence", "worker", "created_at", "run_at", "reserved_at"),
    *("expires_at", "payload_size", "seq"),
)


def new_job(record: JobRecord, queue: int, seq: int) -> JobRow:
    return JobRow(
        seq=seq,
        id=record.id,
        queue_id=queue,
        priority=record.priority,
        run_at=record.run_at_us,
        created_at=record.created_at_us,
        max_attempts=record.max_attempts,
        max_stalls=record.max_stalls,
        type=record.type,
        key=record.key,
        spec=Spec.of(record).text(),
        payload_size=len(record.payload),
        payload=record.payload,
        is_new=True,
    )


class Unit:
    """One call's jobs. `flush` writes everything back; without it nothing happened."""

    def __init__(self, transaction: Transaction, now: Micros, job_ids: Iterable[str]) -> None:
        """Fetch the jobs, and those that share a key with one of them."""
        self.transaction = transaction
        self.now = now
        self.counts = Counts(transaction)
        self._jobs: dict[str, JobRow] = {}
        self._waiting: dict[tuple[int, str], JobRow | None] = {}
        self._inflight: dict[tuple[int, str], JobRow | None] = {}
        self._moved: dict[int, JobRow] = {}
        self._log: list[tuple[Any, ...]] = []
        self._queues: dict[int, QueueRow] = {}
        self._last_seq = 0
        loaded = self._fetch("load", list(dict.fromkeys(job_ids)))
        self.load_keys({(job.queue_id, job.key) for job in loaded if job.key is not None})

    # -- reading ------------------------------------------------------------------------------------------

    def load_keys(self, keys: Iterable[tuple[int, str]]) -> None:
        wanted = [key for key in keys if key not in self._waiting]
        if not wanted:
            return
        for by_key, statement in ((self._waiting, "load_waiting"), (self._inflight, "load_inflight")):
            by_key.update(dict.fromkeys(wanted))
            by_key.update({(job.queue_id, job.key or ""): job for job in self._fetch(statement, wanted)})

    def _fetch(self, statement: str, wanted: Sequence[Any]) -> list[JobRow]:
        (text,) = self.transaction.execute(UNIT[statement], (to_json(wanted),)).fetchone()
        # A job seen before stays the object it was: it may have been changed since.
        return [self._jobs.setdefault(job.id, job) for job in _decode_jobs(text)]

    def job(self, job_id: str) -> JobRow | None:
        return self._jobs.get(job_id)

    def waiting(self, queue: int, key: str | None) -> JobRow | None:
        return None if key is None else self._waiting.get((queue, key))

    def inflight(self, queue: int, key: str | None) -> JobRow | None:
        return None if key is None else self._inflight.get((queue, key))

    def queue(self, number: int) -> QueueRow:
        if number not in self._queues:
            row = self.transaction.execute(UNIT["queue"], (number,)).fetchone()
            self._queues[number] = QueueRow(*row)
        return self._queues[number]

    def payload(self, job: JobRow) -> bytes:
        if job.payload is None:
            (job.payload,) = self.transaction.execute(UNIT["payload"], (job.seq,)).fetchone()
        return job.payload or b""

    # -- moving -------------------------------------------------------------------------------------------

    def place(self, job: JobRow, state: int) -> None:
        """Give a job its new state, with the counters and key tables that follow from it."""
        self.counts.move(
            job.queue_id, None if job.is_new and job.seq not in self._moved else job.state, state
        )
        if job.key is not None:
            place = (job.queue_id, job.key)
            if self._waiting.get(place) is job:
                self._waiting[place] = None
            if self._inflight.get(place) is job:
                self._inflight[place] = None
            if state < State.INFLIGHT:
                self._waiting[place] = job
        job.state = state
        self._moved[job.seq] = job
        if state == State.READY:
            self.counts.stir(job.queue_id)
        elif state == State.SCHEDULED:
            self.counts.schedule(job.queue_id, job.run_at)

    def wait_by_run_at(self, job: JobRow) -> None:
        self.place(job, State.SCHEDULED if job.run_at > self.now else State.READY)

    def touch(self, job: JobRow) -> None:
        self._moved[job.seq] = job

    def end(self, job: JobRow, state: int, outcome: Outcome, error: Failure | None = None) -> None:
        """A job's end: done, dead or cancelled. Serves a blocked job of its key and the failure queue."""
        was_inflight = job.state == State.INFLIGHT
        job.finished_at = self.log(job, outcome, state, error)
        self._drop_lease(job)
        self.place(job, state)
        if was_inflight:
            blocked = self.waiting(job.queue_id, job.key)
            if blocked is not None and blocked.state == State.BLOCKED:
                self.wait_by_run_at(blocked)
        if state == State.DEAD and (failure_queue := self.queue(job.queue_id).failure_queue) is not None:
            record = failure_record(
                self._dead_record(job), job_id=new_id(), queue=failure_queue, now=self.now
            )
            if self.transaction.outbox is None:
                self.insert(record, self.transaction.queue_id(failure_queue))
            else:
                self.transaction.outbox.append(record)

    def back_to_waiting(
        self, job: JobRow, outcome: Outcome, run_at: Micros | None = None, error: Failure | None = None
    ) -> None:
        """The lease ends, the job does not. It absorbs a blocked job of its key."""
        blocked = self.waiting(job.queue_id, job.key)
        spec = None if blocked is None else Spec.read(blocked.spec)
        flags = DEFAULT_FLAGS if spec is None or spec.update is None else spec.update
        run_at = job.run_at if run_at is None else run_at
        due = run_at if blocked is None else _changed_run_at(run_at, blocked.run_at, flags)
        self.log(job, outcome, State.SCHEDULED if due > self.now else State.READY, error)
        self._drop_lease(job)
        job.run_at = run_at
        if blocked is not None and spec is not None:
            self.change(job, blocked, spec, flags)
            blocked.merged_into = job.id
            self.end(blocked, State.CANCELLED, Outcome.MERGED)
        self.wait_by_run_at(job)

    def _drop_lease(self, job: JobRow) -> None:
        if job.state == State.INFLIGHT and self.queue(job.queue_id).max_inflight is not None:
            self.counts.stir(job.queue_id)
        job.token = job.worker = job.expires_at = job.reserved_at = None
        job.cancel_requested = 0

    def change(self, job: JobRow, by: JobRow, by_spec: Spec, flags: UpdateFlags) -> None:
        """Change a job by one more request with the same key."""
        spec = Spec.read(job.spec)
        if flags.payload:
            job.type = by.type
            job.payload = self.payload(by)
            job.payload_size = len(job.payload)
            job.has_new_payload = True
            spec.codec, spec.headers, spec.timeout_us = by_spec.codec, by_spec.headers, by_spec.timeout_us
        job.run_at = _changed_run_at(job.run_at, by.run_at, flags)
        if flags.retry:
            job.max_attempts, job.max_stalls = by.max_attempts, by.max_stalls
            spec.backoff_min_us, spec.backoff_max_us = by_spec.backoff_min_us, by_spec.backoff_max_us
        if flags.reset_counts:
            job.attempts = job.stalls = 0
        if flags.priority:
            job.priority = by.priority
        self.set_spec(job, spec)
        self.touch(job)

    def set_spec(self, job: JobRow, spec: Spec) -> None:
        job.spec = spec.text()
        job.has_new_spec = True

    def insert(self, record: JobRecord, queue: int, state: int | None = None, number: int = 0) -> JobRow:
        """A new job, ready or scheduled by its run_at unless a state is given. Its number is at least the one given."""
        if not self._last_seq:
            (self._last_seq,) = self.transaction.execute(_ENQUEUE["last_seq"]).fetchone()
        self._last_seq = max(self._last_seq + 1, number)
        job = new_job(record, queue, self._last_seq)
        self._jobs[job.id] = job
        if state is None:
            self.wait_by_run_at(job)
        else:
            self.place(job, state)
        return job

    def log(self, job: JobRow, outcome: Outcome, state: int, error: Failure | None = None) -> Micros:
        """A row for what ends now, with the job as it is before the change; the time it ended at."""
        ended_at = self.now
        if job.reserved_at is not None:
            # `now` may have been read before the lease began.
            ended_at = max(ended_at, job.reserved_at)
            assert job.expires_at is not None
            self.counts.end_lease(job.queue_id, min(ended_at, job.expires_at))
        error_type, message = (None, None) if error is None else (error.type, error.message)
        self._log.append((*_logged(job), ended_at, OUTCOME_NUMBERS[outcome], state, error_type, message))
        return ended_at

    def _dead_record(self, job: JobRow) -> JobRecord:
        spec = Spec.read(job.spec)
        return JobRecord(
            id=job.id,
            type=job.type,
            queue=self.queue(job.queue_id).name,
            payload=self.payload(job),
            codec=spec.codec,
            headers=spec.headers,
            run_at_us=job.run_at,
            created_at_us=job.created_at,
            key=job.key,
            attempts=job.attempts,
            stalls=job.stalls,
            last_error=job.last_error,
        )

    # -- writing ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        moved = self._moved.values()
        # Those that end first: they give up the place of their key that another job takes in the same call.
        for group in (
            [job for job in moved if job.state > State.INFLIGHT and not job.is_new],
            [job for job in moved if job.state <= State.INFLIGHT and not job.is_new],
        ):
            self.transaction.insert_rows(UNIT["move"], list(map(_moved, group)))
        for job in moved:
            if not job.is_new and (job.has_new_spec or job.has_new_payload):
                self._rewrite(job)
        new = [job for job in moved if job.is_new]
        self.transaction.insert_rows(UNIT["insert"], list(map(_inserted, new)))
        long = [(job.seq, job.payload) for job in new if job.payload_size > INLINE_PAYLOAD]
        self.transaction.insert_rows(_ENQUEUE["insert_payload"], long)
        results = [(job.seq, job.result) for job in moved if job.result is not None]
        self.transaction.insert_rows(UNIT["insert_result"], results)
        self.transaction.insert_rows(UNIT["log"], self._log)
        self.counts.flush()

    def _rewrite(self, job: JobRow) -> None:
        self.transaction.execute(UNIT["rewrite"], _rewritten(job))
        if job.has_new_payload:
            self.transaction.execute(UNIT["drop_payload"], (job.seq,))
            if job.payload_size > INLINE_PAYLOAD:
                self.transaction.insert_rows(_ENQUEUE["insert_payload"], [(job.seq, job.payload)])


def _changed_run_at(run_at: Micros, given: Micros, flags: UpdateFlags) -> Micros:
    match flags.run_at:
        case "yes":
            return given
        case "later":
            return max(run_at, given)
        case "earlier":
            return min(run_at, given)
    return run_at
