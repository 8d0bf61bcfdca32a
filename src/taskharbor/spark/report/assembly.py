"""From the rows that queries gave to what the report shows: pure functions, nothing of Spark but its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import Row

from taskharbor.spark.report.data import Backlog, Concurrency, Flow, Percentiles, Totals, Verdict
from taskharbor.spark.report.movements import COUNTED
from taskharbor.spark.report.overall import LEASE_ENDS
from taskharbor.spark.report.span import Buckets

if TYPE_CHECKING:
    from taskharbor.spark.audit.result import AuditResult

OTHER_QUEUES = "other queues"
Moved: TypeAlias = dict[str, dict[str, list[int]]]
"""Queue (as it is drawn) -> name of what is counted -> a number per bucket."""


def verdict(audit: AuditResult, *, leases: int) -> Verdict:
    return Verdict(
        leases=leases,
        jobs=audit.jobs,
        kinds={kind.replace("_", " "): number for kind, number in audit.kinds.items()},
        examples=[example.text for example in audit.examples],
    )


def by_label(rows: Iterable[Row], buckets: Buckets) -> Moved:
    """label -> name -> a value per bucket; the busiest first, the others last."""
    found: Moved = {}
    for row in rows:
        lists = found.setdefault(row["label"], {name: [0] * buckets.number for name in COUNTED})
        for name in COUNTED:
            lists[name][row["index"]] = row[name]

    def order(label: str) -> tuple[bool, int, str]:
        return label == OTHER_QUEUES, -sum(found[label]["completions"]), label

    return {label: found[label] for label in sorted(found, key=order)}


def flow(moved: Moved, buckets: Buckets) -> Flow:
    def total(name: str) -> list[int]:
        return [sum(lists[name][index] for lists in moved.values()) for index in range(buckets.number)]

    return Flow(
        arrivals=total("arrivals"),
        completions=total("completions"),
        failures=total("failures"),
        retries=total("retries"),
        expiries=total("expiries"),
    )


def backlog(moved: Moved, at_the_end: dict[str, int]) -> list[Backlog]:
    """Counted back from the end, which is known even where the beginning of the history was dropped."""
    shown = []
    for label, lists in moved.items():
        changes = [
            came + again - went
            for came, again, went in zip(lists["arrivals"], lists["requeues"], lists["finished"], strict=True)
        ]
        waiting = float(at_the_end.get(label, 0) - sum(changes))
        heights: list[float] = []
        for change in changes:
            waiting += change
            heights.append(max(0.0, waiting))
        shown.append(Backlog(queue=label, waiting=heights))
    return shown


def concurrency(moved: Moved, limits: dict[str, int], buckets: Buckets) -> list[Concurrency]:
    """Those with a limit first."""
    shown = [
        Concurrency(
            queue=label,
            running=[busy / buckets.bucket_us for busy in lists["busy_us"]],
            limit=limits.get(label),
        )
        for label, lists in moved.items()
    ]
    return sorted(shown, key=lambda one: one.limit is None)


def percentiles(rows: Iterable[Row], buckets: Buckets) -> Percentiles:
    found: dict[str, list[float | None]] = {name: [None] * buckets.number for name in ("p50", "p95", "p99")}
    for row in rows:
        for name, values in found.items():
            values[row["index"]] = row[f"wait_{name}_us"]
    return Percentiles(p50=found["p50"], p95=found["p95"], p99=found["p99"])


def totals(
    states: Sequence[Row], durations: Sequence[Row], busiest: Row, *, queues: int, workers: int
) -> Totals:
    jobs = {row["state"]: row["jobs"] for row in states}
    together = next((row for row in durations if row["type"] is None), None)
    ended = sum(jobs.get(state, 0) for state in ("done", "dead", "cancelled"))

    def overall_time(name: str) -> float | None:
        return None if together is None else together[name]

    return Totals(
        jobs=sum(jobs.values()),
        done=jobs.get("done", 0),
        dead=jobs.get("dead", 0),
        cancelled=jobs.get("cancelled", 0),
        open=sum(jobs.values()) - ended,
        executions=sum(row["executions"] for row in states),
        retried=sum(row["retried"] for row in states),
        expired=sum(row["expired"] for row in states),
        released=sum(row["released"] for row in states),
        wait_p50_us=overall_time("wait_p50_us"),
        wait_p95_us=overall_time("wait_p95_us"),
        run_p50_us=overall_time("run_p50_us"),
        run_p95_us=overall_time("run_p95_us"),
        queues=queues,
        workers=workers,
        busiest_queue=busiest["queue"] if busiest["starts"] else None,
        busiest_executions=busiest["starts"],
    )


def lease_ends(states: Sequence[Row]) -> dict[str, int]:
    """What is left of the executions was cancelled while it ran: the log counts those together with waiting jobs."""
    ends = {name: sum(row[name] for row in states) for name in LEASE_ENDS}
    ends["cancelled"] = max(0, sum(row["executions"] for row in states) - sum(ends.values()))
    return ends


def job_ends(totals: Totals) -> dict[str, int]:
    return {"done": totals.done, "dead": totals.dead, "cancelled": totals.cancelled, "open": totals.open}
