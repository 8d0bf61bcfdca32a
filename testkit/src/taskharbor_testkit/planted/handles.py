"""Handles that trust their own memory: settings and answers kept per handle, and changes confirmed without a write.

Their author saved a round trip. The store is right; a handle is wrong, after another handle has changed something.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec.structs import replace

from taskharbor.clock import Clock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Enqueued, Fail, QueueSettings
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease, Micros, UpdateFlags
from taskharbor_testkit.model import Model
from taskharbor_testkit.planted.registry import Bug, HandleBug


class _Remembers(HandleBug):
    """A handle with a memory of its own."""

    def __init__(self, model: Model | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(model, clock=clock)
        self.memory: dict[Any, Any] = {}


class _SettingKept(_Remembers):
    """Reads a queue's settings for the first call of some kinds, and takes this field from there in the later ones."""

    field: ClassVar[str]
    calls: ClassVar[tuple[type[op.Operation[Any]], ...]]

    async def run(self, call: Any) -> Any:
        if type(call) is op.Configure:
            self.memory.pop(call.queue, None)
        if type(call) not in self.calls:
            return await super().run(call)
        true = dict(self.model.configured)
        for queue in self.model.queues:
            kept = self.memory.setdefault(queue, self.model.settings(queue))
            old = {self.field: getattr(kept, self.field)}
            self.model.configured[queue] = replace(self.model.settings(queue), **old)
        try:
            return await super().run(call)
        finally:
            self.model.configured = true


for _name, _field, _calls, _rule in (
    ("PauseKeptByTheHandle", "paused", (op.Reserve,), "A pause holds on every handle at once."),
    ("LimitKeptByTheHandle", "max_inflight", (op.Reserve,), "max_inflight holds on every handle at once."),
    ("RetentionKeptByTheHandle", "keep_done_us", (op.Prune,), "Retention holds on every handle at once."),
    (
        "RetentionOfTheLogKeptByTheHandle",
        "keep_attempts_us",
        (op.Prune,),
        "Retention of the log holds on every handle at once.",
    ),
    (
        "FailureQueueKeptByTheHandle",
        "failure_queue",
        (op.Settle, op.Reclaim, op.Reserve),
        "A failure queue is named for every handle at once.",
    ),
    (
        "DeclarationKeptByTheHandle",
        "declaration",
        (op.Settings,),
        "The settings that a handle reads are those of now.",
    ),
):
    type(_name, (_SettingKept,), {"__doc__": _rule, "field": _field, "calls": _calls})


class UnchangedSettingsNotWritten(_Remembers):
    """A setting is written although this handle wrote the same one last."""

    async def run(self, call: Any) -> Any:
        if type(call) is op.Configure and not call.declares:
            given = (call.settings, call.fields and tuple(call.fields))
            if self.memory.get(call.queue) == given:
                return None
            self.memory[call.queue] = given
        return await super().run(call)


class DeclarationRememberedByTheHandle(_Remembers):
    """Whether a declaration was applied is known to the store alone."""

    async def run(self, call: Any) -> Any:
        if type(call) is op.Configure and call.declares:
            if self.memory.get(call.queue) == call.settings.declaration:
                return None
            self.memory[call.queue] = call.settings.declaration
        return await super().run(call)


class IdsRememberedByTheHandle(_Remembers):
    """An id whose job is gone may be accepted again, by the handle that stored it too."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.Enqueue:
            return await super().run(call)
        new = [record for record in call.records if record.id not in self.memory]
        stored = iter(await super().run(replace(call, records=new)) if new else [])
        known = set(self.memory)
        answers = [
            Enqueued(record.id, existed=True) if record.id in known else next(stored)
            for record in call.records
        ]
        self.memory |= {one.id: True for one in answers}
        return answers


class IdempotencyKeysRememberedByTheHandle(_Remembers):
    """An idempotency key whose job is gone is forgotten, by the handle that stored it too."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.Enqueue or len(call.records) != 1:
            return await super().run(call)
        (record,) = call.records
        name = record.idempotency_key and (record.queue, record.idempotency_key)
        if name in self.memory:
            return [Enqueued(self.memory[name], existed=True)]
        (answer,) = await super().run(call)
        if name is not None:
            self.memory[name] = answer.id
        return [answer]


class EndedJobsRememberedByTheHandle(_Remembers):
    """A dead job that somebody requeued is read as it is now."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.Get:
            return await super().run(call)
        for job in await super().run(call):
            if job is not None and job.state.is_terminal:
                self.memory.setdefault(job.id, job)
        fresh = await super().run(call)
        return [
            self.memory.get(job_id, job) if job is not None else None
            for job_id, job in zip(call.job_ids, fresh, strict=True)
        ]


class DeathsRememberedByTheHandle(_Remembers):
    """A job that died, was requeued and fails again dies again, by whichever handle."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.Settle or len(call.settlements) != 1:
            return await super().run(call)
        (one,) = call.settlements
        if isinstance(one, Fail) and one.job_id in self.memory:
            return [None]
        answers = await super().run(call)
        if isinstance(one, Fail) and answers == [None]:
            self.memory[one.job_id] = True
        return answers


class JobAttemptsRememberedByTheHandle(_Remembers):
    """The rows of a job that ended and was requeued are read anew."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.JobAttempts:
            return await super().run(call)
        known: list[Any] = self.memory.get(call.job_id, [])
        rows: Any = known or await super().run(call)
        if rows and rows[-1].state.is_terminal:
            self.memory[call.job_id] = rows
        return list(rows)


class BlobsRememberedByTheHandle(_Remembers):
    """A blob that another handle replaced is read as it is now."""

    async def run(self, call: Any) -> Any:
        if type(call) is op.ReadBlobs:
            found = await super().run(call)
            for name, data in zip(call.names, found, strict=True):
                if data is not None:
                    self.memory.setdefault(name, data)
            return [
                self.memory.get(name) if data is not None else None
                for name, data in zip(call.names, found, strict=True)
            ]
        return await super().run(call)


class SmallHeartbeatsNotWritten(Bug):
    """A heartbeat that gains less than a second is written."""

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        before = job.expires_at_us or 0
        lease = super().extend(job, expires_at, progress)
        if 0 < lease.expires_at_us - before < SECOND:
            job.expires_at_us = before
        return lease


class ProgressOfLateHeartbeatLost(Bug):
    """A heartbeat that does not move the expiry still brings its progress."""

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        is_late = expires_at <= (job.expires_at_us or 0)
        return super().extend(job, expires_at, None if is_late else progress)


class OneCancelRequestPerCall(Bug):
    """Every inflight job of a cancel is marked."""

    def cancel(self, job_ids: Any, *, now: Micros, only_waiting: bool = False) -> list[Any]:
        answers = super().cancel(job_ids, now=now, only_waiting=only_waiting)
        marked = [job_id for job_id, answer in zip(job_ids, answers, strict=True) if answer == "inflight"]
        for job_id in marked[1:]:
            self.jobs[job_id].cancel_requested = False
        return answers


class RequeuedOnlyOnce(Bug):
    """A job that died again is requeued again."""

    def requeue_one(self, job_id: str, now: Micros, run_at: Micros, keep_counts: bool) -> Any:
        job = self.jobs.get(job_id)
        if job is not None and job.state is JobState.DEAD and job.update == UpdateFlags(False):
            return JobState.READY
        answer = super().requeue_one(job_id, now, run_at, keep_counts)
        if job is not None and answer == "ready":
            job.update = UpdateFlags(False)
        return answer


class OlderUpdateConfirmed(Bug):
    """An update counts whenever its record was created."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        if given.created_at_us >= waiting.created_at_us:
            super().update_waiting(waiting, given, flags, now)


class EmptyPayloadIsNoUpdate(Bug):
    """An update to an empty payload and no headers is one."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        given = replace(
            given, payload=given.payload or waiting.payload, headers=given.headers or waiting.headers
        )
        super().update_waiting(waiting, given, flags, now)


class SwapOfEqualLengthNotWritten(Bug):
    """A blob that was swapped for one of the same length has changed."""

    def put_blob(self, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
        kept = self.blobs.get(blob)
        if swaps and kept is not None and kept == expected and len(kept) == len(data):
            return True
        return super().put_blob(blob, data, swaps, expected)


class PurgeConfirmedForPausedQueues(Bug):
    """A purge removes the jobs that it counts, in a paused queue too."""

    def forget(self, job_ids: Any) -> int:
        paused = [job_id for job_id in job_ids if self.settings(self.jobs[job_id].queue).paused]
        return super().forget([job_id for job_id in job_ids if job_id not in paused]) + len(paused)


class RetentionReadOnceForAll(Bug):
    """A change of retention holds for jobs that ended before it, too."""

    def prune(self, *, now: Micros, limit: int = 1000) -> int:
        kept: dict[str, QueueSettings] = self.__dict__.setdefault("first_settings", {})
        for queue in self.queues:
            kept.setdefault(queue, self.settings(queue))
        true, self.configured = self.configured, kept
        try:
            return super().prune(now=now, limit=limit)
        finally:
            self.configured = true
