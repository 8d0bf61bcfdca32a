"""Thousands of jobs, four workers, and somebody who kills and freezes them and crashes their server.

Afterwards every job has ended once, as its kind is meant to, and the attempt log shows that nothing happened that must not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

from chaos.batches import BATCH, CONTENTS, LASTING, LIMIT, Contents, make_batches, make_job
from chaos.fleet import Fleet
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Attempt, JobRecord, JobState, Outcome
from taskharbor.requests import new_ids
from taskharbor_testkit.conformance.invariants import check_no_overlap, most_at_once, spans
from taskharbor_testkit.conformance.snapshot import list_all, read_log

T = TypeVar("T")

BLOWS = ("kill",) * 9 + ("freeze",) * 5 + ("crash",) * 6
FREEZES = 20
"""Tries to freeze a worker while it holds jobs."""

PATIENCE = 120.0

MEANT = {
    (type, queue): {JobState.DEAD if type == "doomed" else JobState.DONE}
    for queue, type in (*CONTENTS, LASTING)
} | {("quick", "keyed"): {JobState.DONE, JobState.CANCELLED}}


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        await asyncio.sleep(0.05)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """The same call until somebody answers, as a producer does whose jobs must not get lost."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await call()
        except BackendUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


class Chaos:
    def __init__(
        self,
        driver: Driver,
        crash: Callable[[], None],
        fleet: Fleet,
        seed: int,
        *,
        contents: Contents = CONTENTS,
        blows: Sequence[str] = BLOWS,
        is_held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_held_up`: whether who was just frozen has something that all others need, so that nothing would go on."""
        self._rng = random.Random(seed)
        self._crash = crash
        """Ends the server as hard as can be without losing what it answered, and starts it again."""
        self._is_held_up = is_held_up
        self._fleet, self._driver, self._reading = fleet, driver, driver.clone()
        self._batches = make_batches(self._rng, contents)
        self._blows = self._rng.sample(blows, len(blows))
        self._struck = self._sent = self.frozen_at_work = 0
        self._is_over = False
        self.answered: set[str] = set()
        self.told: list[Attempt] = []
        """The log as a reader saw it that was there all the time."""

    async def run(self) -> None:
        async with self._driver, self._reading:
            limited, now = QueueSettings(max_inflight=LIMIT), await self._driver.time()
            await self._driver.configure("limited", limited, now=now)
            with self._fleet.at_work():
                reading = asyncio.ensure_future(self._read())
                try:
                    await asyncio.gather(self._produce(), self._strike())
                    try:
                        await until(self._is_all_ended, "the end of every job")
                    except AssertionError as never:
                        raise AssertionError(f"{never}; the store: {await self._stats()}") from None
                    self._is_over = True
                    await reading
                finally:
                    reading.cancel()
            await self._check()

    # -- while it lasts -----------------------------------------------------------------------------------

    async def _produce(self) -> None:
        """A share of the batches for every blow, so that each of them falls on workers that have something to lose."""
        for place, batch in enumerate(self._batches):
            share = place * (len(self._blows) + 1) // len(self._batches)
            await until(partial(self._has_struck, share), f"blow {share}")
            await self._send(batch)

    async def _send(self, batch: list[JobRecord]) -> None:
        now = await insist(self._driver.time)
        for record in batch:
            record.created_at_us = now
            late = record.type == "quick" and self._rng.random() < 0.03
            record.run_at_us = now + (self._rng.randrange(2_000_000) if late else 0)
        answers = await insist(partial(self._driver.enqueue, batch, now=now))
        self.answered |= {one.id for one in answers}
        self._sent += len(batch)

    async def _strike(self) -> None:
        """Each blow falls somewhere in its share, with at least half of what was sent so far done."""
        shares = len(self._blows) + 1
        total = sum(map(len, self._batches))
        for place, blow in enumerate(self._blows):
            enough = int(total * (place + self._rng.uniform(0.1, 0.9)) / shares)
            await until(partial(self._has_come_to, enough), f"{enough} jobs sent, half of them done")
            self._fleet.check()
            if blow == "crash":
                await asyncio.to_thread(self._crash)
            else:
                await getattr(self, f"_{blow}")(self._rng.choice(sorted(self._fleet.running)))
            self._struck += 1

    async def _kill(self, name: str) -> None:
        self._fleet.kill(name)
        self._fleet.start()

    async def _freeze(self, name: str) -> None:
        """In the middle of something, and until others have all that it held: as long as its leases last."""
        for _ in range(FREEZES):
            if not await self._busy_workers():
                # Jobs that keep every worker busy for a while, so that it can be frozen at work.
                await self._send([make_job(job_id, *LASTING) for job_id in new_ids(20)])
                await until(self._is_anybody_busy, "somebody works")
            name = self._rng.choice(await self._busy_workers() or [name])
            self._fleet.freeze(name)
            if not await asyncio.to_thread(self._is_held_up) and not await self._holds_nothing(name):
                self.frozen_at_work += 1
                break
            self._fleet.thaw(name)
        else:
            return
        try:
            await until(lambda: self._holds_nothing(name), f"the end of what {name} held")
        finally:
            self._fleet.thaw(name)

    async def _is_anybody_busy(self) -> bool:
        return bool(await self._busy_workers())

    async def _busy_workers(self) -> list[str]:
        now = await insist(self._driver.time)
        selection = JobFilter(states=frozenset({JobState.INFLIGHT}))
        held = await insist(lambda: self._driver.list_jobs(selection, now=now, limit=100))
        return sorted(self._fleet.running.keys() & {job.worker for job in held.jobs})

    async def _holds_nothing(self, name: str) -> bool:
        selection = JobFilter(worker=name, states=frozenset({JobState.INFLIGHT}))
        now = await insist(self._driver.time)
        return not (await insist(lambda: self._driver.list_jobs(selection, now=now, limit=1))).jobs

    def _has_struck(self, blows: int) -> bool:
        return self._struck >= blows

    async def _has_come_to(self, sent: int) -> bool:
        self._fleet.check()
        if self._sent < sent - BATCH:
            return False
        stats = await self._stats()
        ended = sum(count for counts in stats for state, count in counts.items() if state.is_terminal)
        return ended >= self._sent // 2

    async def _stats(self) -> list[dict[JobState, int]]:
        now = await insist(self._driver.time)
        return [queue.counts for queue in await insist(lambda: self._driver.stats(now=now))]

    async def _is_all_ended(self) -> bool:
        self._fleet.check()
        stats = await self._stats()
        return not any(count for counts in stats for state, count in counts.items() if not state.is_terminal)

    async def _read(self) -> None:
        """Follow the log, through every crash, from where the last page ended."""
        cursor: str | None = None
        while True:
            was_over = self._is_over
            page = await insist(partial(self._reading.read_attempts, after=cursor, limit=500))
            cursor = page.cursor
            self.told += page.attempts
            if not page.attempts:
                if was_over:
                    return
                await asyncio.sleep(0.05)

    # -- afterwards ---------------------------------------------------------------------------------------

    async def _check(self) -> None:
        attempts = (await insist(partial(read_log, self._driver, limit=5000))).attempts
        # Across queues a log may have any order; of a job, only its own.
        of_job = attrgetter("job_id")
        assert sorted(self.told, key=of_job) == sorted(attempts, key=of_job)
        now = await insist(self._driver.time)
        jobs = await insist(partial(list_all, self._driver, JobFilter(), now))
        check_jobs(jobs, self.answered)
        for stats in await insist(lambda: self._driver.stats(now=now)):
            states = Counter(job.state for job in jobs if job.queue == stats.queue)
            assert {state: count for state, count in stats.counts.items() if count} == states
            totals = (stats.done_total, stats.dead_total, stats.cancelled_total)
            assert totals == (states[JobState.DONE], states[JobState.DEAD], states[JobState.CANCELLED])
        check_log(jobs, attempts)
        check_executions(attempts, self._fleet.executions())


# -- what must be true of every job, and of the whole log, when it is over ----------------------------------------------


def check_jobs(jobs: Sequence[JobRecord], answered: set[str]) -> None:
    assert len({job.id for job in jobs}) == len(jobs)
    assert {job.id for job in jobs} == answered
    for job in jobs:
        assert job.state in MEANT[job.type, job.queue], job
        # Only who waits behind another of its key is ever merged into it.
        assert (job.state is JobState.CANCELLED) == (job.merged_into is not None), job


def check_log(jobs: Sequence[JobRecord], attempts: Sequence[Attempt]) -> None:
    assert len({row.seq for row in attempts}) == len(attempts)
    rows: defaultdict[str, list[Attempt]] = defaultdict(list)
    for row in sorted(attempts, key=lambda row: row.seq):
        rows[row.job_id].append(row)
    assert rows.keys() == {job.id for job in jobs}
    for job in jobs:
        of_job = rows[job.id]
        # Every lease that was granted has left one row, in the order of their fences.
        leased = [row for row in of_job if row.reserved_at_us is not None]
        assert [row.fence for row in leased] == list(range(1, job.fence + 1)), of_job
        assert [row.state.is_terminal for row in of_job] == [False] * (len(of_job) - 1) + [True], of_job
        assert of_job[-1].state is job.state
        outcomes = Counter(row.outcome for row in of_job)
        assert job.stalls == outcomes[Outcome.EXPIRED], of_job
        assert job.attempts == outcomes[Outcome.RETRIED] + outcomes[Outcome.DEAD], of_job
        for row in leased:
            assert row.reserved_at_us is not None
            assert row.reserved_at_us >= row.run_at_us >= row.created_at_us, row
    leases = spans(attempts, ())
    check_no_overlap(leases)
    limited = {job.id for job in jobs if job.queue == "limited"}
    assert most_at_once(lease for lease in leases if lease.job_id in limited) == LIMIT


def check_executions(attempts: Sequence[Attempt], executions: Counter[tuple[str, int]]) -> None:
    """Each was begun once and under a lease of its own; whatever ended by its handler had been begun."""
    assert [lease for lease, times in executions.items() if times > 1] == []
    leases = {(row.job_id, row.fence) for row in attempts if row.reserved_at_us is not None}
    assert executions.keys() <= leases
    by_handler = (Outcome.DONE, Outcome.RETRIED, Outcome.DEAD)
    assert {(row.job_id, row.fence) for row in attempts if row.outcome in by_handler} <= executions.keys()
