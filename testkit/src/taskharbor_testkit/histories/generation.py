"""A history as a Spark job: each task makes the days of its slots, and nobody needs to know of another.

The rows depend on the plan alone, not on how many tasks share the work.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from taskharbor.bulk.tables import ATTEMPTS, QUEUES
from taskharbor.jobs import to_datetime
from taskharbor.spark.audit.violations import Kind
from taskharbor_testkit.histories.plan import START, HistoryPlan, make_plan, split
from taskharbor_testkit.histories.planting import PLANTERS, Planter
from taskharbor_testkit.histories.slot import Row, SlotDay, to_batch

UNITS_PER_TASK = 16
PLANTED = pa.schema(
    [pa.field("kind", pa.string(), nullable=False), pa.field("job_id", pa.string(), nullable=False)]
)


def generate(
    spark: SparkSession,
    *,
    rows: int,
    seed: int = 0,
    days: int = 7,
    violations: int = 0,
    tasks: int | None = None,
) -> tuple[DataFrame, DataFrame]:
    """Attempts with the columns of `ATTEMPTS`, and what was planted among them (kind, job_id).

    `rows` rows, and a few more for the violations that are added rows. Kinds take turns, places are random. `tasks` shares the
    work otherwise and changes no row.
    """
    plan = make_plan(rows, seed, days, violations=violations)
    units = plan.units()
    numbers = spark.range(0, units, 1, tasks or max(1, units // UNITS_PER_TASK))
    attempts = numbers.mapInArrow(partial(_attempts, plan), from_arrow_schema(ATTEMPTS))
    planted = numbers.mapInArrow(partial(_planted, plan), from_arrow_schema(PLANTED))
    return attempts, planted


def queue_limits(spark: SparkSession, *, rows: int, days: int, source: str) -> DataFrame:
    """The W of every queue of such a history, as if somebody had looked when it began: for `audit(limits=...)`."""
    plan = make_plan(rows, 0, days)
    return spark.createDataFrame(
        [(source, queue.name, plan.slots_of(queue), to_datetime(START)) for queue in plan.queues],
        "source string, queue string, max_inflight int, observed_at timestamp",
    )


def queues_table(spark: SparkSession, *, rows: int, days: int) -> DataFrame:
    """The queues as the data source would show them when all is over: their W, and no job any more."""
    plan = make_plan(rows, 0, days)
    known = [{"queue": queue.name, "max_inflight": plan.slots_of(queue)} for queue in plan.queues]
    empty = {field.name: None if field.nullable else 0 for field in QUEUES} | {"paused": False}
    return spark.createDataFrame([empty | queue for queue in known], from_arrow_schema(QUEUES))


def _units(
    plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]
) -> Iterator[tuple[list[Row], list[tuple[Kind, str]]]]:
    """Make units by their numbers: the rows of each, and the violations planted in it."""
    slots = plan.slots()
    shares = [slot.queue.share / plan.slots_of(slot.queue) for slot in slots]
    rows_of_days = plan.rows_of_days()
    wanted = _places_of_violations(plan)
    for batch in numbers:
        for unit in batch.column(0).to_pylist():
            day, index = divmod(unit, len(slots))
            slot = slots[index]
            quota = split(rows_of_days[day], shares)[index]
            rows = SlotDay(slot, len(slots), day, quota, plan.seed).rows()
            planted: list[tuple[Kind, str]] = []
            if unit in wanted:
                chance = random.Random(f"{plan.seed}/planting/{unit}")
                limit = plan.slots_of(slot.queue)
                planted = Planter(rows, slot, len(slots), limit, chance).plant(wanted[unit])
            yield rows, planted


def _attempts(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows, _ in _units(plan, numbers):
        yield to_batch(rows)


def _planted(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, planted in _units(plan, numbers):
        rows = [{"kind": str(kind), "job_id": job_id} for kind, job_id in planted]
        yield pa.RecordBatch.from_pylist(rows, schema=PLANTED)


def _places_of_violations(plan: HistoryPlan) -> dict[int, list[Kind]]:
    """Return the kinds of violations for each unit. Only queues with keys can break the rule about keys."""
    kinds = list(PLANTERS)
    slots = plan.slots()
    keyed = [slot.index for slot in slots if slot.queue.keyed > 0]
    chance = random.Random(f"{plan.seed}/violations")
    places: defaultdict[int, list[Kind]] = defaultdict(list)
    for number in range(plan.violations):
        kind = kinds[number % len(kinds)]
        if kind is Kind.KEY_HELD_TWICE and not keyed:
            continue
        index = chance.choice(keyed) if kind is Kind.KEY_HELD_TWICE else chance.randrange(len(slots))
        places[chance.randrange(plan.days) * len(slots) + index].append(kind)
    return dict(places)


# -- where a history goes ---------------------------------------------------------------------------------------


def write_parquet(
    spark: SparkSession, folder: Path, *, rows: int, days: int, seed: int, violations: int
) -> int:
    """Makes `attempts`, `queues` and `planted` below the folder; how many violations were planted."""
    attempts, planted = generate(spark, rows=rows, seed=seed, days=days, violations=violations)
    queues = queues_table(spark, rows=rows, days=days)
    for name, frame in (("attempts", attempts), ("queues", queues), ("planted", planted)):
        frame.write.mode("errorifexists").parquet(str(folder / name))
    return spark.read.schema(planted.schema).parquet(str(folder / "planted")).count()


def fill_lake(spark: SparkSession, place: str, *, rows: int, days: int, seed: int, violations: int) -> int:
    """One run of the pipeline over it. Every seed is a source of its own, so that several fit into one lake."""
    from taskharbor.spark.lake import Lake, run_pipeline

    attempts, planted = generate(spark, rows=rows, seed=seed, days=days, violations=violations)
    queues = queues_table(spark, rows=rows, days=days)
    run_pipeline(spark, Lake(place), attempts, name=f"history-{seed}", queues=queues)
    return planted.count() if violations else 0
