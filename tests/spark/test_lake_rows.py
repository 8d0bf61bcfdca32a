"""The transformations of the lake, each on rows small enough to reckon with by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.histories import NO_LEASE, START, Row, at, row
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND
from taskharbor.schedules import QUEUE
from taskharbor.schedules.tick_ids import generation_of, tick_id
from taskharbor.spark.lake import Objective, gold
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS, COLUMNS, SchemaViolated, declared
from taskharbor.spark.lake.objectives import attempt_objectives, checked, summed_objectives
from taskharbor.spark.lake.silver import merged_lifecycles, silver_attempts, single_attempts

MINUTE = 60
CARRIED = "source string, queue string, date date, carried long"


def silver(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    raw = spark.createDataFrame(list(rows), ATTEMPT_COLUMNS).coalesce(1)
    origin = {
        "source": F.lit("s"),
        "run": F.lit(1),
        "ingested_at": F.lit(START),
        "date": F.to_date("ended_at"),
    }
    return silver_attempts(raw.withColumns(origin))


def by_time(rows: Sequence[Any], name: str) -> dict[float, Any]:
    """Rows by the seconds after the start. PySpark hands out instants as local times without a zone."""
    return {(one[name].astimezone(UTC) - START).total_seconds(): one for one in rows}


def utc(one: Any, *names: str) -> list[datetime]:
    return [one[name].astimezone(UTC) for name in names]


def test_silver_has_every_row_once_with_its_wait_and_its_run(spark: SparkSession) -> None:
    """And with the end of its lease."""
    late, waiting = row(2, ended_at=50, outcome="expired"), row(3, **NO_LEASE, outcome="cancelled")
    found = silver(spark, [row(1), late, late, waiting]).orderBy("seq").collect()
    spent = [(one.seq, one.wait_us, one.run_us) for one in found]
    assert spent == [(1, SECOND, 2 * SECOND), (2, SECOND, 49 * SECOND), (3, None, None)]
    assert utc(found[0], "valid_until") + utc(found[1], "valid_until") == [at(3), at(31)]
    assert found[2].valid_until is None


def test_a_lifecycle_tells_a_job_s_life_and_is_the_same_in_one_piece_or_in_two(spark: SparkSession) -> None:
    def lease(seq: int, minute: int, **values: Any) -> Row:
        due = minute * MINUTE
        return row(seq, job_id="a", fence=seq, run_at=due, reserved_at=due + 2, ended_at=due + 5, **values)

    failed = {"outcome": "retried", "error_type": "E", "error_message": "first"}
    dead = {"outcome": "dead", "error_type": "E", "error_message": "second"}
    requeued = row(3, job_id="a", **NO_LEASE, ended_at=7 * MINUTE, outcome="requeued", fence=2)
    attempts = silver(spark, [lease(1, 0, **failed), lease(2, 5, **dead), requeued, lease(4, 9)])
    singles = single_attempts(attempts, run=F.lit(1)).cache()
    whole = merged_lifecycles(singles).collect()
    first = merged_lifecycles(singles.where("last_seq <= 2"))
    assert whole == merged_lifecycles(first.unionByName(singles.where("last_seq > 2"))).collect()
    (life,) = whole
    assert (life.state, life.executions, life.max_fence, life.last_seq) == ("done", 3, 4, 4)
    assert (life.done, life.retried, life.dead, life.requeued, life.merged) == (1, 1, 1, 1, 0)
    spent = (life.first_wait_us, life.total_wait_us, life.total_run_us)
    assert spent == (2 * SECOND, 6 * SECOND, 9 * SECOND)
    assert utc(life, "first_reserved_at", "finished_at") == [at(2), at(9 * MINUTE + 5)]
    assert life.total_us == (9 * MINUTE + 5) * SECOND
    assert life.last_error_message == "second"
    (unfinished,) = merged_lifecycles(singles.where("last_seq <= 3")).collect()
    assert (unfinished.state, unfinished.finished_at, unfinished.total_us) == ("ready", None, None)


def test_minutes_and_hours_count_what_happened_and_split_leases(spark: SparkSession) -> None:
    """A lease counts in every minute that it spans."""
    long = row(1, reserved_at=30, lease_expires_at=540, ended_at=135, outcome="retried", state="ready")
    # Noticed an hour after its lease was over: busy until then, and no row for the minutes in between.
    lost = row(2, reserved_at=40, ended_at=59 * MINUTE, outcome="expired", state="dead")
    merged = row(3, **NO_LEASE, ended_at=120, outcome="merged")
    attempts = silver(spark, [long, lost, merged]).cache()
    lifecycles = merged_lifecycles(single_attempts(attempts, run=F.lit(7)))
    cells = [gold.attempt_cells(attempts), gold.arrival_cells(lifecycles)]
    # In two runs, of which the second adds to the minutes of the first.
    minutes = gold.gold_minutes(cells[1:], gold.gold_minutes(cells[:1])).cache()
    found = by_time(minutes.collect(), "minute")
    busy = {minute: one.busy_us // SECOND for minute, one in found.items()}
    assert busy == {0: 30 + 20, 60: 60 + 10, 120: 15, 3540: 0}
    assert (found[0].arrivals, found[0].starts, found[0].finished) == (3, 2, 0)
    assert (found[120].retries, found[120].finished, found[3540].expiries) == (1, 1, 1)
    assert found[3540].finished == 1
    assert found[60].concurrency == pytest.approx(70 / 60)
    assert found[60].wait_p50_us is None
    # Recorded values, the nearest by rank: of waits of 30 and 40 s the median is the first.
    assert (found[0].wait_p50_us, found[0].wait_p95_us) == (30 * SECOND, 40 * SECOND)
    assert found[120].run_p99_us == 105 * SECOND
    (hour,) = gold.gold_hours(minutes).collect()
    assert (hour.arrivals, hour.starts, hour.finished, hour.busy_us) == (3, 2, 2, 135 * SECOND)
    assert (hour.wait_p50_us, hour.run_p50_us) == (30 * SECOND, 105 * SECOND)

    limits = spark.createDataFrame([("s", "default", 2)], "source string, queue string, max_inflight int")
    carried = spark.createDataFrame([("s", "default", START.date(), 10)], CARRIED)
    nothing = spark.createDataFrame([], COLUMNS["gold.queue_minutes"])
    queues = gold.gold_queue_minutes(minutes, carried, limits, nothing).cache()
    load = by_time(queues.collect(), "minute")
    assert (load[60].max_inflight, load[60].ratio) == (2, pytest.approx(70 / 120))
    # 22:00 to 22:59 all in one day; of three jobs two have ended, and the first was tried again.
    assert [load[minute].waiting for minute in sorted(load)] == [13, 13, 12, 11]
    # A minute keeps the limit that it was made with.
    higher = limits.withColumn("max_inflight", F.lit(5))
    again = gold.gold_queue_minutes(minutes, carried, higher, queues.where("minute(minute) = 1"))
    assert {key: one.max_inflight for key, one in by_time(again.collect(), "minute").items()} == {
        0: 5,
        60: 2,
        120: 5,
        3540: 5,
    }


def test_a_job_heard_of_late_changes_the_backlog_of_every_day_it_waited() -> None:
    first, second, third, fourth = (date(2026, 3, day) for day in (1, 2, 3, 4))
    before: gold.Days = {("s", "q"): {first: 0, second: 0, third: 0, fourth: 0}}

    def after(**changes: int) -> set[date]:
        changed = {date(2026, 3, int(day[1:])): change for day, change in changes.items()}
        return gold.affected_dates(before, {("s", "q"): before["s", "q"] | changed}, changed)

    assert after(d2=1) == {second, third, fourth}
    assert after(d1=1, d3=-1) == {first, second, third}
    assert after(d3=0) == {third}
    other: gold.Days = before | {("s", "r"): {first: -1, fourth: 0}}
    assert gold.affected_dates(before, other, [first]) == {first, fourth}


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
    frame = spark.createDataFrame(alike, "a string, b string")
    both = (gold.fingerprint(F.col(name)).alias(f"{name}_print") for name in ("a", "b"))
    for one in frame.select("a", *both).collect():
        assert one.a_print == one.b_print, one.a
        assert not any(character.isdigit() for character in one.a_print), one.a_print
        assert one.a_print.split()[0] == one.a.split()[0]


def test_an_error_keeps_its_first_failure_as_the_sample(spark: SparkSession) -> None:
    failures = [
        row(seq, ended_at=minute * MINUTE, outcome="dead", error_type="E", error_message=f"no {seq}")
        for seq, minute in ((1, 5), (2, 3), (3, 9))
    ]
    rows = gold.attempt_errors(silver(spark, [*failures, row(4)]))
    (found,) = gold.summed_errors(gold.summed_errors(rows), rows).collect()
    assert (found["count"], found.sample_job, found.sample_message) == (6, "job-2", "no 2")
    assert found.fingerprint == "no <n>"
    assert utc(found, "first_seen", "last_seen") == [at(3 * MINUTE), at(9 * MINUTE)]


def test_objectives_burn_by_the_share_that_went_wrong(spark: SparkSession) -> None:
    slow = row(2, reserved_at=20, ended_at=21, outcome="dead")
    other = row(3, queue="mail", type="resize", reserved_at=20, ended_at=21)
    soon = Objective(name="soon", kind="wait", queue="default", threshold_ms=5000, target=0.9)
    short = Objective(name="short", kind="run", type="resize", threshold_ms=5000, target=0.9)
    objectives = checked([soon, short, Objective(name="well", kind="success", target=0.5)])
    rows = attempt_objectives(silver(spark, [row(1), slow, other, row(4, **NO_LEASE)]), objectives)
    found = {one.objective: (one.total, one.bad, one.burn_rate) for one in summed_objectives(rows).collect()}
    assert found == {"soon": (2, 1, pytest.approx(5)), "short": (1, 0, 0), "well": (4, 1, pytest.approx(0.5))}


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


# -- ticks of schedules ---------------------------------------------------------------------------------------------

OWN = "019b0000-0000-7000-8000-00000000000a"


def tick(seq: int, nominal: float, **values: Any) -> Row:
    """An attempt of the job of a tick, which is made a second after its time."""
    name = tick_id("tick", "a:b", generation_of(OWN), at(nominal))
    return row(seq, created_at=nominal + 1, **{"job_id": name, **values})


def skip(seq: int, *nominal: float) -> Row:
    """A step of the schedule, which makes no job for these ticks."""
    times = ", ".join(str(at(one)) for one in nominal)
    message = f"job {tick_id('tick', 'a:b', generation_of(OWN), at(0))} has not ended at {times}"
    error = {"error_type": "Skipped", "error_message": message, "outcome": "retried"}
    last = nominal[-1]
    return row(
        seq, job_id=OWN, queue=QUEUE, key="a:b", run_at=last, reserved_at=last, ended_at=last + 1, **error
    )


def test_a_tick_has_a_row_however_often_its_job_was_tried(spark: SparkSession) -> None:
    """And however the log was cut into runs. Other jobs have none, and a failure of that name in another queue has none."""
    first = tick(1, 0, reserved_at=3, ended_at=5, outcome="retried")
    rows = [first, tick(2, 0, fence=2, reserved_at=9, ended_at=12), skip(3, 60.25, 120)]
    rows += [tick(4, 180, **NO_LEASE, ended_at=181, outcome="merged"), row(5, error_type="Skipped")]
    rows += [tick(6, 240, job_id=tick_id("backfill", "b", "0" * 12, at(30)), error_type="Skipped")]
    rows += [
        row(7, job_id="tick:a:b:2026-03-01T22:00:00Z"),
        row(8, job_id="tick:a:000000000000:2026-99-01T22:00:00Z"),
    ]
    attempts = gold.attempt_ticks(silver(spark, rows)).cache()
    whole = gold.summed_ticks(attempts)
    cut = gold.summed_ticks(attempts.where("last_seq > 1"), gold.summed_ticks(attempts.where("last_seq = 1")))
    assert sorted(whole.collect()) == sorted(cut.collect())
    found = {one.job_id.partition(":")[2]: one for one in whole.collect()}
    seen = {
        (one.made_by, one.schedule, one.outcome, one.lateness_us, one.made_lateness_us)
        for one in found.values()
    }
    assert seen == {
        ("tick", "a:b", "done", 3 * SECOND, SECOND),
        ("tick", "a:b", "skipped", None, None),
        ("tick", "a:b", "merged", None, SECOND),
        ("backfill", "b", "done", 212 * SECOND, 211 * SECOND),
        ("tick", "a", "done", None, None),
    }
    nominal = by_time([one for one in found.values() if one.outcome == "skipped"], "nominal")
    assert sorted(nominal) == [60.25, 120]
    assert {one.generation for one in nominal.values()} == {generation_of(OWN)}
    assert {str(one.date) for one in found.values()} == {"2026-03-01"}
