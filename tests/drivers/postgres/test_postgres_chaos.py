"""Twenty thousand jobs, four workers, and somebody who kills and freezes them and crashes their PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from chaos.batches import CONTENTS
from chaos.chaos_program import QUEUES
from chaos.fleet import Fleet
from chaos.story import Chaos
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import Outcome
from taskharbor.spark.audit import audit_store
from taskharbor_testkit.servers import PostgresServer, with_fresh_schema

SEED = "TASKHARBOR_POSTGRES_CHAOS_SEED"


@pytest.mark.slow
@pytest.mark.xdist_group("spark")  # Its session judges the log.
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
@pytest.mark.timeout(600)
def test_chaos_loses_and_doubles_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    assert {queue for queue, _ in CONTENTS} == set(QUEUES)
    with PostgresServer.start(durable=True) as server:
        url = with_fresh_schema(server.url)
        driver, fleet = PostgresDriver.from_url(url), Fleet(url, tmp_path)
        chaos = Chaos(driver, lambda: server.restart("immediate"), fleet, seed)
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
