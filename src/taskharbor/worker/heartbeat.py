"""The heartbeat loop: keeps the leases of everything this worker holds, in one call for all of them.

It runs beside the backend's other loops and never on the handlers' event loop: a handler that blocks for three
lease times keeps its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from taskharbor.drivers.contract import Extension
from taskharbor.errors import BackendUnavailable, JobError
from taskharbor.jobs import Lease
from taskharbor.worker.fetch import BackendLoop
from taskharbor.worker.run import CANCELLED, LEASE_LOST, Hold

log = logging.getLogger("taskharbor.worker")

_STOOD = "no heartbeat for %.1f s: a handler held the interpreter lock, or this process was stopped"


class HeartbeatLoop(BackendLoop):
    """Extends leases, and hears of those that are lost or asked to stop."""

    async def run(self) -> None:
        pause = interval = self._config.heartbeat
        while True:
            began, longest = self._loop.time(), pause + 2 * interval
            await asyncio.sleep(pause)
            self.assignment.on_heartbeat()
            try:
                # A half-open connection would hang here while leases run out: better to ask again.
                async with asyncio.timeout(interval):
                    await self.beat()
                pause = interval
            except (BackendUnavailable, OSError) as error:
                log.debug("heartbeat failed: %s", error)
                # Sooner than usual: leases are running out meanwhile.
                pause = min(interval, 0.2)
            if (stood := self._loop.time() - began) > longest:
                # The backend alone knows if the leases were lost meanwhile: it is asked again first.
                log.warning(_STOOD, stood)
            else:
                self._drop_expired()

    async def beat(self) -> None:
        """Extend every lease held. What the backend refuses is lost; what was asked to stop is told so."""
        held = [hold for hold in self._holds if not hold.lost and not hold.settling]
        if not held:
            return
        reports = {hold: hold.progress for hold in held}

        def extend(holds: Sequence[Hold]) -> Awaitable[Sequence[Lease | JobError]]:
            extensions = [
                Extension(
                    hold.record.id, hold.token, None if reports[hold] is hold.reported else reports[hold]
                )
                for hold in holds
            ]
            return self._driver.extend_lease(
                extensions, lease_for=self._config.lease_us, now=self._clock.now()
            )

        self.assignment.heartbeat_over.clear()
        try:
            answers = await self._each(extend, held)
            for (hold, report), answer in zip(reports.items(), answers, strict=True):
                if isinstance(answer, JobError):
                    # While the heartbeat was on its way the job may have been settled: then there was nothing left to lose.
                    if not hold.lost and not hold.settling and hold in self._holds:
                        self._lose(hold, f"lost: {answer.detail or answer.reason}")
                    continue
                hold.token = answer.token
                hold.expires_at_us = answer.expires_at_us
                hold.reported = report
                if answer.cancel_requested and hold.settlement is None:
                    self._runner.call(self._runner.abort, hold, CANCELLED)
        finally:
            self.assignment.heartbeat_over.set()

    def _lose(self, hold: Hold, how: str) -> None:
        log.warning("lease of %s %s %s", hold.record.type, hold.record.id, how)
        hold.lost = True
        self._runner.call(self._runner.abort, hold, LEASE_LOST)

    def _drop_expired(self) -> None:
        """During an outage nobody refuses us, but a lease that ran out is over all the same."""
        now = self._clock.now()
        for hold in list(self._holds):
            if not hold.lost and not hold.settling and hold.expires_at_us <= now:
                self._lose(hold, "ran out before it could be extended")
