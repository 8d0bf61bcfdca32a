"""The storm over a folder: once through two brokers that are killed and frozen too, and once with all workers writing to it.

A folder stands for any object store: what is driven over is the same code, only the writes are quicker.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from chaos.batches import Contents, fewer
from chaos.brokers import BrokerPair, is_locked
from chaos.fleet import Fleet
from chaos.story import Chaos
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.jobs import Outcome
from taskharbor.spark.audit import audit_store

SEED = "TASKHARBOR_OBJECTSTORE_CHAOS_SEED"
TERM = 1.0
THROUGH_BROKERS: Contents = fewer(4)
DIRECTLY: Contents = {**fewer(5), ("plain", "slow"): 600}

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")


def new_seed() -> int:
    seed = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"replay with {SEED}={seed}")
    return seed


def check_story(chaos: Chaos) -> None:
    outcomes = Counter(row.outcome for row in chaos.told)
    print({str(outcome): count for outcome, count in outcomes.items()})
    assert chaos.frozen_at_work > 0
    assert outcomes[Outcome.EXPIRED] > 0
    assert outcomes[Outcome.RETRIED] > 0


@pytest.mark.xdist_group("spark")  # Its session judges the log.
@pytest.mark.timeout(400)
def test_chaos_through_two_brokers_loses_and_doubles_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = new_seed()
    store = f"file://{tmp_path}/store"
    pair = BrokerPair(store, term=TERM)
    with pair.at_work():
        pair.leader()
        strikes = itertools.cycle((pair.kill_leader, pair.freeze_leader))
        chaos = Chaos(
            HttpDriver.from_url(pair.url),
            lambda: next(strikes)(),
            Fleet(pair.url, tmp_path),
            seed,
            contents=THROUGH_BROKERS,
            blows=("kill",) * 5 + ("freeze",) * 3 + ("crash",) * 4,
        )
        asyncio.run(chaos.run())
    check_story(chaos)
    assert len(chaos.answered) >= 5000
    assert (pair.killed_leaders, pair.frozen_leaders) == (2, 2)
    # Started only now: Java would take its share of the machine while workers are frozen and killed.
    audited = audit_store(request.getfixturevalue("spark"), store)
    assert audited.rows == len(chaos.told)
    assert audited.is_clean, audited


def test_chaos_of_many_writers_without_a_broker_loses_and_doubles_nothing(tmp_path: Path) -> None:
    seed = new_seed()
    store = f"file://{tmp_path}/store"
    chaos = Chaos(
        ObjectStoreDriver.from_url(store),
        lambda: None,
        Fleet(store, tmp_path),
        seed,
        contents=DIRECTLY,
        blows=("kill",) * 5 + ("freeze",) * 3,
        # Whoever is frozen with a lock in its hands stops everybody: that is what a folder's limits are.
        is_held_up=lambda: is_locked(store),
    )
    asyncio.run(chaos.run())
    check_story(chaos)
