"""The transformations of the lake, each on rows small enough to reckon with by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.lake_history import START, row
from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake.buckets import bucket, percentiles
from taskharbor.spark.lake.gold import (
    affected_dates,
    arrival_tallies,
    attempt_durations,
    attempt_errors,
    attempt_tallies,
    attempt_workers,
    daily_changes,
    fingerprint,
    gold_backlog,
    gold_concurrency,
    gold_hours,
    gold_minutes,
    summed_errors,
    summed_workers,
)
from taskharbor.spark.lake.objectives import Objective, attempt_objectives, checked, summed_objectives
from taskharbor.spark.lake.silver import bronze_attempts, merged_lifecycles, silver_attempts, single_attempts
from taskharbor.spark.lake.sources import source_name
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS, SchemaViolated, declared

NO_LEASE = {"reserved_at": None, "lease_expires_at": None, "worker": None}
SECOND = 1_000_000


def at(minute: int, second: float = 0) -> datetime:
    """An instant after the start; the local clock is what Spark gives back."""
    return START + timedelta(minutes=minute, seconds=second)


def silver(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    raw = spark.createDataFrame(list(rows), ATTEMPT_COLUMNS)
    return silver_attempts(bronze_attempts(raw, source="s", run=1, ingested_at=START)).cache()


def utc(row: Any, *names: str) -> list[datetime]:
    """PySpark hands out instants as local times without a zone."""
    return [row[name].astimezone(UTC) for name in names]


def test_silver_has_every_row_once_with_its_wait_its_run_and_the_end_of_its_lease(
    spark: SparkSession,
) -> None:
    late = row(2, ended_at=START + timedelta(seconds=50), outcome="expired", state="ready")
    waiting = row(3, **NO_LEASE, outcome="cancelled", state="cancelled")
    found = silver(spark, [row(1), late, late, waiting]).orderBy("seq").collect()
    assert [one.seq for one in found] == [1, 2, 3]
    assert [one.wait_us for one in found] == [SECOND, SECOND, None]
    assert [one.run_us for one in found] == [2 * SECOND, 49 * SECOND, None]
    assert utc(found[0], "valid_until") == [START + timedelta(seconds=3)]
    assert utc(found[1], "valid_until") == [START + timedelta(seconds=31)]
    assert found[2].valid_until is None


def test_a_lifecycle_tells_a_job_s_life_and_is_the_same_in_one_piece_or_in_two(spark: SparkSession) -> None:
    job: dict[str, Any] = {"job_id": "a", "created_at": START}

    def lease(seq: int, minute: int, **values: Any) -> dict[str, Any]:
        times = {"run_at": at(minute), "reserved_at": at(minute, 2), "lease_expires_at": at(minute, 32)}
        return row(seq, **{**job, **times, "ended_at": at(minute, 5), "fence": seq, **values})

    failed = {"outcome": "retried", "state": "scheduled", "error_type": "E", "error_message": "first"}
    dead = {"outcome": "dead", "state": "dead", "error_type": "E", "error_message": "second"}
    requeued = row(3, **job, **NO_LEASE, ended_at=at(7), outcome="requeued", state="ready", fence=2)
    rows = [lease(1, 0, **failed), lease(2, 5, **dead), requeued, lease(4, 9)]

    singles = single_attempts(silver(spark, rows), run=1)
    whole = merged_lifecycles(singles).collect()
    first = merged_lifecycles(singles.where("last_seq <= 2"))
    second = merged_lifecycles(first.unionByName(singles.where("last_seq > 2"))).collect()
    assert whole == second
    (life,) = whole
    assert (life.state, life.executions, life.max_fence, life.last_seq) == ("done", 3, 4, 4)
    assert (life.done, life.retried, life.dead, life.requeued, life.merged) == (1, 1, 1, 1, 0)
    assert (life.first_wait_us, life.total_wait_us, life.total_run_us) == (
        2 * SECOND,
        6 * SECOND,
        9 * SECOND,
    )
    assert utc(life, "first_reserved_at", "finished_at") == [at(0, 2), at(9, 5)]
    assert life.total_us == (9 * 60 + 5) * SECOND
    assert life.last_error_message == "second"
    (unfinished,) = merged_lifecycles(singles.where("last_seq <= 3")).collect()
    assert (unfinished.state, unfinished.finished_at, unfinished.total_us) == ("ready", None, None)


def test_minutes_and_hours_count_what_happened_and_split_a_lease_over_the_minutes_it_spans(
    spark: SparkSession,
) -> None:
    long = row(
        1, reserved_at=at(0, 30), lease_expires_at=at(9), ended_at=at(2, 15), outcome="retried", state="ready"
    )
    # Noticed an hour after its lease was over: busy until then, and no row for the minutes in between.
    lost = row(
        2, reserved_at=at(0, 40), lease_expires_at=at(1, 10), ended_at=at(59), outcome="expired", state="dead"
    )
    merged = row(3, **NO_LEASE, ended_at=at(2), outcome="merged", state="cancelled")
    attempts = silver(spark, [long, lost, merged])
    lifecycles = merged_lifecycles(single_attempts(attempts, run=7))
    tallies = attempt_tallies(attempts).unionByName(arrival_tallies(lifecycles)).cache()
    durations = attempt_durations(attempts)
    minutes = gold_minutes(tallies, durations).cache()
    found = {utc(one, "minute")[0]: one for one in minutes.collect()}
    assert sorted(found) == [at(0), at(1), at(2), at(59)]
    assert [found[at(n)].busy_us // SECOND for n in (0, 1, 2, 59)] == [30 + 20, 60 + 10, 15, 0]
    assert (found[at(0)].arrivals, found[at(0)].starts, found[at(0)].finished) == (3, 2, 0)
    assert (found[at(2)].retries, found[at(2)].finished, found[at(59)].expiries) == (1, 1, 1)
    assert found[at(59)].finished == 1
    assert found[at(1)].concurrency == pytest.approx(70 / 60)
    assert found[at(1)].wait_p50_us is None
    assert found[at(0)].wait_p50_us == pytest.approx(35 * SECOND, rel=0.05)
    assert found[at(2)].run_p99_us == pytest.approx(105 * SECOND, rel=0.025)
    (hour,) = gold_hours(minutes, durations).collect()
    assert (hour.arrivals, hour.starts, hour.finished, hour.busy_us) == (3, 2, 2, 135 * SECOND)

    limits = spark.createDataFrame([("s", "default", 2)], "source string, queue string, max_inflight int")
    ratios = {
        utc(one, "minute")[0]: (one.max_inflight, one.ratio)
        for one in gold_concurrency(minutes, limits).collect()
    }
    assert ratios[at(1)] == (2, pytest.approx(70 / 120))

    # 22:00 to 22:59 all in one day; of three jobs two have ended, and the first was tried again.
    backlog = gold_backlog(minutes, daily_changes(minutes)).orderBy("minute").collect()
    assert [one.waiting for one in backlog] == [3, 3, 2, 1]


def test_percentiles_are_within_a_bucket_of_the_truth(spark: SparkSession) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    durations = sorted(int(rng.lognormvariate(12, 3)) for _ in range(4001))
    frame = spark.createDataFrame([(one,) for one in durations], "us long")
    counted = frame.groupBy(bucket(F.col("us")).alias("bucket")).count().withColumn("metric", F.lit("wait"))
    (found,) = counted.agg(*percentiles("wait", prefix="wait")).collect()
    truth = [durations[round(share * 4000)] for share in (0.5, 0.95, 0.99)]
    assert list(found) == pytest.approx(truth, rel=0.05)


def test_a_day_starts_with_the_backlog_of_the_days_before_it(spark: SparkSession) -> None:
    days = spark.createDataFrame(
        [("s", "q", 5, date(2026, 3, 1)), ("s", "q", -1, date(2026, 3, 3)), ("s", "r", 9, date(2026, 3, 1))],
        "source string, queue string, change long, date date",
    )
    minutes = spark.createDataFrame(
        [("s", "q", datetime(2026, 3, 3, 0, minute), 0, 0, 1, date(2026, 3, 3)) for minute in (1,)],
        "source string, queue string, minute timestamp, arrivals long, requeues long, finished long, date date",
    )
    (found,) = gold_backlog(minutes, days).collect()
    assert found.waiting == 4


def test_a_job_heard_of_late_changes_the_backlog_of_every_day_it_waited() -> None:
    first, second, third, fourth = (date(2026, 3, day) for day in (1, 2, 3, 4))
    known = [first, second, third, fourth]
    assert affected_dates([("s", "q", second, 1)], known) == {second, third, fourth}
    assert affected_dates([("s", "q", first, 1), ("s", "q", third, -1)], known) == {first, second, third}
    assert affected_dates([("s", "q", third, 0)], known) == {third}
    assert affected_dates([("s", "q", first, 1), ("s", "r", first, -1)], [first, fourth]) == {first, fourth}


def test_a_worker_s_hours_add_up_over_runs(spark: SparkSession) -> None:
    over_the_hour = row(1, reserved_at=at(59), lease_expires_at=at(65), ended_at=at(61))
    rows = attempt_workers(silver(spark, [over_the_hour, row(2), row(3, **NO_LEASE)]))
    found = {utc(one, "hour")[0]: one for one in summed_workers(summed_workers(rows), rows).collect()}
    assert found[at(0)].busy_us == 2 * 62 * SECOND
    assert (found[at(0)].executions, found[at(60)].executions) == (2, 2)
    assert found[at(60)].utilisation == pytest.approx(120 / 3600)


def test_errors_that_differ_in_ids_numbers_and_names_have_one_fingerprint(spark: SparkSession) -> None:
    alike = [
        ("user 17 not found", "user 4711 not found"),
        ("no file '/a/b' here", "no file '/tmp/x y' here"),
        ("cannot reach 10.0.0.1:5432", "cannot reach 192.168.7.250:80"),
        ("at 0x7f3a2b", "at 0xDEADBEEF"),
        ("job 0198a0b2-7c1e-7aaa-8bbb-0123456789ab", "job 11111111-2222-3333-4444-555555555555"),
        ("GET https://a.example/1?x=2 failed", "GET http://b.example failed"),
        ("took 1.5e-3 s\nmore", "took 12 s"),
        ("mail to a.b@example.org", "mail to c@mail.example.org"),
        ("digest 5d41402abc4b2a76b9719d911017c592", "digest 7d793037a0760186574b0282f2f435e7"),
    ]
    frame = spark.createDataFrame([(left, right) for left, right in alike], "a string, b string")
    for one in frame.select(
        "a", fingerprint(F.col("a")).alias("x"), fingerprint(F.col("b")).alias("y")
    ).collect():
        assert one.x == one.y, one.a
        assert not any(character.isdigit() for character in one.x), one.x
        assert one.x.split()[0] == one.a.split()[0]


def test_an_error_keeps_its_first_failure_as_the_sample(spark: SparkSession) -> None:
    def failure(seq: int, minute: int) -> dict[str, Any]:
        return row(seq, ended_at=at(minute), outcome="dead", error_type="E", error_message=f"no {seq}")

    rows = attempt_errors(silver(spark, [failure(1, 5), failure(2, 3), failure(3, 9), row(4)]))
    once = summed_errors(rows)
    (found,) = summed_errors(once, rows).collect()
    assert (found["count"], found.sample_job, found.sample_message, found.fingerprint) == (
        6,
        "job-2",
        "no 2",
        "no <n>",
    )
    assert utc(found, "first_seen", "last_seen") == [at(3), at(9)]


def test_objectives_burn_by_the_share_that_went_wrong(spark: SparkSession) -> None:
    slow = row(2, reserved_at=at(0, 20), ended_at=at(0, 21), outcome="dead", state="dead")
    other = row(3, queue="mail", type="resize", reserved_at=at(0, 20), ended_at=at(0, 21))
    objectives = checked(
        [
            Objective(name="soon", kind="wait", queue="default", threshold_ms=5000, target=0.9),
            Objective(name="short", kind="run", type="resize", threshold_ms=5000, target=0.9),
            Objective(name="well", kind="success", target=0.5),
        ]
    )
    rows = attempt_objectives(silver(spark, [row(1), slow, other, row(4, **NO_LEASE)]), objectives)
    found = {one.objective: one for one in summed_objectives(rows).collect()}
    assert (found["soon"].total, found["soon"].bad) == (2, 1)
    assert found["soon"].burn_rate == pytest.approx(5.0)
    assert (found["short"].total, found["short"].bad) == (1, 0)
    assert (found["well"].total, found["well"].bad) == (4, 1)
    assert found["well"].burn_rate == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (Objective(name="a", kind="wait"), "needs a threshold_ms"),
        (Objective(name="a", kind="success", threshold_ms=1), "takes no threshold_ms"),
        (Objective(name="a", kind="success", target=1), "between 0 and 1"),
    ],
)
def test_an_objective_that_cannot_be_computed_is_refused(objective: Objective, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        checked([objective])


def test_a_transformation_that_makes_other_columns_than_declared_is_caught(spark: SparkSession) -> None:
    with pytest.raises(SchemaViolated, match=r"source is missing.*extra is not declared"):
        declared(spark.createDataFrame([], ATTEMPT_COLUMNS).withColumn("extra", F.lit(1)), "silver.attempts")


def test_a_source_is_named_without_its_secrets() -> None:
    name = source_name("postgresql://me:secret@db.example:5432/jobs?schema=th&password=secret")
    assert name == "postgresql://db.example:5432/jobs?schema=th"
    assert source_name("sqlite:////var/jobs.db?timeout=3") == "sqlite:////var/jobs.db"
