"""A history as a Spark job: each task makes the days of its slots, and nobody needs to know of another.

The rows depend on the plan alone, not on how many tasks share the work.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from taskharbor.bulk.tables import ATTEMPTS, JOBS, QUEUES
from taskharbor.jobs import to_datetime
from taskharbor.spark.audit.checks import STORE_KINDS
from taskharbor.spark.audit.violations import Kind
from taskharbor_testkit.histories.plan import START, HistoryPlan, QueuePlan, make_plan, split
from taskharbor_testkit.histories.planting import PLANTERS, Planter, StoredJob
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
    attempts, planted, _ = _frames(spark, plan, tasks)
    return attempts, planted


def generate_with_store(
    spark: SparkSession, *, rows: int, seed: int = 0, days: int = 7, violations: int = 0
) -> tuple[DataFrame, DataFrame, DataFrame]:
    """The same, and the jobs that the store has when all is over (the columns of `JOBS`). Violations are planted there too."""
    return _frames(spark, make_plan(rows, seed, days, violations=violations, with_store=True))


def _frames(
    spark: SparkSession, plan: HistoryPlan, tasks: int | None = None
) -> tuple[DataFrame, DataFrame, DataFrame]:
    units = plan.units()
    numbers = spark.range(0, units, 1, tasks or max(1, units // UNITS_PER_TASK))
    attempts = numbers.mapInArrow(partial(_attempts, plan), from_arrow_schema(ATTEMPTS))
    planted = numbers.mapInArrow(partial(_planted, plan), from_arrow_schema(PLANTED))
    jobs = numbers.mapInArrow(partial(_jobs, plan), from_arrow_schema(JOBS))
    return attempts, planted, jobs


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


class Unit(NamedTuple):
    """A slot's day."""

    queue: QueuePlan
    rows: list[Row]
    jobs: dict[str, Row]
    """The last row of each job."""
    planted: list[tuple[Kind, str]]
    stored: dict[str, StoredJob]
    """Jobs of which the store has something else than their rows say."""


def _units(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[Unit]:
    """Make units by their numbers."""
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
            made = Unit(slot.queue, rows, {row.job_id: row for row in rows}, [], {})
            if unit in wanted:
                chance = random.Random(f"{plan.seed}/planting/{unit}")
                planter = Planter(rows, slot, len(slots), plan.slots_of(slot.queue), chance)
                made = made._replace(planted=planter.plant(wanted[unit]), stored=planter.stored)
                rows.sort(key=attrgetter("seq"))
                made.jobs.update({row.job_id: row for row in rows if row.job_id in made.jobs})
            yield made


def _attempts(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for unit in _units(plan, numbers):
        yield to_batch(unit.rows)


def _planted(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for unit in _units(plan, numbers):
        rows = [{"kind": str(kind), "job_id": job_id} for kind, job_id in unit.planted]
        yield pa.RecordBatch.from_pylist(rows, schema=PLANTED)


def _jobs(plan: HistoryPlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for unit in _units(plan, numbers):
        outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in unit.rows:
            counts = outcomes[row.job_id]
            if row.outcome == "requeued":
                counts.clear()
            counts[row.outcome] += 1
        yield pa.RecordBatch.from_pylist(
            [
                _job(unit.queue, row, outcomes[job_id], changed)
                for job_id, row in unit.jobs.items()
                if (changed := unit.stored.get(job_id, {})) is not None
            ],
            schema=JOBS,
        )


def _job(
    queue: QueuePlan, last: Row, outcomes: Counter[str], changed: dict[str, object]
) -> dict[str, object]:
    """A job as the store has it after its last row."""
    alike = ("queue", "type", "state", "key", "priority", "run_at", "created_at", "fence")
    made: dict[str, object] = {one.name: None if one.nullable else 0 for one in JOBS} | {
        "codec": "json",
        "payload": b"",
    }
    made |= {name: getattr(last, name) for name in alike} | {
        "id": last.job_id,
        "max_attempts": queue.max_attempts,
    }
    made |= {"attempts": outcomes["retried"] + outcomes["dead"], "stalls": outcomes["expired"]}
    ended = {"finished_at": last.ended_at if last.state in ("done", "dead", "cancelled") else None}
    return made | ended | changed


def _places_of_violations(plan: HistoryPlan) -> dict[int, list[Kind]]:
    """Return the kinds of violations for each unit. Only queues with keys can break the rule about keys."""
    kinds = [kind for kind in PLANTERS if plan.with_store or kind not in STORE_KINDS]
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
) -> tuple[int, int]:
    """Makes `attempts`, `queues`, `jobs` and `planted` below the folder; how many attempts, and violations planted."""
    attempts, planted, jobs = generate_with_store(
        spark, rows=rows, seed=seed, days=days, violations=violations
    )
    queues = queues_table(spark, rows=rows, days=days)
    for name, frame in (("attempts", attempts), ("queues", queues), ("jobs", jobs), ("planted", planted)):
        frame.write.mode("errorifexists").parquet(str(folder / name))
    made, there = (
        spark.read.schema(frame.schema).parquet(str(folder / name)).count()
        for name, frame in (("attempts", attempts), ("planted", planted))
    )
    return made, there


def fill_lake(
    spark: SparkSession, place: str, *, rows: int, days: int, seed: int, violations: int
) -> tuple[int, int, int]:
    """One run of the pipeline over it. Every seed is a source of its own, so that several fit into one lake.

    Rows of the log, those of them in quarantine, and violations that were planted.
    """
    from taskharbor.spark.lake import Lake, run_pipeline

    attempts, planted = generate(spark, rows=rows, seed=seed, days=days, violations=violations)
    queues = queues_table(spark, rows=rows, days=days)
    done = run_pipeline(spark, Lake(place), attempts, name=f"history-{seed}", queues=queues)
    return done.rows_read, sum(done.quarantined.values()), planted.count() if violations else 0
