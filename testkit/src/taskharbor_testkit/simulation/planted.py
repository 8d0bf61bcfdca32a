"""Bugs on purpose. A simulation that finds none of them would prove nothing by finding none elsewhere.

Each is a mistake somebody has shipped: in a driver (a planted bug of the conformance kit) or in a worker (one method
replaced for the time of a run).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import msgspec

from taskharbor.clock import BackendClock
from taskharbor.errors import BackendUnavailable
from taskharbor.worker.backend_loop import HeartbeatLoop
from taskharbor.worker.run import Hold, Runner
from taskharbor.worker.settle import SettleLoop
from taskharbor_testkit.model import Model
from taskharbor_testkit.planted import leasing, producing, settling
from taskharbor_testkit.simulation.backend import model_driver
from taskharbor_testkit.simulation.scheduler import EPOCH
from taskharbor_testkit.simulation.world import Report, simulate


async def _no_beat(self: HeartbeatLoop) -> None:
    """Never extends a lease."""


def _no_abort(self: Runner, hold: Hold, reason: str) -> None:
    """Lets a handler go on, whatever happened to its lease."""


_flush = SettleLoop.flush


async def _dropping_flush(self: SettleLoop) -> None:
    """Forgets its batch when the backend does not answer."""
    with mock.patch.object(self, "_outage", _Impatient()):
        try:
            await _flush(self)
        except BackendUnavailable:
            self._flushed(())


class _Impatient:
    """Asks once."""

    async def ride_out(self, call: Callable[[], Any], **options: Any) -> Any:
        return await call()


async def _no_sync(self: BackendClock, samples: int = 3) -> None:
    """Goes by the machine's own clock."""
    self._offset = EPOCH - 100_000_000_000
    self._sampled_at = self._monotonic()


class Bug(msgspec.Struct, frozen=True):
    guarantee: str
    """The guarantee that it breaks."""
    store: type[Model] = Model
    replaced: tuple[type, str, Callable[..., Any]] | None = None
    """A class of the worker, the name of a method, and the method with the bug."""

    def simulate(self, seed: int) -> Report:
        with nullcontext() if self.replaced is None else mock.patch.object(*self.replaced):
            return simulate(seed, lambda clock: model_driver(clock, self.store))

    def is_found_by(self, seed: int) -> bool:
        return self.guarantee in self.simulate(seed).violations


PLANTED: dict[str, Bug] = {
    "stale token": Bug("staleWorkerChangesNothing", leasing.StaleTokenAccepted),
    "expired lease": Bug("staleWorkerChangesNothing", leasing.ExpiredSettlementAccepted),
    "no W": Bug("wNeverExceeded", leasing.MaxInflightOvershot),
    "early": Bug("neverEarly", leasing.ScheduledRunsEarly),
    "lazy": Bug("reservableOnceOver", leasing.ReserveDoesNotReclaim),
    "forgetful": Bug("nothingLost", leasing.LostOnReclaim),
    "same fence": Bug("fenceStrictlyIncreasing", leasing.FenceNotIncreased),
    "two per key": Bug("oneInflightPerKey", producing.TwoInflightPerKey),
    "repeating": Bug("oneJobPerIdempotencyKey", producing.IdempotencyKeyForgottenAtEnd),
    "silent stall": Bug("failureQueueServed", settling.FailureQueueMissesStalls),
    "no heartbeat": Bug("healthyWorkersKeepTheirLeases", replaced=(HeartbeatLoop, "beat", _no_beat)),
    "deaf handler": Bug("lostLeaseStopsTheHandler", replaced=(Runner, "abort", _no_abort)),
    "dropped batch": Bug("outagesLoseNothing", replaced=(SettleLoop, "flush", _dropping_flush)),
    "own clock": Bug("backendTimeHolds", replaced=(BackendClock, "sync", _no_sync)),
}
