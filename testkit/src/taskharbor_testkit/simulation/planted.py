"""Bugs on purpose. A simulation that finds none of them would prove nothing by finding none elsewhere.

Each is a mistake somebody has shipped: in a driver (a planted bug of the conformance kit) or in a worker (one method
replaced for the time of a run). `expected` names the guarantees of which at least one must be seen broken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import msgspec

from taskharbor.clock import BackendClock
from taskharbor.errors import BackendUnavailable
from taskharbor.worker.heartbeat import HeartbeatLoop
from taskharbor.worker.hold import Hold
from taskharbor.worker.run import Runner
from taskharbor.worker.settle import SettleLoop
from taskharbor_testkit.model import Model
from taskharbor_testkit.planted import leasing, producing, settling
from taskharbor_testkit.simulation.backend import model_driver
from taskharbor_testkit.simulation.report import Report, simulate
from taskharbor_testkit.simulation.scheduler import EPOCH


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
    store: type[Model] = Model
    sabotage: Callable[[], AbstractContextManager[object]] = nullcontext

    def simulate(self, seed: int) -> Report:
        return simulate(
            seed, make_driver=lambda clock: model_driver(clock, self.store), sabotage=self.sabotage()
        )

    def is_found_by(self, seed: int) -> bool:
        broken = {violation.guarantee for violation in self.simulate(seed).violations}
        return bool(broken & self.expected)


def _in_driver(store: type[Model], *expected: str) -> Bug:
    return Bug(frozenset(expected), store)


def _in_worker(sabotage: Callable[[], AbstractContextManager[object]], *expected: str) -> Bug:
    return Bug(frozenset(expected), sabotage=sabotage)


PLANTED: dict[str, Bug] = {
    "stale token": _in_driver(leasing.StaleTokenAccepted, "staleWorkerChangesNothing"),
    "expired lease": _in_driver(leasing.ExpiredSettlementAccepted, "staleWorkerChangesNothing"),
    "no W": _in_driver(leasing.MaxInflightOvershot, "wNeverExceeded"),
    "early": _in_driver(leasing.ScheduledRunsEarly, "neverEarly"),
    "lazy": _in_driver(leasing.ReserveDoesNotReclaim, "reservableOnceOver"),
    "forgetful": _in_driver(leasing.LostOnReclaim, "nothingLost"),
    "same fence": _in_driver(leasing.FenceNotIncreased, "fenceStrictlyIncreasing"),
    "two per key": _in_driver(producing.TwoInflightPerKey, "oneInflightPerKey"),
    "repeating": _in_driver(producing.IdempotencyKeyForgottenAtEnd, "oneJobPerIdempotencyKey"),
    "silent stall": _in_driver(settling.FailureQueueMissesStalls, "failureQueueServed"),
    "no heartbeat": _in_worker(
        lambda: mock.patch.object(HeartbeatLoop, "beat", _no_beat), "healthyWorkersKeepTheirLeases"
    ),
    "deaf handler": _in_worker(
        lambda: mock.patch.object(Runner, "abort", _no_abort), "lostLeaseStopsTheHandler"
    ),
    "dropped batch": _in_worker(_dropping_flush, "outagesLoseNothing"),
    "own clock": _in_worker(_own_clock, "backendTimeHolds"),
}
