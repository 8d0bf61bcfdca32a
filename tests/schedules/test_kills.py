"""Real workers that are killed while they make the jobs of schedules.

`TASKHARBOR_SCHEDULE_KILLS` says how often, on each driver.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedules import beating_app
from taskharbor import AsyncClient, JobFilter, JobState, Outcome
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Attempt, JobRecord, Micros, to_micros
from taskharbor.schedules import QUEUE
from taskharbor.schedules.tick_ids import parse_tick_id
from taskharbor.schedules.ticking import OPEN_STATES
from taskharbor_testkit.conformance.snapshot import list_all, read_log

KILLS = int(os.environ.get("TASKHARBOR_SCHEDULE_KILLS", "24"))
SEED = "TASKHARBOR_SCHEDULE_KILL_SEED"
WORKERS = 3
PATIENCE = 120.0


class Nursery:
    """Workers that are forked from one process."""

    def __init__(self, url: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, beating_app.__file__, url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self._started = 0
        self.running: list[int] = []

    def start(self) -> None:
        self._started += 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(f"worker-{self._started}", file=self._process.stdin, flush=True)
        self.running.append(int(self._process.stdout.readline()))

    def kill(self, pid: int) -> None:
        self.running.remove(pid)
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def check(self) -> None:
        """Nobody has left by itself."""
        for pid in self.running:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                raise AssertionError(self._log.read_text(errors="replace")[-3000:]) from None


@contextmanager
def nursery(url: str, log: Path) -> Iterator[Nursery]:
    made = Nursery(url, log)
    try:
        yield made
    finally:
        made.close()


async def until(condition: Callable[[], Awaitable[bool]], workers: Nursery, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        workers.check()
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.05)


class Kills:
    """Kills workers at random moments, then waits until all ticks of the time are made."""

    def __init__(self, client: AsyncClient, workers: Nursery, chance: random.Random) -> None:
        self._client, self._workers, self._chance = client, workers, chance
        self.count = 0

    async def run(self) -> Micros:
        """Returns the instant up to which all ticks must be there."""
        for _ in range(WORKERS):
            self._workers.start()
        await until(self._are_declared, self._workers, "the first tick of each schedule")
        while self.count < KILLS:
            await asyncio.sleep(self._pause())
            self._workers.check()
            count = self._chance.choice((1, 1, 2, WORKERS, WORKERS))
            for pid in self._chance.sample(self._workers.running, count):
                self._workers.kill(pid)
            for _ in range(count):
                self._workers.start()
            self.count += count
        end = await self._client.driver.time()
        await until(lambda: self._are_beyond(end), self._workers, "the last tick")
        return end

    def _pause(self) -> float:
        """Mostly until shortly after an instant at which a schedule is due, when somebody works on it."""
        pause = self._chance.uniform(0.2, 0.8)
        if self._chance.random() < 0.2:
            return pause
        at = time.time() + pause
        return pause + beating_app.OFFSET - at % 1 % beating_app.OFFSET + self._chance.expovariate(1 / 0.015)

    async def own(self) -> list[JobRecord]:
        """The schedules. What several workers declared at once is merged into one."""
        page = await self._client.list_jobs(JobFilter(queue=QUEUE, states=OPEN_STATES), limit=1000)
        return page.jobs

    async def _are_declared(self) -> bool:
        own = await self.own()
        return len(own) == beating_app.COUNT and all(job.run_at_us > job.created_at_us for job in own)

    async def _are_beyond(self, end: Micros) -> bool:
        return all(job.run_at_us > end and job.state is JobState.SCHEDULED for job in await self.own())


def story(own: JobRecord, log: Sequence[Attempt], lost: set[Micros]) -> str:
    """What happened to a schedule around its first lost tick."""
    at = min(lost)
    rows = [
        f"{row.outcome} by {row.worker}: run_at {row.run_at_us}, leased {row.reserved_at_us}, ended {row.ended_at_us}"
        for row in log
        if row.job_id == own.id and abs(row.ended_at_us - at) < 5 * SECOND
    ]
    return "\n".join([f"{own.key}: lost {sorted(lost)}, made at {own.created_at_us}", *rows])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(120 + 3 * KILLS)
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
async def test_killed_workers_lose_and_double_no_tick(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    url = f"sqlite:///{tmp_path}/jobs.db" if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    async with AsyncClient(connect(url)) as client:
        with nursery(url, tmp_path / "workers.log") as workers:
            kills = Kills(client, workers, random.Random(seed))
            end = await kills.run()
        own = {job.key: job for job in await kills.own()}
        now = await client.driver.time()
        jobs = await list_all(client.driver, JobFilter(queue="beats"), now)
        log = (await read_log(client.driver, limit=5000)).attempts
    made: defaultdict[str, Counter[Micros]] = defaultdict(Counter)
    for job in jobs:
        parsed = parse_tick_id(job.id)
        assert parsed is not None
        made[parsed.name][to_micros(parsed.at)] += 1
    total = 0
    for number in range(beating_app.COUNT):
        name = f"s{number}"
        offset = round(number * beating_app.OFFSET * SECOND)
        first = own[name].created_at_us
        expected = {
            second * SECOND + offset
            for second in range(first // SECOND - 1, end // SECOND + 1)
            if first <= second * SECOND + offset <= end
        }
        assert {tick for tick, count in made[name].items() if count != 1} == set()
        lost = expected - made[name].keys()
        assert not lost, story(own[name], log, lost)
        # Before that: another worker declared it a moment earlier, by its own clock.
        assert {
            tick for tick in made[name].keys() - expected if first - SECOND > tick or first <= tick <= end
        } == set()
        total += len(expected)
    done = Counter(row.job_id for row in log if row.outcome is Outcome.DONE)
    assert {job_id for job_id, count in done.items() if count > 1} == set()
    cut = sum(row.outcome is Outcome.EXPIRED and row.queue == QUEUE for row in log)
    print(
        f"{kind}: {kills.count} kills, {total} ticks, {cut} leases of schedules cut off, {len(done)} jobs done"
    )
    # Few kills may all miss.
    assert cut or KILLS < 100
