"""Twenty thousand jobs, four workers, and somebody who kills and freezes them and crashes their Redis.

The server is killed by SIGKILL and writes its append-only file with `appendfsync always`: what it answered is in the file. (With
`everysec` a killed server loses nothing either, as the operating system has what was written; only a power cut tells them apart.)
"""

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
from taskharbor.drivers.redis import RedisDriver
from taskharbor.jobs import Outcome
from taskharbor.spark.audit import audit_store
from taskharbor_testkit.servers import RedisServer

SEED = "TASKHARBOR_REDIS_CHAOS_SEED"


@pytest.mark.slow
@pytest.mark.xdist_group("spark")  # Its session judges the log.
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
@pytest.mark.timeout(600)
def test_chaos_loses_and_doubles_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    assert {queue for queue, _ in CONTENTS} == set(QUEUES)
    with RedisServer.start(appendonly=True, fsync="always") as server:

        def crash() -> None:
            server.kill()
            server.restart()

        chaos = Chaos(RedisDriver.from_url(server.url), crash, Fleet(server.url, tmp_path), seed)
        asyncio.run(chaos.run())
        # Started only now: Java would take its share of the machine while workers are frozen and killed.
        audited = audit_store(request.getfixturevalue("spark"), server.url)
    outcomes = Counter(row.outcome for row in chaos.told)
    print({str(outcome): count for outcome, count in outcomes.items()})
    assert audited.rows == len(chaos.told)
    assert audited.is_clean, audited
    assert chaos.frozen_at_work > 0
    assert outcomes[Outcome.EXPIRED] > 0
    assert outcomes[Outcome.RETRIED] > 0
