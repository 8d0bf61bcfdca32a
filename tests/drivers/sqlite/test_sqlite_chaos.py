"""Worker processes on one file, killed with SIGKILL at random moments: what was answered holds, and nothing happens twice.

The conformance kit kills producers.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from chaos.batches import fewer
from chaos.fleet import Fleet
from chaos.story import Chaos
from drivers.sqlite.conftest import Query
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.jobs import Outcome

SEED = "TASKHARBOR_SQLITE_CHAOS_SEED"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kills", "fewer_by"), [(12, 10), pytest.param(60, 2, marks=pytest.mark.slow)])
def test_kills_lose_nothing(
    path: Path, driver: SQLiteDriver, query: Query, kills: int, fewer_by: int
) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    fleet = Fleet(f"sqlite:///{path}", path.parent)
    chaos = Chaos(driver, lambda: None, fleet, seed, contents=fewer(fewer_by), blows=("kill",) * kills)
    asyncio.run(chaos.run())
    outcomes = Counter(row.outcome for row in chaos.told)
    # A few kills may all miss: many show that they meet jobs that run.
    assert kills < 60 or min(outcomes[Outcome.EXPIRED], outcomes[Outcome.RETRIED]) > 0
    assert query("PRAGMA integrity_check") == [("ok",)]
