"""Schedules that really ran, in the lake and in the audit: what they made is told, and nobody is accused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from bulk.stores import within
from records import make_record
from schedules.harness import Crash, Crashing, Harness
from spark.histories import row
from spark.stores import jobs_in
from taskharbor.bulk.tables import attempts_batch
from taskharbor.cli.root import root
from taskharbor.drivers.contract import Ack, Driver, Fail, Release, RetryAt
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, TERMINAL_STATES, Attempt, Failure, JobRecord, to_datetime, to_micros
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import decode
from taskharbor.schedules.tick_ids import generation_of, parse_tick_id, tick_id
from taskharbor.schedules.ticking import SKIPPED
from taskharbor.spark.audit import Kind, audit_lake, audit_store
from taskharbor.spark.lake import Lake, gold, read, reprocess, run_pipeline
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS

POLICIES: dict[str, dict[str, Any]] = {
    "each": {},
    "some:times": {"every": 7, "offset": 2.5},
    "skip": {"overlap": "skip"},
    "one": {"overlap": "queue_one"},
    "replace": {"overlap": "replace"},
    "last": {"catch_up_mode": "last"},
    "keyed": {"key": "k"},
    "cautious": {"pause_on_failure": True, "every": 5},
    "few": {"limit": 12},
    "late": {"jitter": 20, "catch_up": 5},
}
FAILED = Failure("E", "broken")
STEPS = 150
# Seconds at the end in which nobody meddles with the schedule `each`, so that each of its ticks must have a job.
QUIET = 20


async def operate(one: Harness, dice: random.Random) -> None:
    """Do what an operator, or a deploy, may do to a schedule at any time."""
    name, s = dice.choice(sorted(POLICIES)), one.schedules
    begun, now = to_datetime(one.clock.now() - 30 * SECOND), to_datetime(one.clock.now())
    match dice.randrange(7):
        case 0:
            await s.pause(name, "a while")
        case 1 | 2:
            await s.resume(name)
        case 3:
            await s.trigger(name)
        case 4:
            await one.put(name, **{"every": 1, **POLICIES[name], "priority": dice.randrange(3)})
        case 5 if "overlap" not in POLICIES[name]:
            await s.backfill(name, begun, now)
        case _:
            await s.delete(name)
            await one.put(name, **{"every": 1, **POLICIES[name]})


async def step(one: Harness, dice: random.Random, crashes: float = 0) -> None:
    """Work on what is due, and crash now and then, between any two calls. Then end some jobs in all ways."""
    call, after = dice.choice(("reserve", "enqueue", "settle")), dice.random() < 0.5
    with suppress(Crash):
        await one.tick(Crashing(one.driver, call, after=after) if dice.random() < crashes else None)
    now = one.clock.now()
    leased = await one.driver.reserve(
        "default", limit=dice.randrange(25), lease_for=20 * SECOND, now=now, worker="w"
    )
    ends = [end for job in leased if (end := ending(job, dice)) is not None]
    await one.driver.settle(ends, now=now + SECOND // 3)
    await one.driver.reclaim(now=now)


def ending(job: JobRecord, dice: random.Random) -> Ack | Fail | Release | RetryAt | None:
    held, failures = (job.id, job.token or ""), job.attempts + 1
    ways: list[Ack | Fail | Release | RetryAt | None] = [*[Ack(*held)] * 9, Release(*held), None]
    ways.append(Fail(*held, failures, FAILED))
    if job.spent + 1 < job.max_attempts:
        ways.append(RetryAt(*held, job.run_at_us + SECOND, failures, FAILED))
    return dice.choice(ways)


async def lived(url: str, seed: int) -> None:
    """Two minutes of all policies, and one job two hours later. So all rows of the two minutes are old."""
    dice = random.Random(seed)
    async with Harness(connect(url)).client as client:
        one = Harness(client.driver)
        await one.driver.enqueue([make_record(now=one.clock.now(), queue="default")], now=one.clock.now())
        await one.end()
        one.clock.advance(10)
        for name, policy in POLICIES.items():
            await one.put(name, **{"every": 1, **policy})
        for number in range(STEPS):
            # A worker is away now and then.
            one.clock.advance(40 if number == STEPS // 2 else dice.choice((0.25, 1, 1, 1, 2)))
            await step(one, dice, 0.1)
            if dice.random() < 0.2:
                await operate(one, dice)
        # No crash has left a lease.
        one.clock.advance(60)
        await step(one, dice)
        await one.schedules.resume("each")
        for _ in range(QUIET):
            one.clock.advance(1)
            await step(one, dice)
        one.clock.advance(7200)
        await step(one, dice)
        late = make_record(now=one.clock.now(), queue="other")
        await one.driver.enqueue([late], now=one.clock.now())
        await one.driver.ack(late.id, (await one.lease("other")).token or "", now=one.clock.now())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    url = f"sqlite:///{tmp_path_factory.mktemp('ticks')}/jobs.db?durability=normal"
    asyncio.run(lived(url, seed))
    return url


@pytest.fixture(scope="module")
def lake(spark: SparkSession, url: str, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake(tmp_path_factory.mktemp("ticks") / "lake")
    run_pipeline(spark, lake, url)
    return lake


def log_of(url: str) -> list[Attempt]:
    page = within(url, lambda driver: driver.read_attempts(limit=1_000_000))
    return list(page.attempts)


def ticks(spark: SparkSession, lake: Lake) -> Counter[str]:
    return Counter(map(str, read(spark, lake.table("gold.ticks")).collect()))


def test_nobody_is_accused(spark: SparkSession, url: str, lake: Lake) -> None:
    """By the store alone, and by the lake beside it."""
    for result in (audit_store(spark, url), audit_lake(spark, lake, url=url)):
        assert result.is_clean, [one.text for one in result.examples]
        assert result.rows > 1000


def test_the_table_has_what_the_log_tells(spark: SparkSession, url: str, lake: Lake) -> None:
    """Counted once more in plain Python, from ids and states."""
    rows, expected = log_of(url), dict[str, tuple[Any, ...]]()
    for one in rows:
        if (parsed := parse_tick_id(one.job_id)) is None:
            continue
        at = to_micros(parsed.at)
        begun = None if one.reserved_at_us is None else one.reserved_at_us - at
        first = expected[one.job_id][4] if one.job_id in expected else None
        made = (parsed.made, parsed.name, str(one.outcome), one.created_at_us - at)
        expected[one.job_id] = (*made, begun if first is None else first)
    found = {
        one.job_id: (one.made_by, one.schedule, one.outcome, one.made_lateness_us, one.lateness_us)
        for one in read(spark, lake.table("gold.ticks")).collect()
    }
    skipped = {id: one for id, one in found.items() if one[2] == "skipped"}
    assert {id: one for id, one in found.items() if id not in skipped} == expected
    assert {one[:2] for one in skipped.values()} == {("tick", "skip")}
    texts = [one.error_message or "" for one in rows if one.error_type == SKIPPED]
    assert len(skipped) == len({time for text in texts for time in text.partition(" at ")[2].split(", ")})
    assert {one[0] for one in found.values()} == {"tick", "trigger", "backfill"}
    assert {one[1] for one in found.values()} == set(POLICIES)
    answer = CliRunner().invoke(root, ["lake", "tables", "--lake", str(lake), "--json"])
    listed = {one["name"]: one["rows"] for one in json.loads(answer.stdout)}
    assert listed["gold.ticks"] == len(found)


def planted(url: str, folder: Path) -> str:
    """A copy of the store."""
    file = url.removeprefix("sqlite:///").partition("?")[0]
    shutil.copy(file, folder / "jobs.db")
    return f"sqlite:///{folder}/jobs.db"


def judged(url: str) -> list[str]:
    """The jobs of `each` from the time when nobody meddled with it."""
    (own,) = [
        one
        for one in jobs_in(url)
        if one.key == "each" and one.queue == QUEUE and one.state not in TERMINAL_STATES
    ]
    since, generation = to_datetime(decode(own.payload).since), generation_of(own.id)
    parsed = [
        one
        for one in (parse_tick_id(job.id) for job in jobs_in(url))
        if one is not None and one.made == "tick"
    ]
    return [
        tick_id("tick", "each", generation, one.at)
        for one in parsed
        if one.name == "each"
        and one.generation == generation
        and since < one.at < since + timedelta(seconds=QUIET)
    ]


def test_a_tick_that_is_in_neither_is_lost(spark: SparkSession, url: str, tmp_path: Path) -> None:
    copy = planted(url, tmp_path)
    lost = random.choice(judged(copy))
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as raw, raw:
        raw.execute("DELETE FROM attempts WHERE job_id = ?", (lost,))
        raw.execute("DELETE FROM jobs WHERE id = ?", (lost,))
    result = audit_store(spark, copy)
    assert result.kinds == {Kind.TICK_LOST: 1}, result.examples
    assert [one.job_id for one in result.examples] == [lost]


def test_a_tick_that_is_made_again_is_doubled(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Its job was removed, and comes back under its id or another."""
    copy = planted(url, tmp_path)
    done = {job.id for job in jobs_in(copy) if job.state == "done"}
    again = random.choice([one for one in judged(copy) if one in done])
    other = random.choice([one for one in judged(copy) if one in done - {again}])

    async def double(driver: Driver) -> None:
        await driver.remove([again])
        now = max(job.created_at_us for job in jobs) + SECOND
        ids = (again, f"{other[:-1]}.000Z")
        await driver.enqueue([make_record(one, now=now, queue="default") for one in ids], now=now)
        leased = await driver.reserve("default", limit=10_000, lease_for=SECOND, now=now, worker="w")
        await driver.settle([Ack(one.id, one.token or "") for one in leased], now=now)

    jobs = jobs_in(copy)
    within(copy, double)
    result = audit_store(spark, copy)
    assert result.kinds == {Kind.TICK_DOUBLED: 2}, result.examples
    assert {one.job_id for one in result.examples} == {again, f"{other[:-1]}.000Z"}


# -- runs of the pipeline -------------------------------------------------------------------------------------------


def run(spark: SparkSession, lake: Lake, rows: Sequence[Attempt]) -> None:
    log = spark.createDataFrame(pa.Table.from_batches([attempts_batch(rows)]))
    run_pipeline(spark, lake, log.coalesce(1), name="log")


def test_a_lake_that_an_earlier_release_made_gets_the_table(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """As a whole, also where it has fallen behind. And runs in pieces add up to one run."""
    rows, whole, lake = log_of(url), Lake(tmp_path / "whole"), Lake(tmp_path / "lake")
    run(spark, whole, rows)
    folder = Path(lake.place.uri("gold.ticks"))
    for n in (1, 2, 3):
        run(spark, lake, rows[: n * len(rows) // 3])
        if n == 1:
            shutil.copytree(folder, tmp_path / "behind")
    expected = ticks(spark, whole)
    assert ticks(spark, lake) == expected
    for left in (None, tmp_path / "behind"):
        shutil.rmtree(folder)
        if left is not None:
            shutil.copytree(left, folder)
        run(spark, lake, rows)
        lake.snapshot()
        assert ticks(spark, lake) == expected
    days = [one["date"] for one in read(spark, lake.table("gold.ticks")).select("date").distinct().collect()]
    reprocess(spark, lake, min(days), max(days))
    assert ticks(spark, lake) == expected


def test_a_run_without_schedules_does_not_look_for_ticks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gold, "attempt_ticks", pytest.fail)
    lake = Lake(tmp_path)
    for rows in ([row(1)], [row(1), row(2)]):
        run_pipeline(spark, lake, spark.createDataFrame(rows, ATTEMPT_COLUMNS), name="log")
    assert lake.snapshot().tables["gold.ticks"].files() == []
