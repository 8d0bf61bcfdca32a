"""Made-up histories: exactly as many rows as asked for, the same for the same seed, clean, and with every violation found."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from taskharbor.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = int(os.environ.get("TASKHARBOR_AUDIT_ROWS", "30000"))
"""A million takes minutes: TASKHARBOR_AUDIT_ROWS=1000000."""
PER_KIND = max(6, ROWS // 10_000)


def fingerprint(attempts: DataFrame) -> tuple[Any, ...]:
    """Two frames with the same one have the same rows, in whatever order."""
    from pyspark.sql import functions as F

    row = F.xxhash64(*attempts.columns)
    (found,) = attempts.agg(F.count("*"), F.sum(row.cast("decimal(38,0)")), F.bit_xor(row)).collect()
    return tuple(found)


def test_a_seed_makes_the_same_rows_however_many_tasks_share_the_work(spark: SparkSession) -> None:
    from taskharbor_testkit.histories import generate

    def made(seed: int, tasks: int) -> tuple[Any, ...]:
        attempts, _ = generate(spark, rows=2000, seed=seed, days=2, violations=20, tasks=tasks)
        return fingerprint(attempts)

    once = made(7, 1)
    assert made(7, 3) == once
    assert made(8, 3) != once


def test_clean_histories_are_clean_and_every_planted_violation_is_found(compiled_spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from taskharbor.spark.audit import audit
    from taskharbor_testkit.histories import generate, queue_limits
    from taskharbor_testkit.histories.planting import PLANTERS

    spark = compiled_spark
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    wanted = PER_KIND * len(PLANTERS)
    clean, nothing = generate(spark, rows=ROWS, seed=seed, days=3)
    broken, planted = generate(spark, rows=ROWS, seed=seed + 1, days=3, violations=wanted)
    attempts = (
        clean.withColumn("source", F.lit("clean"))
        .unionByName(broken.withColumn("source", F.lit("broken")))
        .persist()
    )
    limits = queue_limits(spark, rows=ROWS, days=3, source="clean").unionByName(
        queue_limits(spark, rows=ROWS, days=3, source="broken")
    )
    try:
        tally = attempts.where("source = 'clean'").groupBy("queue", "outcome").count().collect()
        found = audit(attempts, limits=limits).collect()
    finally:
        attempts.unpersist()

    assert sum(row["count"] for row in tally) == ROWS
    assert len({row["queue"] for row in tally}) == 5
    assert len({row["outcome"] for row in tally}) == 8
    assert nothing.count() == 0
    assert [row["text"] for row in found if row["source"] == "clean"] == []

    hidden = Counter((row["kind"], row["job_id"]) for row in planted.collect())
    seen = {(row["kind"], row["job_id"]) for row in found}
    print(Counter(kind for kind, _ in hidden))
    assert {kind for kind, _ in hidden} == set(map(str, PLANTERS))
    assert min(Counter(kind for kind, _ in hidden).values()) >= PER_KIND - 1
    assert [one for one in hidden if one not in seen] == []
    # And nobody else is accused. Who happened to be leased in another slot just when that was crowded is rightly named.
    guilty = {job_id for _, job_id in hidden}
    strangers = [
        row["text"]
        for row in found
        if row["kind"] != "limit_exceeded" and not any(row["job_id"].startswith(job) for job in guilty)
    ]
    assert strangers == []


def test_a_history_ends_every_job_and_looks_like_a_week(spark: SparkSession) -> None:
    from taskharbor_testkit.histories.plan import DAY, DEFAULT_QUEUES, START, make_plan, split
    from taskharbor_testkit.histories.slot import SlotDay

    plan = make_plan(20_000, 3, 7, DEFAULT_QUEUES)
    slots = plan.slots()
    assert sum(plan.rows_of_days()) == 20_000
    assert sum(split(1001, [1, 1, 1])) == 1001
    hours: Counter[int] = Counter()
    for slot in slots:
        for quota in (0, 1, 2, 150, 900):
            rows = SlotDay(slot, len(slots), 1, quota, 3).rows()
            assert len(rows) == quota
            assert len({row.seq for row in rows}) == quota
            last = {row.job_id: row.state for row in rows}
            assert set(last.values()) <= {"done", "dead", "cancelled"}
            assert all(START + DAY <= row.created_at <= row.ended_at < START + 2 * DAY for row in rows)
            hours.update(
                (row.created_at - START) % DAY // (DAY // 24) for row in rows if slot.queue.name == "mail"
            )
    assert hours[14] > 3 * hours[2]


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    from taskharbor_testkit.histories.plan import DEFAULT_QUEUES, make_plan

    with pytest.raises(InvalidRequest, match="at least one day"):
        make_plan(10, 0, 0, DEFAULT_QUEUES)
    with pytest.raises(InvalidRequest, match="same name"):
        make_plan(10, 0, 1, DEFAULT_QUEUES * 2)


def test_the_command_wants_to_know_where_the_history_goes() -> None:
    from taskharbor.cli.root import root

    answer = CliRunner().invoke(root, ["history", "--rows", "10"])
    assert answer.exit_code == 2
    assert "either --lake DIR or --parquet DIR" in answer.output


def test_the_command_writes_attempts_queues_and_what_was_planted(spark: SparkSession, tmp_path: Any) -> None:
    from taskharbor.cli.root import root

    folder = tmp_path / "made"
    args = [
        "history",
        "--rows",
        "1000",
        "--days",
        "1",
        "--violations",
        "17",
        "--parquet",
        str(folder),
        "--json",
    ]
    answer = CliRunner().invoke(root, args)
    assert answer.exit_code == 0, answer.output
    assert '"rows":1000' in answer.output
    assert spark.read.parquet(str(folder / "attempts")).count() >= 1000
    assert spark.read.parquet(str(folder / "queues")).count() == 5
    assert spark.read.parquet(str(folder / "planted")).count() >= 12
