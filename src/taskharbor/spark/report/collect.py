"""The numbers of the report, from the tables of a lake. What comes to the driver is bounded, however large the lake is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from taskharbor.jobs import Micros
from taskharbor.spark.lake.buckets import HOUR_US
from taskharbor.spark.report import assembly, movements, overall
from taskharbor.spark.report.assembly import OTHER_QUEUES
from taskharbor.spark.report.data import Objective, ReportData, WorkerLoad
from taskharbor.spark.report.span import Buckets, choose, choose_cells
from taskharbor.spark.report.wording import HOUR

if TYPE_CHECKING:
    from taskharbor.spark.audit.result import AuditResult
    from taskharbor.spark.lake.layout import Lake

QUEUES_SHOWN = 5
WORKERS_SHOWN = 24
CELLS_SHOWN = 120
OBJECTIVES_SHOWN = 12
FINE_WORKERS = 12 * HOUR
"""Up to here the load of workers is counted from the rows: of so few hours a cell each would say little."""


def collect(spark: SparkSession, lake: Lake, *, audit: AuditResult | None = None) -> ReportData:
    """Everything the report shows. Without the result of an audit it says that none was made."""
    return _Collecting(spark, lake).all(audit)


class _Collecting:
    def __init__(self, spark: SparkSession, lake: Lake) -> None:
        self._spark = spark
        self._lake = lake
        # One state of the lake for all queries, whatever is committed meanwhile.
        self._manifest = lake.manifest()

    def all(self, audit: AuditResult | None) -> ReportData:
        made_at = time.time_ns() // 1000
        (seen,) = (
            self._read("gold.hours")
            .agg(
                F.unix_micros(F.min("hour")).alias("first"),
                F.unix_micros(F.max("hour")).alias("last"),
                F.sort_array(F.collect_set("source")).alias("sources"),
                F.count_distinct("source", "queue").alias("queues"),
            )
            .collect()
        )
        if seen["first"] is None:
            return ReportData(sources=[], start_us=0, bucket_us=1, buckets=0, made_at_us=made_at)
        buckets = self._buckets(seen["first"], seen["last"] + HOUR_US - 1)
        busiest = self._busiest_queues()
        label = _label([row["queue"] for row in busiest])
        moved = assembly.by_label(self._movements(buckets, label).collect(), buckets)
        lifecycles = overall.with_time_taken(self._read("silver.lifecycles"))
        states = overall.states(lifecycles)
        durations = overall.durations(self._read("state.durations"))
        workers, number_of_workers = self._workers(buckets)
        totals = assembly.totals(
            states, durations, busiest[0], queues=seen["queues"], workers=number_of_workers
        )
        objectives, objective_step = self._objectives(buckets)
        return ReportData(
            sources=seen["sources"],
            start_us=buckets.start_us,
            bucket_us=buckets.bucket_us,
            buckets=buckets.number,
            made_at_us=made_at,
            verdict=None if audit is None else assembly.verdict(audit, leases=totals.executions),
            totals=totals,
            flow=assembly.flow(moved, buckets),
            backlog=assembly.backlog(moved, self._waiting_at_the_end(label)),
            wait=assembly.percentiles(self._waits(buckets).collect(), buckets),
            run_times=overall.run_times(durations),
            concurrency=assembly.concurrency(moved, self._limits(label), buckets),
            workers=workers[0],
            worker_bucket_us=workers[1],
            workers_left_out=number_of_workers - len(workers[0]),
            errors=overall.errors(self._read("gold.errors")),
            lease_ends=assembly.lease_ends(states),
            job_ends=assembly.job_ends(totals),
            slowest=overall.slowest(lifecycles),
            most_tried=overall.most_tried(lifecycles),
            objectives=objectives,
            objective_bucket_us=objective_step,
        )

    # -- over time ------------------------------------------------------------------------------------------------

    def _buckets(self, first: Micros, last: Micros) -> Buckets:
        """The hours say how long it took; where that is short, the rows say it exactly."""
        if last - first <= 3 * HOUR:
            (row,) = (
                self._read("silver.attempts")
                .agg(
                    F.unix_micros(F.min("created_at")).alias("first"),
                    F.unix_micros(F.max("ended_at")).alias("last"),
                )
                .collect()
            )
            if row["first"] is not None:
                first, last = row["first"], max(row["last"], row["first"])
        return choose(first, last)

    def _movements(self, buckets: Buckets, label: Column) -> DataFrame:
        if buckets.origin == "silver.attempts":
            return movements.movements_of_rows(
                self._read("silver.attempts"), self._read("silver.lifecycles"), buckets, label
            )
        time_column = "minute" if buckets.origin == "gold.minutes" else "hour"
        return movements.movements_of_gold(self._read(buckets.origin), time_column, buckets, label)

    def _waits(self, buckets: Buckets) -> DataFrame:
        if buckets.origin == "silver.attempts":
            return movements.waits_of_rows(self._read("silver.attempts"), buckets)
        return movements.waits_of_histograms(self._read("state.durations"), buckets)

    def _waiting_at_the_end(self, label: Column) -> dict[str, int]:
        last = self._read("gold.backlog").groupBy("source", "queue")
        found = last.agg(F.max_by("waiting", "minute").alias("waiting"))
        rows = found.groupBy(label.alias("label")).agg(F.sum("waiting").alias("waiting")).collect()
        return {row["label"]: row["waiting"] for row in rows}

    # -- queues and workers -----------------------------------------------------------------------------------------

    def _busiest_queues(self) -> list[Row]:
        by_queue = self._read("gold.hours").groupBy("queue").agg(F.sum("starts").alias("starts"))
        return by_queue.orderBy(F.desc("starts"), "queue").limit(QUEUES_SHOWN).collect()

    def _limits(self, label: Column) -> dict[str, int]:
        """W as it was last. Queues that share a name in several stores have no common limit to draw."""
        seen = self._read("gold.concurrency").groupBy("source", "queue")
        last = seen.agg(F.max_by("max_inflight", "minute").alias("limit"))
        rows = last.groupBy(label.alias("label")).agg(
            F.count("*").alias("queues"), F.max("limit").alias("limit")
        )
        return {
            row["label"]: row["limit"]
            for row in rows.collect()
            if row["queues"] == 1 and row["limit"] is not None
        }

    def _workers(self, buckets: Buckets) -> tuple[tuple[list[WorkerLoad], Micros], int]:
        gold = self._read("gold.workers")
        by_worker = gold.groupBy("worker").agg(F.sum("executions").alias("executions"))
        busiest = by_worker.orderBy(F.desc("executions"), "worker").limit(WORKERS_SHOWN).collect()
        number = by_worker.count() if len(busiest) == WORKERS_SHOWN else len(busiest)
        names = [row["worker"] for row in busiest]
        if buckets.end_us - buckets.start_us <= FINE_WORKERS:
            step = choose_cells(buckets, buckets.bucket_us, CELLS_SHOWN)
            chosen = self._read("silver.attempts").where(F.col("worker").isin(names))
            loads = movements.worker_loads_of_rows(chosen, step)
        else:
            step = choose_cells(buckets, HOUR_US, CELLS_SHOWN)
            loads = movements.worker_loads_of_gold(gold.where(F.col("worker").isin(names)), step)
        first = buckets.start_us // step
        cells = (buckets.end_us - 1) // step - first + 1
        by_name: dict[str, list[float | None]] = {name: [None] * cells for name in names}
        for row in loads.collect():
            if 0 <= row["at"] - first < cells:
                by_name[row["worker"]][row["at"] - first] = row["busy_us"] / step
        shown = [
            WorkerLoad(worker=row["worker"], executions=row["executions"], load=by_name[row["worker"]])
            for row in sorted(busiest, key=lambda row: row["worker"])
        ]
        return (shown, step), number

    def _objectives(self, buckets: Buckets) -> tuple[list[Objective], Micros]:
        step = choose_cells(buckets, HOUR_US, CELLS_SHOWN)
        first = buckets.start_us // step
        cells = (buckets.end_us - 1) // step - first + 1
        gold = self._read("gold.objectives")
        worst = (
            gold.groupBy("objective")
            .agg(F.first("queue").alias("queue"), F.sum("total").alias("total"), F.sum("bad").alias("bad"))
            .orderBy(F.desc(F.col("bad") / F.col("total")), "objective")
            .limit(OBJECTIVES_SHOWN)
            .collect()
        )
        burn: dict[str, list[float | None]] = {row["objective"]: [None] * cells for row in worst}
        at = F.floor(F.unix_micros("hour") / F.lit(step)).cast("long")
        rate = F.sum("bad") / F.sum("total") / (F.lit(1.0) - F.max("target"))
        if burn:
            rates = gold.where(F.col("objective").isin(*burn)).groupBy("objective", at.alias("at"))
            for row in rates.agg(rate.alias("rate")).collect():
                if 0 <= row["at"] - first < cells:
                    burn[row["objective"]][row["at"] - first] = row["rate"]
        shown = [
            Objective(
                name=row["objective"],
                queue=row["queue"] or "all queues",
                total=row["total"],
                bad=row["bad"],
                burn=burn[row["objective"]],
            )
            for row in worst
        ]
        return shown, step

    def _read(self, table: str) -> DataFrame:
        return self._lake.read(self._spark, table, manifest=self._manifest)


def _label(queues: Sequence[str]) -> Column:
    """The name under which a queue is drawn: its own for the busiest, one for all others."""
    return F.when(F.col("queue").isin(*queues), F.col("queue")).otherwise(F.lit(OTHER_QUEUES))
