"""Runs everything that can run, one job after the other, and says what came of it.

Deterministic: by queue name, then in the order a worker would claim. Ends when nothing is runnable, including what
handlers enqueued meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from taskharbor.client import AsyncClient
from taskharbor.clock import FakeClock
from taskharbor.drivers.contract import JobFilter
from taskharbor.harbor import Harbor
from taskharbor.jobs import SECOND, JobState, Micros, Outcome
from taskharbor.testing.execution import Executed, execute, run_here

LEASE: Micros = 3600 * SECOND
"""Long enough for a test that stops in a debugger."""

NAME = "taskharbor-drain"


class DrainReport:
    """Executions in order, counted by how they ended. An execution that was retried counts, and so does its retry."""

    def __init__(self, executed: Sequence[Executed]) -> None:
        self.executed = list(executed)
        self.counts: Counter[Outcome] = Counter(one.outcome for one in executed)

    @property
    def total(self) -> int:
        return len(self.executed)

    @property
    def done(self) -> int:
        return self.counts[Outcome.DONE]

    @property
    def retried(self) -> int:
        """Failed, and waiting for another try."""
        return self.counts[Outcome.RETRIED]

    @property
    def dead(self) -> int:
        return self.counts[Outcome.DEAD]

    @property
    def cancelled(self) -> int:
        return self.counts[Outcome.CANCELLED]

    @property
    def released(self) -> int:
        """Snoozed."""
        return self.counts[Outcome.RELEASED]

    @property
    def errors(self) -> list[BaseException]:
        """What handlers raised, with their tracebacks."""
        return [one.error for one in self.executed if one.error is not None]

    def raise_errors(self) -> None:
        """Raise what handlers raised: the exception itself, or a group where there are several."""
        errors = self.errors
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} executions failed", errors)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        lines = [f"<DrainReport {counts or 'nothing to do'}>"]
        lines += [f"  {one}" for one in self.executed if one.error is not None]
        return "\n".join(lines)


def drain(
    harbor: Harbor,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    limit: int = 10_000,
) -> DrainReport:
    """Run what is runnable in all queues, or in these. From async code: `await drain_async(...)`.

    `with_scheduled` also runs what is due later, retries included, by moving the app's fake clock from one due time to the
    next. A handler's exception ends its job as it would in production and is found in the report
    (`report.errors`, `report.raise_errors()`). More than `limit` executions are taken for an endless loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_here(drain_async(harbor, queues, with_scheduled=with_scheduled, limit=limit))
    raise RuntimeError("drain() would block the running event loop: use `await drain_async(...)`")


async def drain_async(
    harbor: Harbor,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    limit: int = 10_000,
) -> DrainReport:
    """As `drain`, with handlers on the calling event loop."""
    if with_scheduled:
        clock_of(harbor)  # Complain before anything runs.
    executed: list[Executed] = []
    async with AsyncClient(harbor.driver(), clock=harbor.clock) as client:
        while True:
            one = await run_next(harbor, client, queues)
            if one is not None:
                executed.append(one)
                if len(executed) > limit:
                    raise RuntimeError(
                        f"{len(executed)} executions and still not empty; is a job enqueueing itself? "
                        f"The last one was {one}"
                    )
            elif not with_scheduled or not await _step_to_next(harbor, client, queues):
                return DrainReport(executed)


async def run_next(harbor: Harbor, client: AsyncClient, queues: Sequence[str] | None) -> Executed | None:
    """Run the next runnable job, if there is one."""
    for queue in await _names(client, queues):
        now = await client.now()
        leased = await client.driver.reserve(queue, limit=1, lease_for=LEASE, now=now, worker=NAME)
        if leased:
            return await execute(harbor, client, leased[0])
    return None


def clock_of(harbor: Harbor) -> FakeClock:
    if not isinstance(harbor.clock, FakeClock):
        raise RuntimeError(
            "what is scheduled can only be reached with a clock that can be moved: "
            "use memory_store(harbor), or give the app a FakeClock"
        )
    return harbor.clock


async def _names(client: AsyncClient, queues: Sequence[str] | None) -> list[str]:
    if queues is not None:
        return list(queues)
    return [stats.queue for stats in await client.stats()]


async def _step_to_next(harbor: Harbor, client: AsyncClient, queues: Sequence[str] | None) -> bool:
    """Move the clock to when the next scheduled job is due; False where there is none."""
    paused = {stats.queue for stats in await client.stats() if stats.settings.paused}
    due: list[Micros] = []
    cursor: str | None = None
    while True:
        page = await client.list_jobs(
            JobFilter(states=frozenset({JobState.SCHEDULED})), limit=1000, cursor=cursor
        )
        due += [
            job.run_at_us
            for job in page.jobs
            if job.queue not in paused and (queues is None or job.queue in queues)
        ]
        cursor = page.cursor
        if cursor is None:
            break
    if not due:
        return False
    clock = clock_of(harbor)
    clock.advance(timedelta(microseconds=min(due) - clock.now()))
    return True
