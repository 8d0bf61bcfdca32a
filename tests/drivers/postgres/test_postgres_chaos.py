"""Twenty thousand jobs, four workers, and somebody who kills and freezes them and crashes their server.

Afterwards every job has ended once, as its kind is meant to, and the attempt log shows that nothing happened that must not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_worker import QUEUES

from taskharbor.conformance.invariants import check_no_overlap, most_at_once, spans
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.errors import BackendUnavailable
from taskharbor.ids import new_ids
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome
from taskharbor.spark.audit import audit_store
from taskharbor.testing.servers import PostgresServer, with_fresh_schema

SEED = "TASKHARBOR_POSTGRES_CHAOS_SEED"
PROGRAM = Path(__file__).with_name("chaos_worker.py")

WORKERS = 4
LIMIT = 5
BATCH = 100
KEYS = 150
CONTENTS = {
    ("plain", "quick"): 15_000,
    ("plain", "slow"): 800,
    ("mixed", "flaky"): 1_500,
    ("mixed", "doomed"): 300,
    ("mixed", "quick"): 1_400,
    ("limited", "quick"): 1_000,
    ("keyed", "quick"): 1_500,
}
"""How many jobs of which type go to which queue."""
BLOWS = ("kill",) * 9 + ("freeze",) * 5 + ("crash",) * 6
FREEZES = 20
"""Tries to freeze a worker while it holds jobs."""

PATIENCE = 120.0


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        await asyncio.sleep(0.05)


async def insist(call: Callable[[], Awaitable[Any]]) -> Any:
    """The same call until somebody answers, as a producer does whose jobs must not get lost."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await call()
        except BackendUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


class Fleet:
    """The workers. Who was killed is replaced by a new one."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._started = 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._started += 1
        name = f"worker-{self._started}"
        with open(self._folder / f"{name}.log", "wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), self._url, name, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.communicate()

    def freeze(self, name: str) -> None:
        process = self.running[name]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGCONT)

    def check(self) -> None:
        """Nobody has left who was not told to."""
        for name, process in self.running.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self._last_words(name)}"

    def dismiss(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self.running.items():
            assert process.wait(30) == 0, f"{name} ended with {process.returncode}: {self._last_words(name)}"

    def executions(self) -> Counter[tuple[str, int]]:
        """Job and fence of every execution that was begun, with how often."""
        noted: Counter[tuple[str, int]] = Counter()
        for file in self._folder.glob("*.notes"):
            lines = [line.split() for line in file.read_text().splitlines()]
            noted.update((job_id, int(fence)) for job_id, fence in lines)
        return noted

    def _last_words(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            for _ in range(WORKERS):
                self.start()
            yield
            self.dismiss()
        finally:
            for process in self.running.values():
                process.kill()
                process.communicate()


def make_batches(rng: random.Random) -> list[list[JobRecord]]:
    """Records without times, in batches of one queue each, well shuffled."""
    per_queue: dict[str, list[JobRecord]] = defaultdict(list)
    for (queue, type), count in CONTENTS.items():
        for job_id in new_ids(count):
            record = JobRecord(
                id=job_id,
                type=type,
                queue=queue,
                payload=b"null",
                run_at_us=0,
                created_at_us=0,
                # Every kill may cost a job a stall: only what is doomed is to die.
                max_attempts=3 if type == "doomed" else 100,
                backoff_min_us=10_000,
                backoff_max_us=100_000,
                priority=rng.choice((0, 0, 0, 5)),
            )
            if queue == "keyed":
                record.key = f"key-{rng.randrange(KEYS)}"
            per_queue[queue].append(record)
    batches: list[list[JobRecord]] = []
    for queued in per_queue.values():
        rng.shuffle(queued)
        batches += [queued[start : start + BATCH] for start in range(0, len(queued), BATCH)]
    rng.shuffle(batches)
    return batches


class Chaos:
    def __init__(self, url: str, server: PostgresServer, fleet: Fleet, seed: int) -> None:
        self._rng = random.Random(seed)
        self._server = server
        self._fleet = fleet
        self._driver = PostgresDriver.from_url(url)
        self._reading = self._driver.clone()
        self._batches = make_batches(self._rng)
        self._blows = self._rng.sample(BLOWS, len(BLOWS))
        self._struck = 0
        self._sent = 0
        self._is_sent = False
        self._is_over = False
        self.frozen_at_work = 0
        self.answered: set[str] = set()
        self.told: list[Attempt] = []
        """The log as a reader saw it that was there all the time."""

    async def run(self) -> None:
        async with self._driver, self._reading:
            await self._driver.configure(
                "limited", QueueSettings(max_inflight=LIMIT), now=await self._driver.time()
            )
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
            await until(lambda share=share: self._struck >= share, f"blow {share}")
            now: Micros = await insist(self._driver.time)
            for record in batch:
                record.created_at_us = now
                late = record.type == "quick" and self._rng.random() < 0.03
                record.run_at_us = now + (self._rng.randrange(2_000_000) if late else 0)
            answers = await insist(lambda batch=batch, now=now: self._driver.enqueue(batch, now=now))
            self.answered |= {one.id for one in answers}
            self._sent += len(batch)
        self._is_sent = True

    async def _strike(self) -> None:
        """Each blow falls somewhere in its share, with at least half of what was sent so far done."""
        shares = len(self._blows) + 1
        total = sum(map(len, self._batches))
        for place, blow in enumerate(self._blows):
            enough = int(total * (place + self._rng.uniform(0.1, 0.9)) / shares)
            await until(
                lambda enough=enough: self._has_come_to(enough), f"{enough} jobs sent, half of them done"
            )
            self._fleet.check()
            if blow == "crash":
                await asyncio.to_thread(self._server.restart, "immediate")
            else:
                await getattr(self, f"_{blow}")(self._rng.choice(sorted(self._fleet.running)))
            self._struck += 1

    async def _kill(self, name: str) -> None:
        self._fleet.kill(name)
        self._fleet.start()

    async def _freeze(self, name: str) -> None:
        """In the middle of something, and until others have all that it held: as long as its leases last."""
        for _ in range(FREEZES):
            self._fleet.freeze(name)
            if not await self._holds_nothing(name):
                self.frozen_at_work += 1
                break
            self._fleet.thaw(name)
        try:
            await until(lambda: self._holds_nothing(name), f"the end of what {name} held")
        finally:
            self._fleet.thaw(name)

    async def _holds_nothing(self, name: str) -> bool:
        selection = JobFilter(worker=name, states=frozenset({JobState.INFLIGHT}))
        now = await insist(self._driver.time)
        return not (await insist(lambda: self._driver.list_jobs(selection, now=now, limit=1))).jobs

    async def _has_come_to(self, sent: int) -> bool:
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
            page = await insist(lambda cursor=cursor: self._reading.read_attempts(after=cursor, limit=500))
            cursor = page.cursor
            self.told += page.attempts
            if not page.attempts:
                if was_over:
                    return
                await asyncio.sleep(0.05)

    # -- afterwards ---------------------------------------------------------------------------------------

    async def _check(self) -> None:
        attempts = await self._whole_log()
        assert self.told == attempts
        jobs = await self._all_jobs()
        check_jobs(jobs, self.answered)
        now = await self._driver.time()
        for stats in await self._driver.stats(now=now):
            states = Counter(job.state for job in jobs if job.queue == stats.queue)
            assert {state: count for state, count in stats.counts.items() if count} == states
            totals = (stats.done_total, stats.dead_total, stats.cancelled_total)
            assert totals == (states[JobState.DONE], states[JobState.DEAD], states[JobState.CANCELLED])
        check_log(jobs, attempts)
        check_executions(attempts, self._fleet.executions())

    async def _whole_log(self) -> list[Attempt]:
        attempts: list[Attempt] = []
        cursor: str | None = None
        while True:
            page = await self._driver.read_attempts(after=cursor, limit=5000)
            if not page.attempts:
                return attempts
            attempts += page.attempts
            cursor = page.cursor

    async def _all_jobs(self) -> list[JobRecord]:
        jobs: list[JobRecord] = []
        cursor: str | None = None
        now = await self._driver.time()
        while True:
            page = await self._driver.list_jobs(JobFilter(), now=now, limit=1000, cursor=cursor)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                return jobs


def check_jobs(jobs: Sequence[JobRecord], answered: set[str]) -> None:
    assert len({job.id for job in jobs}) == len(jobs)
    assert {job.id for job in jobs} == answered
    for job in jobs:
        assert job.state in MEANT[job.type, job.queue], job
        # Only who waits behind another of its key is ever merged into it.
        assert (job.state is JobState.CANCELLED) == (job.merged_into is not None), job


MEANT = {
    (type, queue): {JobState.DEAD if type == "doomed" else JobState.DONE} for queue, type in CONTENTS
} | {("quick", "keyed"): {JobState.DONE, JobState.CANCELLED}}


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


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
def test_chaos_loses_and_doubles_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    assert {queue for queue, _ in CONTENTS} == set(QUEUES)
    with PostgresServer.start(durable=True) as server:
        url = with_fresh_schema(server.url)
        chaos = Chaos(url, server, Fleet(url, tmp_path), seed)
        asyncio.run(chaos.run())
        # Started only now: Java would take its share of the machine while workers are frozen and killed.
        audited = audit_store(request.getfixturevalue("spark"), url)
        deadlocks = server.log.read_text(errors="replace").count("deadlock detected")
    outcomes = Counter(row.outcome for row in chaos.told)
    print({str(outcome): count for outcome, count in outcomes.items()}, f"{deadlocks} deadlocks")
    assert audited.rows == len(chaos.told)
    assert audited.is_clean, audited
    assert chaos.frozen_at_work > 0
    assert outcomes[Outcome.EXPIRED] > 0
    assert outcomes[Outcome.RETRIED] > 0
