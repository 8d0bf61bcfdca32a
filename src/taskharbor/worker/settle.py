"""The settle loop: writes how executions ended, by natural group commit.

Everything that finished while the last write was under way goes into the next: no timer, no added latency when
idle, large batches under load.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from taskharbor.drivers.contract import Ack, Discard, Fail, Release, RetryAt, Settlement
from taskharbor.errors import JobError, LeaseMismatch
from taskharbor.jobs import MAX_TRIES, Failure, Outcome
from taskharbor.worker.fetch import Assignment, BackendLoop, CallRefused
from taskharbor.worker.logs import log_trace
from taskharbor.worker.run import Hold

log = logging.getLogger("taskharbor.worker")


class SettleLoop(BackendLoop):
    """Writes settlements. `made_room` is called for every execution that ended."""

    def __init__(self, assignment: Assignment, made_room: Callable[[], None]) -> None:
        super().__init__(assignment)
        self._most_at_once = self._driver.capabilities.batch
        # After an outage the write must come before the leases are over.
        self._longest_pause = self._config.heartbeat / 2
        self._made_room = made_room
        self._finished: deque[Hold] = deque()
        self._wake = asyncio.Event()
        self._asleep = False
        self._last_failure: Failure | None = None
        """Rows of a batch that failed together share one failure: its traceback is logged once."""

    def finished(self, holds: Sequence[Hold]) -> None:
        """From the handlers' thread: executions ended."""
        self._finished.extend(holds)
        try:
            if self._asleep:
                self._asleep = False
                self._loop.call_soon_threadsafe(self._wake.set)
            self._made_room()
        except RuntimeError:  # The loop is closed.
            log.debug("%d jobs ended after their worker had", len(holds))

    async def run(self) -> None:
        while True:
            if not self._finished:
                self._wake.clear()
                # Raised before the second look: a hold that arrives in between sees it and wakes us.
                self._asleep = True
                if not self._finished:
                    await self._wake.wait()
                self._asleep = False
            await self.flush()

    async def flush(self) -> None:
        """Write what has finished so far, in one call."""
        batch: list[Hold] = []
        while self._finished and len(batch) < self._most_at_once:
            hold = self._finished.popleft()
            if hold.settlement is None or hold.lost:
                self._holds.pop(hold, None)
            else:
                hold.settling = True
                batch.append(hold)
        if not batch:
            self._flushed(())
            return
        answers = await self._each(self._write, batch)
        if any(answers):
            answers = await self._write_again(batch, answers)
        for hold in batch:
            self._holds.pop(hold, None)
        self._flushed(batch if not any(answers) else self._without_refused(batch, answers))

    async def _write_again(
        self, batch: list[Hold], answers: Sequence[JobError | None]
    ) -> list[JobError | None]:
        final = dict(zip(batch, answers, strict=True))
        outrun = [hold for hold, one in final.items() if isinstance(one, LeaseMismatch)]
        refused = {hold: one.detail for hold, one in final.items() if isinstance(one, CallRefused)}
        if outrun:
            # A heartbeat on its way may have changed the token under a settlement: the new one is tried too.
            await self.assignment.heartbeat_over.wait()
        for hold, reason in refused.items():
            # It would be refused again, and so would another execution's that ends in the same way.
            hold.settlement = _refused(hold, reason)
        if again := [*outrun, *refused]:
            written: list[JobError | None] = await self._each(self._write, again)
            final |= zip(again, written, strict=True)
        return list(final.values())

    def _flushed(self, written: Sequence[Hold]) -> None:
        if len(self._holds) <= 1:
            for one in self.assignment.siblings:  # In one of them a suspect may wait to be alone.
                one.changed.set()
        for settled in self.assignment.allowance.on_settled:
            settled()
        kinds = Counter([type(hold.settlement) for hold in written])
        for kind, count in kinds.items():
            self.assignment.outcomes[_OUTCOMES[kind]] += count
        if Release in kinds:
            self.assignment.allowance.left += sum([_is_unbegun(hold) for hold in written])
        if RetryAt in kinds or Fail in kinds:
            for hold in written:
                if isinstance(hold.settlement, (RetryAt, Fail)):
                    error = hold.settlement.error
                    _log_failure(hold, hold.settlement, with_traceback=error is not self._last_failure)
                    self._last_failure = error

    def _without_refused(self, batch: list[Hold], answers: Sequence[JobError | None]) -> list[Hold]:
        written: list[Hold] = []
        for hold, answer in zip(batch, answers, strict=True):
            if answer is None:
                written.append(hold)
                continue
            job, outcome = hold.record, _OUTCOMES[type(hold.settlement)]
            log.warning(
                "%s %s could not be settled as %s: %s",
                job.type,
                job.id,
                outcome,
                answer.detail or answer.reason,
            )
        return written

    async def _write(self, batch: Sequence[Hold]) -> list[JobError | None]:
        settlements = [_current(hold) for hold in batch]
        return await self._outage.ride_out(
            lambda: self._driver.settle(settlements, now=self._clock.now()),
            give_up=self.assignment.is_past_closing,
            longest_pause=self._longest_pause,
        )


def _current(hold: Hold) -> Settlement:
    settlement = hold.settlement
    assert settlement is not None
    if settlement.token == hold.token:
        return settlement
    return msgspec.structs.replace(settlement, token=hold.token)


def _refused(hold: Hold, reason: str) -> Fail:
    how = f"the job ended as {_OUTCOMES[type(hold.settlement)]}, which could not be written: {reason}"
    attempts = min(max(0, hold.record.attempts), MAX_TRIES - 1) + 1
    return Fail(hold.record.id, hold.token, attempts, Failure.of("SettlementRefused", how))


def _is_unbegun(hold: Hold) -> bool:
    settlement = hold.settlement
    return hold.job is None and isinstance(settlement, Release) and settlement.run_at_us is None


def _log_failure(hold: Hold, settlement: RetryAt | Fail, *, with_traceback: bool) -> None:
    job, error, outcome = hold.record, settlement.error, _OUTCOMES[type(settlement)]
    level, what = logging.WARNING, "will be retried"
    if outcome is not Outcome.RETRIED:
        level, what = logging.ERROR, "is dead"
    attempt = settlement.attempts + job.stalls
    reason = error.text.partition("\n")[0]
    fields: dict[str, object] = {
        "job_id": job.id,
        "job_type": job.type,
        "queue": job.queue,
        "attempt": attempt,
    }
    fields |= {"outcome": str(outcome), "error_type": error.type, "error_message": error.message}
    said = job.type, job.id, what, attempt, job.max_attempts, reason
    # The exception itself may have come from another process.
    trace = (error.detail or "") if with_traceback else ""
    log_trace(log, level, "%s %s %s after attempt %d of %d: %s", *said, trace=trace, extra=fields)


_OUTCOMES: dict[type[Settlement | None], Outcome] = {
    Ack: Outcome.DONE,
    RetryAt: Outcome.RETRIED,
    Fail: Outcome.DEAD,
    Release: Outcome.RELEASED,
    Discard: Outcome.CANCELLED,
}
