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
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from chaos.batches import Contents, fewer
from chaos.brokers import BrokerPair, is_locked
from chaos.fleet import Fleet
from chaos.story import Chaos
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.jobs import Outcome
from taskharbor.spark.audit import audit_store
from taskharbor_testkit.servers.s3 import fresh_s3_url

SEED = "TASKHARBOR_OBJECTSTORE_CHAOS_SEED"
DIRECTLY: Contents = {**fewer(5), ("plain", "slow"): 600}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A store for the storm, with terms, time-outs and a number of jobs that it can bear."""

    url: Callable[[Path], str]
    term: float
    timeout: float
    contents: Contents
    least: int
    """Jobs that must have been accepted."""


SETTINGS = {
    "file": Setting(
        url=lambda folder: f"file://{folder}/store", term=1.0, timeout=1.0, contents=fewer(4), least=5000
    ),
    # Its server is written in Python and has a share of this machine: writes take longer, and so does every takeover.
    "s3": Setting(url=lambda _: fresh_s3_url(), term=3.0, timeout=3.0, contents=fewer(10), least=1900),
}

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
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_chaos_through_two_brokers_loses_and_doubles_nothing(
    setting: Setting, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = new_seed()
    store = setting.url(tmp_path)
    pair = BrokerPair(store, term=setting.term, timeout=setting.timeout)
    with pair.at_work():
        pair.leader()
        strikes = itertools.cycle((pair.kill_leader, pair.freeze_leader))
        chaos = Chaos(
            HttpDriver.from_url(pair.url),
            lambda: next(strikes)(),
            Fleet(pair.url, tmp_path),
            seed,
            contents=setting.contents,
            blows=("kill",) * 5 + ("freeze",) * 3 + ("crash",) * 4,
        )
        asyncio.run(chaos.run())
    check_story(chaos)
    assert len(chaos.answered) >= setting.least
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
