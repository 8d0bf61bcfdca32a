"""Processes killed with SIGKILL at random moments: what was answered holds, and nothing happens twice."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskharbor.drivers.contract import Ack
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.jobs import JobState, Outcome

Query = Callable[..., list[tuple[Any, ...]]]

NURSERY = Path(__file__).with_name("crash_nursery.py")
SEED = "TASKHARBOR_SQLITE_CRASH_SEED"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_lose_and_double_nothing(driver: SQLiteDriver, path: Path, query: Query, kills: int) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    command = [sys.executable, str(NURSERY), f"sqlite:///{path}", str(kills), str(seed)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert told.returncode == 0, told.stderr[-3000:]
    lines = [line.split() for line in told.stdout.splitlines()]
    assert lines.count(["ready"]) == kills
    accepted = [line[1] for line in lines if line[0] == "accepted"]
    done = [line[1] for line in lines if line[0] == "done"]
    assert min(len(accepted), len(done)) > kills

    assert query("PRAGMA integrity_check") == [("ok",)]
    stored = Counter(job_id for (job_id,) in query("SELECT id FROM jobs"))
    assert [job_id for job_id in accepted if stored[job_id] != 1] == []

    ended = Counter(row[0] for row in query("SELECT job_id FROM attempts WHERE outcome = 0"))
    assert [job_id for job_id in done if ended[job_id] != 1] == []
    assert [job_id for job_id, times in ended.items() if times != 1] == []
    # Each row of the log is a lease of its own, and no fence was granted twice.
    leases = Counter(query("SELECT job_id, fence FROM attempts"))
    assert [lease for lease, times in leases.items() if times != 1] == []

    asyncio.run(_drain(driver))
    assert query("SELECT count(*) FROM jobs WHERE state <> 4") == [(0,)]
    counted = query("SELECT ready, inflight, done, done_total FROM queues")
    assert counted == [(0, 0, len(stored), len(stored))]


async def _drain(driver: SQLiteDriver) -> None:
    """Everything a dead process held comes back and can be finished."""
    now = 1_800_000_000_000_000
    async with driver:
        while jobs := await driver.reserve("q", limit=1000, lease_for=1000, now=now, worker="last"):
            for job in jobs:
                assert job.state is JobState.INFLIGHT
            settled = await driver.settle([Ack(job.id, job.token or "") for job in jobs], now=now)
            assert settled == [None] * len(jobs)
        page = await driver.read_attempts(limit=1)
        assert page.attempts[0].outcome in Outcome
