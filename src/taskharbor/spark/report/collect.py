"""Collects the numbers of the report from the tables of a lake. Only small results reach the driver."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import reduce
from itertools import accumulate
from operator import add, sub
from typing import Any, TypeAlias, TypeVar

import msgspec
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from taskharbor.jobs import JobState, Micros, to_micros
from taskharbor.lake.delta import Lake, Snapshot
from taskharbor.spark.audit import AuditResult
from taskharbor.spark.lake import gold
from taskharbor.spark.lake.frames import read as read_table
from taskharbor.spark.report import data, queries
from taskharbor.spark.report.formatting import HOUR

QUEUES_SHOWN = 5
WORKERS_SHOWN = 24
CELLS_SHOWN = 120
OTHER_QUEUES = "other queues"
# The load of workers is counted from the rows up to this length: a cell per hour would show little.
FINE_WORKERS = 12 * HOUR

Read: TypeAlias = Callable[[str], DataFrame]
# Name of a count -> label of a queue -> a number per bucket.
Movements: TypeAlias = dict[str, dict[str, list[int]]]
T = TypeVar("T", bound=msgspec.Struct)


def collect(
    spark: SparkSession, lake: Lake | Snapshot, *, audit: AuditResult | None = None, url: str | None = None
) -> data.ReportData:
    """Count everything that the report shows. Without the result of an audit the report says that none was made.

    `url`: a store whose waiting jobs are counted now, by type. Otherwise they are those that the last run saw.
    """
    made_at = time.time_ns() // 1000
    # All queries read one run of the lake, whatever is committed meanwhile.
    snapshot = lake.snapshot() if isinstance(lake, Lake) else lake

    def read(table: str) -> DataFrame:
        return read_table(spark, snapshot.tables[table])

    seen = read("gold.hours").agg(
        F.unix_micros(F.min("hour")).alias("first"),
        F.unix_micros(F.max("hour")).alias("last"),
        F.sort_array(F.collect_set("source")).alias("sources"),
        F.count_distinct("source", "queue").alias("queues"),
    )
    (row,) = seen.collect()
    waiting = _waiting_in(spark, url) if url else _waiting_at_run(snapshot)
    waiting_at = made_at if url else to_micros(datetime.fromisoformat(snapshot.record.at))
    if row.first is None:
        return data.ReportData(made_at_us=made_at, waiting=waiting, waiting_at_us=waiting_at)
    buckets = _buckets(read, row.first, row.last + HOUR - 1)
    by_queue = read("gold.hours").groupBy("queue").agg(F.sum("starts").alias("starts"))
    busiest = by_queue.orderBy(F.desc("starts"), "queue").limit(QUEUES_SHOWN).collect()
    # The busiest queues are drawn under their own names, all others under one.
    named = F.when(F.col("queue").isin([one.queue for one in busiest]), F.col("queue"))
    label = named.otherwise(F.lit(OTHER_QUEUES))
    movements = _movements(read, buckets, label)
    lifecycles = read("silver.lifecycles")
    counts = queries.job_counts(lifecycles).collect()[0].asDict(recursive=True)
    durations = queries.durations(read("gold.hours")).collect()
    workers, number_of_workers, worker_step = _workers(read, buckets)
    objectives, objective_step = _objectives(read("gold.objectives"), buckets)
    leases: dict[str, int] = counts["leases"]
    overall: dict[str, Any] = next((one.asDict() for one in durations if one.type is None), {})
    (peak,) = queries.busiest_minute(read("gold.minutes")).collect()
    others = {
        "queues": row.queues,
        "workers": number_of_workers,
        "busiest_queue": busiest[0].queue if busiest[0].starts else None,
        "busiest_executions": busiest[0].starts,
    }
    totals = msgspec.convert({**leases, **overall, **counts, **peak.asDict(), **others}, data.Totals)
    return data.ReportData(
        sources=row.sources,
        start_us=buckets.start_us,
        bucket_us=buckets.bucket_us,
        buckets=buckets.number,
        made_at_us=made_at,
        verdict=None if audit is None else _verdict(audit, totals.executions),
        totals=totals,
        flow=_flow(movements, buckets),
        backlog=_queues(movements, read("gold.queue_minutes"), label, buckets.bucket_us),
        wait=_waits(read, buckets),
        run_times=_run_times(durations),
        workers=workers,
        worker_bucket_us=worker_step,
        errors=_found(queries.errors(read("gold.errors")), data.ErrorGroup),
        # The log does not tell jobs cancelled while running from those cancelled while waiting: they are the rest.
        lease_ends=leases | {"cancelled": max(0, totals.executions - sum(leases.values()))},
        job_ends={state: counts[state] for state in ("done", "dead", "cancelled", "open")},
        slowest=_found(queries.slowest(lifecycles), data.JobLine),
        most_tried=_found(queries.most_tried(lifecycles), data.JobLine),
        objectives=objectives,
        objective_bucket_us=objective_step,
        waiting=waiting,
        waiting_at_us=waiting_at,
        quarantined=snapshot.tables["quarantine.attempts"].rows,
    )


# -- jobs that wait -----------------------------------------------------------------------------------------------

_WAITING = (JobState.READY, JobState.SCHEDULED, JobState.BLOCKED)


def _waiting_in(spark: SparkSession, url: str) -> list[data.Waiting]:
    reader = spark.read.format("taskharbor").option("url", url).option("table", "jobs")
    jobs = [
        reader.option("state", state.value).load().select("queue", "type", "state", "run_at")
        for state in _WAITING
    ]
    return _found(queries.waiting(reduce(DataFrame.unionByName, jobs)), data.Waiting)


def _waiting_at_run(snapshot: Snapshot) -> list[data.Waiting]:
    """Jobs that never ran are not in the log: the queues as the last run of each source saw them."""
    found = [
        data.Waiting(
            queue=one["queue"],
            ready=one["ready"],
            later=one["scheduled"] + one["blocked"],
            due_us=one["head_run_at"],
        )
        for queues in snapshot.record.queues.values()
        for one in queues
    ]
    return sorted((one for one in found if one.ready + one.later), key=lambda one: -one.ready - one.later)


# -- over time ----------------------------------------------------------------------------------------------------


def _buckets(read: Read, first: Micros, last: Micros) -> data.Buckets:
    """Buckets for these hours. In a short history the rows say when it began and ended exactly."""
    if last - first <= 3 * HOUR:
        began, ended = F.unix_micros(F.min("created_at")), F.unix_micros(F.max("ended_at"))
        (row,) = read("silver.attempts").agg(began.alias("first"), ended.alias("last")).collect()
        if row.first is not None:
            first, last = row.first, max(row.first, row.last)
    return data.choose(first, last)


def _movements(read: Read, buckets: data.Buckets, label: Column) -> Movements:
    """Counts per queue and bucket; the queue with most completions first, the other queues last."""
    tallies = read(buckets.origin)
    if buckets.origin == "silver.attempts":
        arrived = gold.arrival_cells(read("silver.lifecycles"), buckets.bucket_us)
        tallies = gold.attempt_cells(tallies, buckets.bucket_us).unionByName(arrived)
    rows = queries.movements(tallies, buckets, label).collect()
    found = {name: _by_label(rows, buckets, name, 0) for name in queries.COUNTED}
    done = {label: sum(numbers) for label, numbers in found["completions"].items()}
    order = sorted(done, key=lambda label: (label == OTHER_QUEUES, -done[label], label))
    return {name: {label: numbers[label] for label in order} for name, numbers in found.items()}


def _flow(movements: Movements, buckets: data.Buckets) -> data.Flow:
    def total(name: str) -> list[int]:
        return [sum(numbers[n] for numbers in movements[name].values()) for n in range(buckets.number)]

    return data.Flow(**{name: total(name) for name in data.Flow.__struct_fields__})


def _queues(movements: Movements, minutes: DataFrame, label: Column, step: Micros) -> list[data.QueueLoad]:
    """Backlogs counted back from the end, which is known even if the beginning of the history was dropped; leases held in buckets
    of `step`, with W as it was last."""
    ends = {row.label: (row.waiting, row.limit) for row in queries.queue_ends(minutes, label).collect()}
    found = []
    for queue, arrived in movements["arrivals"].items():
        requeued, finished = movements["requeues"][queue], movements["finished"][queue]
        changes = list(map(sub, map(add, arrived, requeued), finished))
        last, limit = ends.get(queue, (0, None))
        heights = list(accumulate(changes, initial=last - sum(changes)))[1:]
        waiting = [max(0.0, float(height)) for height in heights]
        running = [busy / step for busy in movements["busy_us"][queue]]
        found.append(data.QueueLoad(queue=queue, waiting=waiting, running=running, limit=limit))
    return found


def _waits(read: Read, buckets: data.Buckets) -> data.Percentiles:
    cells = read(buckets.origin)
    if buckets.origin == "silver.attempts":
        cells = gold.gold_minutes([gold.attempt_cells(cells, buckets.bucket_us)])
    rows = {row["index"]: row for row in queries.waits(cells, buckets).collect()}

    def values(name: str) -> list[float | None]:
        return [rows[n][f"wait_{name}_us"] if n in rows else None for n in range(buckets.number)]

    return data.Percentiles(**{name: values(name) for name in data.Percentiles.__struct_fields__})


def _workers(read: Read, buckets: data.Buckets) -> tuple[list[data.WorkerLoad], int, Micros]:
    """Load of the busiest workers, the number of all workers, and the length of the buckets of the load."""
    by_worker = read("gold.workers").groupBy("worker").agg(F.sum("executions").alias("executions"))
    busiest = by_worker.orderBy(F.desc("executions"), "worker").limit(WORKERS_SHOWN).collect()
    number = by_worker.count() if len(busiest) == WORKERS_SHOWN else len(busiest)
    names = sorted(row.worker for row in busiest)
    is_shown = F.col("worker").isin(names)
    if buckets.span_us <= FINE_WORKERS:
        cells = buckets.coarser(buckets.bucket_us, CELLS_SHOWN)
        held = gold.attempt_workers(read("silver.attempts").where(is_shown), cells.bucket_us)
    else:
        cells = buckets.coarser(HOUR, CELLS_SHOWN)
        held = read("gold.workers").where(is_shown)
    load = _by_label(queries.loads(held, cells).collect(), cells)
    executions = {row.worker: row.executions for row in busiest}
    shown = [data.WorkerLoad(worker=name, executions=executions[name], load=load[name]) for name in names]
    return shown, number, cells.bucket_us


def _objectives(hours: DataFrame, buckets: data.Buckets) -> tuple[list[data.ObjectiveFigures], Micros]:
    """Objectives that were missed most, and the length of the buckets of their burn rates."""
    cells = buckets.coarser(HOUR, CELLS_SHOWN)
    worst = [row.asDict() for row in queries.worst_objectives(hours).collect()]
    names = [one["name"] for one in worst]
    rates = queries.burn_rates(hours.where(F.col("objective").isin(names)), cells).collect() if names else []
    burn = _by_label(rates, cells)
    return [data.ObjectiveFigures(**one, burn=burn[one["name"]]) for one in worst], cells.bucket_us


def _by_label(
    rows: Iterable[Row], buckets: data.Buckets, column: str = "value", empty: Any = None
) -> defaultdict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(lambda: [empty] * buckets.number)
    for row in rows:
        found[row.label][row["index"]] = row[column]
    return found


# -- over the whole history ---------------------------------------------------------------------------------------


def _verdict(audit: AuditResult, leases: int) -> data.Verdict:
    kinds = {kind.replace("_", " "): number for kind, number in audit.kinds.items()}
    examples = [one.text for one in audit.examples]
    return data.Verdict(leases=leases, jobs=audit.jobs, kinds=kinds, examples=examples)


def _run_times(durations: Sequence[Row]) -> list[data.RunTimes]:
    """Slowest first."""
    rows = [row.asDict() for row in durations if row.type is not None and row.run_p50_us is not None]
    found = msgspec.convert(rows, list[data.RunTimes])
    return sorted(found, key=lambda one: (-one.run_p95_us, one.type))


def _found(frame: DataFrame, kind: type[T]) -> list[T]:
    return msgspec.convert([row.asDict() for row in frame.collect()], list[kind])  # type: ignore[valid-type]
