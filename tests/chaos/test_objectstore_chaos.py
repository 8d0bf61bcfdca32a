"""The storm over an object store: through two brokers that are killed and frozen too, over a folder and over S3, and once with
all workers writing to a folder directly.
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

from chaos.batches import fewer
from chaos.brokers import BrokerPair, is_locked
from chaos.fleet import Fleet
from chaos.story import Chaos
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.jobs import Outcome
from taskharbor.spark.audit import audit_store
from taskharbor_testkit.servers.s3 import fresh_s3_url

SEED = "TASKHARBOR_OBJECTSTORE_CHAOS_SEED"

AUDITED = (pytest.mark.slow, pytest.mark.xdist_group("spark"))
"""A Spark session judges the log as well."""

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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "fewer_by", "rounds"),
    [("file", 20, 1), pytest.param("file", 4, 2, marks=AUDITED), pytest.param("s3", 10, 2, marks=AUDITED)],
)
def test_chaos_through_two_brokers_loses_and_doubles_nothing(
    kind: str, fewer_by: int, rounds: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = new_seed()
    store = f"file://{tmp_path}/store" if kind == "file" else fresh_s3_url()
    # The S3 server is written in Python and has a share of this machine: writes take longer, and so does every takeover.
    seconds = 1.0 if kind == "file" else 3.0
    pair = BrokerPair(store, term=seconds, timeout=seconds)
    with pair.at_work():
        pair.leader()
        strikes = itertools.cycle((pair.kill_leader, pair.freeze_leader))
        chaos = Chaos(
            HttpDriver.from_url(pair.url),
            lambda: next(strikes)(),
            Fleet(pair.url, tmp_path),
            seed,
            contents=fewer(fewer_by),
            blows=("kill", "kill", "freeze", "crash", "crash") * rounds + ("kill", "freeze") * (rounds - 1),
        )
        asyncio.run(chaos.run())
    check_story(chaos)
    assert len(chaos.answered) >= 20_000 // fewer_by
    assert (pair.killed_leaders, pair.frozen_leaders) == (rounds, rounds)
    if rounds > 1:
        # Started only now: Java would take its share of the machine while workers are frozen and killed.
        audited = audit_store(request.getfixturevalue("spark"), store)
        assert audited.rows == len(chaos.told)
        assert audited.is_clean, audited


@pytest.mark.parametrize(("fewer_by", "rounds"), [(10, 2), pytest.param(5, 3, marks=pytest.mark.slow)])
def test_many_writers_lose_and_double_nothing(fewer_by: int, rounds: int, tmp_path: Path) -> None:
    seed, store = new_seed(), f"file://{tmp_path}/store"
    chaos = Chaos(
        ObjectStoreDriver.from_url(store),
        lambda: None,
        Fleet(store, tmp_path),
        seed,
        contents={**fewer(fewer_by), ("plain", "slow"): 600},
        blows=("kill", "freeze") * rounds + ("kill", "kill") * (rounds - 2),
        # Whoever is frozen with a lock in its hands stops everybody: that is what a folder's limits are.
        is_held_up=lambda: is_locked(store),
    )
    asyncio.run(chaos.run())
    check_story(chaos)
