"""Collects the numbers of the report from the tables of a lake. Only small results reach the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import reduce
from typing import Any, TypeAlias

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
# Label of a queue -> name of a count -> a number per bucket.
Movements: TypeAlias = dict[str, dict[str, list[int]]]


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
        nothing = data.ReportData(sources=[], start_us=0, bucket_us=1, buckets=0, made_at_us=made_at)
        return msgspec.structs.replace(nothing, waiting=waiting, waiting_at_us=waiting_at)
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
    leases = counts.pop("leases")
    overall: dict[str, Any] = next((one.asDict() for one in durations if one.type is None), {})
    times = ("wait_p50_us", "wait_p95_us", "wait_p99_us", "run_p50_us", "run_p95_us")
    (peak,) = queries.busiest_minute(read("gold.minutes")).collect()
    totals = data.Totals(
        **counts,
        **{name: leases[name] for name in ("retried", "expired", "released")},
        **{name: value for name, value in overall.items() if name in times},
        queues=row.queues,
        workers=number_of_workers,
        busiest_queue=busiest[0].queue if busiest[0].starts else None,
        busiest_executions=busiest[0].starts,
        busiest_minute_us=peak.minute_us if peak.completions else None,
        busiest_minute_completions=peak.completions or 0,
    )
    return data.ReportData(
        sources=row.sources,
        start_us=buckets.start_us,
        bucket_us=buckets.bucket_us,
        buckets=buckets.number,
        made_at_us=made_at,
        verdict=None if audit is None else _verdict(audit, totals.executions),
        totals=totals,
        flow=_flow(movements, buckets),
        backlog=_backlog(movements, read("gold.queue_minutes"), label),
        wait=_waits(read, buckets),
        run_times=_run_times(durations),
        concurrency=_concurrency(movements, read("gold.queue_minutes"), label, buckets.bucket_us),
        workers=workers,
        worker_bucket_us=worker_step,
        workers_left_out=number_of_workers - len(workers),
        errors=msgspec.convert(_rows(queries.errors(read("gold.errors"))), list[data.ErrorGroup]),
        # The log does not tell jobs cancelled while running from those cancelled while waiting: they are the rest.
        lease_ends=leases | {"cancelled": max(0, totals.executions - sum(leases.values()))},
        job_ends={state: counts[state] for state in ("done", "dead", "cancelled", "open")},
        slowest=msgspec.convert(_rows(queries.slowest(lifecycles)), list[data.JobLine]),
        most_tried=msgspec.convert(_rows(queries.most_tried(lifecycles)), list[data.JobLine]),
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
    rows = queries.waiting(reduce(DataFrame.unionByName, jobs)).limit(queries.TYPES_SHOWN * 2)
    return msgspec.convert(_rows(rows), list[data.Waiting])


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
    found: Movements = {row.label: {name: [0] * buckets.number for name in queries.COUNTED} for row in rows}
    for row in rows:
        for name, values in found[row.label].items():
            values[row["index"]] = row[name]

    def order(label: str) -> tuple[bool, int, str]:
        return label == OTHER_QUEUES, -sum(found[label]["completions"]), label

    return {label: found[label] for label in sorted(found, key=order)}


def _flow(movements: Movements, buckets: data.Buckets) -> data.Flow:
    def total(name: str) -> list[int]:
        return [sum(counts[name][index] for counts in movements.values()) for index in range(buckets.number)]

    return data.Flow(**{name: total(name) for name in data.Flow.__struct_fields__})


def _backlog(movements: Movements, minutes: DataFrame, label: Column) -> list[data.Backlog]:
    """Counted back from the end, which is known even if the beginning of the history was dropped."""
    ends = minutes.groupBy("source", "queue").agg(F.max_by("waiting", "minute").alias("waiting"))
    rows = ends.groupBy(label.alias("label")).agg(F.sum("waiting").alias("waiting")).collect()
    last = {row.label: row.waiting for row in rows}
    shown = []
    for queue, counts in movements.items():
        came_and_went = zip(counts["arrivals"], counts["requeues"], counts["finished"], strict=True)
        changes = [arrived + requeued - finished for arrived, requeued, finished in came_and_went]
        waiting = last.get(queue, 0) - sum(changes)
        heights = [max(0.0, float(waiting := waiting + change)) for change in changes]
        shown.append(data.Backlog(queue=queue, waiting=heights))
    return shown


def _concurrency(
    movements: Movements, minutes: DataFrame, label: Column, step: Micros
) -> list[data.Concurrency]:
    """Leases held in buckets of `step`, with W as it was last; queues with a limit first."""
    last = minutes.groupBy("source", "queue").agg(F.max_by("max_inflight", "minute").alias("limit"))
    numbers = (F.count("*").alias("queues"), F.max("limit").alias("limit"))
    rows = last.groupBy(label.alias("label")).agg(*numbers).collect()
    # Queues of several stores that share a name have no common limit to draw.
    limits = {row.label: row.limit for row in rows if row.queues == 1}
    shown = []
    for queue, counts in movements.items():
        running = [busy / step for busy in counts["busy_us"]]
        shown.append(data.Concurrency(queue=queue, running=running, limit=limits.get(queue)))
    return sorted(shown, key=lambda one: one.limit is None)


def _waits(read: Read, buckets: data.Buckets) -> data.Percentiles:
    cells = read(buckets.origin)
    if buckets.origin == "silver.attempts":
        cells = gold.gold_minutes([gold.attempt_cells(cells, buckets.bucket_us)])
    found: dict[str, list[float | None]] = {name: [None] * buckets.number for name in ("p50", "p95", "p99")}
    for row in queries.waits(cells, buckets).collect():
        for name, values in found.items():
            values[row["index"]] = row[f"wait_{name}_us"]
    return data.Percentiles(**found)


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
    load = _by_name(queries.loads(held, cells).collect(), names, cells)
    executions = {row.worker: row.executions for row in busiest}
    shown = [data.WorkerLoad(worker=name, executions=executions[name], load=load[name]) for name in names]
    return shown, number, cells.bucket_us


def _objectives(hours: DataFrame, buckets: data.Buckets) -> tuple[list[data.ObjectiveFigures], Micros]:
    """Objectives that were missed most, and the length of the buckets of their burn rates."""
    cells = buckets.coarser(HOUR, CELLS_SHOWN)
    worst = _rows(queries.worst_objectives(hours))
    names = [row["name"] for row in worst]
    rates = queries.burn_rates(hours.where(F.col("objective").isin(names)), cells).collect() if names else []
    burn = _by_name(rates, names, cells)
    return [data.ObjectiveFigures(**row, burn=burn[row["name"]]) for row in worst], cells.bucket_us


def _by_name(rows: Iterable[Row], names: Iterable[str], cells: data.Buckets) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {name: [None] * cells.number for name in names}
    for row in rows:
        found[row.name][row["index"]] = row.value
    return found


# -- over the whole history ---------------------------------------------------------------------------------------


def _verdict(audit: AuditResult, leases: int) -> data.Verdict:
    kinds = {kind.replace("_", " "): number for kind, number in audit.kinds.items()}
    examples = [one.text for one in audit.examples]
    return data.Verdict(leases=leases, jobs=audit.jobs, kinds=kinds, examples=examples)


def _run_times(durations: Sequence[Row]) -> list[data.RunTimes]:
    """Slowest first."""
    found = []
    for row in durations:
        if row.type is not None and row.run_p50_us is not None:
            times = {f"{name}_us": row[f"run_{name}_us"] for name in ("p50", "p95", "p99")}
            found.append(data.RunTimes(type=row.type, executions=row.executions, **times))
    return sorted(found, key=lambda one: (-one.p95_us, one.type))


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in frame.collect()]
