"""Bugs on purpose. A simulation that finds none of them would prove nothing by finding none elsewhere.

Each is a mistake somebody has shipped: in a driver (a store with one rule missing) or in a worker (one method replaced
for the time of a run). `expected` names the guarantees of which at least one must be seen broken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import msgspec

from taskharbor.clock import BackendClock
from taskharbor.drivers.memory import MemoryStore
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros
from taskharbor.worker.heartbeat import HeartbeatLoop
from taskharbor.worker.hold import Hold
from taskharbor.worker.run import Runner
from taskharbor.worker.settle import SettleLoop
from taskharbor_testkit.simulation.report import Report, simulate
from taskharbor_testkit.simulation.scheduler import EPOCH


class StaleTokenStore(MemoryStore):
    """Settles for whoever comes, token or not."""

    def _objection(self, slot: Any, job_id: str, token: str, now: Micros) -> Any:
        held = token if slot is None or slot.record.token is None else slot.record.token
        return super()._objection(slot, job_id, held, now)


class ExpiredLeaseStore(MemoryStore):
    """Honours a lease that is over."""

    def _objection(self, slot: Any, job_id: str, token: str, now: Micros) -> Any:
        return super()._objection(slot, job_id, token, 0)


class UnlimitedStore(MemoryStore):
    """Does not know of W."""

    def _room(self, queue: Any, now: Micros) -> int:
        return 1_000_000


class EarlyStore(MemoryStore):
    """Takes a job for due two seconds before it is."""

    def reserve(self, name: str, limit: int, lease_for: Micros, now: Micros, *rest: Any) -> Any:
        leased = super().reserve(name, limit, lease_for, now + 2_000_000, *rest)
        for record in leased:
            stored = self.jobs[record.id].record
            record.reserved_at_us = stored.reserved_at_us = now
        return leased


class LazyStore(MemoryStore):
    """Leaves it to the sweep to end what is over."""

    def _reclaim_queue(self, queue: Any, now: Micros, limit: int | None = None) -> int:
        return 0 if limit is None else super()._reclaim_queue(queue, now, limit)


class ForgetfulStore(MemoryStore):
    """Loses a job whose worker died."""

    def _expire(self, slot: Any, now: Micros) -> None:
        super()._expire(slot, now)
        if not slot.record.state.is_terminal:
            slot.queue.leave(slot)
            if slot.record.key is not None:
                del slot.queue.waiting[slot.record.key]
            del self.jobs[slot.record.id]


class SameFenceStore(MemoryStore):
    """Does not count a lease that followed a stall."""

    def _expire(self, slot: Any, now: Micros) -> None:
        super()._expire(slot, now)
        slot.record.fence -= 1


class UnblockedStore(MemoryStore):
    """Lets a second job of a key run beside the first."""

    def _insert(self, queue: Any, record: Any, now: Micros) -> None:
        held, queue.inflight = queue.inflight, {}
        super()._insert(queue, record, now)
        queue.inflight = held


class RepeatingStore(MemoryStore):
    """Forgets idempotency keys."""

    def _remember(self, queue: Any, idempotency_key: str | None, job_id: str) -> None:
        pass


class SilentStore(MemoryStore):
    """Tells the failure queue of failures, but not of stalls."""

    def _expire(self, slot: Any, now: Micros) -> None:
        settings = slot.queue.settings
        slot.queue.settings = msgspec.structs.replace(settings, failure_queue=None)
        super()._expire(slot, now)
        slot.queue.settings = settings


# -- in the worker -----------------------------------------------------------------------------------------


async def _no_beat(self: HeartbeatLoop) -> None:
    """Never extends anything."""


def _no_abort(self: Runner, hold: Hold, reason: str) -> None:
    """Lets a handler go on, whatever happened to its lease."""


def _dropping_flush() -> AbstractContextManager[object]:
    """A settle loop that forgets its batch when the backend does not answer."""
    flush = SettleLoop.flush

    async def dropping(self: SettleLoop) -> None:
        with mock.patch.object(self, "_outage", _Impatient()):
            try:
                await flush(self)
            except BackendUnavailable:
                self._flushed(())

    return mock.patch.object(SettleLoop, "flush", dropping)


class _Impatient:
    """Asks once."""

    async def ride_out(self, call: Callable[[], Any], **options: Any) -> Any:
        return await call()


def _own_clock() -> AbstractContextManager[object]:
    """Workers and clients that go by their own clocks."""

    async def sync(self: BackendClock, samples: int = 3) -> None:
        self._offset = EPOCH - 100_000_000_000
        self._sampled_at = self._monotonic()

    return mock.patch.object(BackendClock, "sync", sync)


class Bug(msgspec.Struct, frozen=True):
    expected: frozenset[str]
    store: type[MemoryStore] = MemoryStore
    sabotage: Callable[[], AbstractContextManager[object]] = nullcontext

    def simulate(self, seed: int) -> Report:
        return simulate(seed, store=self.store, sabotage=self.sabotage())

    def is_found_by(self, seed: int) -> bool:
        broken = {violation.guarantee for violation in self.simulate(seed).violations}
        return bool(broken & self.expected)


def _in_driver(store: type[MemoryStore], *expected: str) -> Bug:
    return Bug(frozenset(expected), store)


def _in_worker(sabotage: Callable[[], AbstractContextManager[object]], *expected: str) -> Bug:
    return Bug(frozenset(expected), sabotage=sabotage)


PLANTED: dict[str, Bug] = {
    "stale token": _in_driver(StaleTokenStore, "staleWorkerChangesNothing"),
    "expired lease": _in_driver(ExpiredLeaseStore, "staleWorkerChangesNothing"),
    "no W": _in_driver(UnlimitedStore, "wNeverExceeded"),
    "early": _in_driver(EarlyStore, "neverEarly"),
    "lazy": _in_driver(LazyStore, "reservableOnceOver"),
    "forgetful": _in_driver(ForgetfulStore, "nothingLost"),
    "same fence": _in_driver(SameFenceStore, "fenceStrictlyIncreasing"),
    "two per key": _in_driver(UnblockedStore, "oneInflightPerKey"),
    "repeating": _in_driver(RepeatingStore, "oneJobPerIdempotencyKey"),
    "silent stall": _in_driver(SilentStore, "failureQueueServed"),
    "no heartbeat": _in_worker(
        lambda: mock.patch.object(HeartbeatLoop, "beat", _no_beat), "healthyWorkersKeepTheirLeases"
    ),
    "deaf handler": _in_worker(
        lambda: mock.patch.object(Runner, "abort", _no_abort), "lostLeaseStopsTheHandler"
    ),
    "dropped batch": _in_worker(_dropping_flush, "outagesLoseNothing"),
    "own clock": _in_worker(_own_clock, "backendTimeHolds"),
}
