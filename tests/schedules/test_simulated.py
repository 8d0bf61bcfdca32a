"""A day of schedules in virtual time, for many seeds. `TASKHARBOR_SCHEDULE_SEEDS` says how many."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from schedules.expected import SECOND, Rule, instants
from schedules.virtual import World

SEEDS = int(os.environ.get("TASKHARBOR_SCHEDULE_SEEDS", "24"))
FIRST = int(os.environ.get("TASKHARBOR_SCHEDULE_FIRST_SEED", "0"))
SHARDS = 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(max(120, SEEDS))
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_tick_is_doubled_or_lost_and_no_job_overlaps(shard: int) -> None:
    counts, wrong, trace = Counter[str](), list[str](), set[str]()
    seeds = range(FIRST + shard, FIRST + SEEDS, SHARDS)
    for seed in seeds:
        world = World(seed)
        judge = world.run()
        counts.update(judge.counts)
        wrong += [f"seed {seed}: {one}" for one in judge.wrong]
        trace.update(line.split()[2].rstrip(":") for line in world.trace)
    assert wrong == []
    print(dict(counts))
    assert counts["ticks"] > 20 * len(seeds)
    if len(seeds) > 100:
        # The seeds cover what they are for.
        assert all(counts[name] > 0 for name in counts)
        assert {"crashes", "freezes", "settle", "enqueue", "deletes", "trigger"} <= trace


def test_a_seed_gives_the_same_day_twice() -> None:
    for seed in range(3):
        worlds = [World(seed), World(seed)]
        for world in worlds:
            world.run()
        assert worlds[0].trace == worlds[1].trace
        assert len(worlds[0].trace) > 50


def test_the_instants_by_brute_force_are_those_of_the_table() -> None:
    """The judge has to be right too: the ends of summer time and of winter time in Berlin."""
    rule = Rule(minutes=frozenset([30]), hours=frozenset([2]), is_fixed=True)
    for day, hour, minute in ((29, 1, 0), (28, 1, 30), (30, 0, 30)):
        at = round(datetime(2026, 3, day, hour, minute, tzinfo=UTC).timestamp()) * SECOND
        assert at in instants(rule, "Europe/Berlin", datetime(2026, 3, 29, tzinfo=UTC))
    autumn = datetime(2026, 10, 25, tzinfo=UTC)
    found = [one // SECOND - round(autumn.timestamp()) for one in instants(rule, "Europe/Berlin", autumn)]
    assert [one for one in found if 0 <= one < 86_400] == [1800]
    wild = rule._replace(is_fixed=False)
    found = [one // SECOND - round(autumn.timestamp()) for one in instants(wild, "Europe/Berlin", autumn)]
    assert [one for one in found if 0 <= one < 86_400] == [1800, 5400]
