"""The audit on rows made by hand: exact rows in, exact violation out; and nothing where nothing is wrong.

All cases are audited together, each as a source of its own: starting Spark jobs costs more than running them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from taskharbor.bulk.tables import ATTEMPTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def lease(
    seq: int, job: str, fence: int, start: float, end: float, outcome: str = "done", **other: Any
) -> Row:
    """A row that ended a lease of 30 seconds; instants in seconds."""
    state = {"retried": "scheduled", "released": "ready", "expired": "ready"}.get(outcome, outcome)
    row: Row = {
        "seq": seq,
        "job_id": job,
        "queue": "q",
        "type": "t",
        "key": None,
        "priority": 0,
        "fence": fence,
        "worker": "w",
        "created_at": 0,
        "run_at": 0,
        "reserved_at": start,
        "lease_expires_at": start + 30,
        "ended_at": end,
        "outcome": outcome,
        "state": state,
        "error_type": None,
        "error_message": None,
        "payload_size": 0,
    }
    return row | other


def unleased(seq: int, job: str, fence: int, end: float, outcome: str, state: str, **other: Any) -> Row:
    return lease(
        seq,
        job,
        fence,
        0,
        end,
        outcome,
        state=state,
        reserved_at=None,
        lease_expires_at=None,
        worker=None,
        **other,
    )


class Case(NamedTuple):
    rows: list[Row]
    finds: list[tuple[Any, ...]] = []  # noqa: RUF012
    """kind, job, other job, fence, other fence"""
    limits: list[tuple[str, int | None, float]] = []  # noqa: RUF012
    """queue, W, seen at"""
    live: list[tuple[str, str, int]] | None = None
    """job, state, fence"""


BROKEN: dict[str, Case] = {
    "two leases of a job overlap by a moment": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 2, 19.999999, 25)],
        [("overlapping_leases", "a", None, 2, 1)],
    ),
    "a lease overlaps one that expired later": Case(
        [lease(1, "a", 1, 10, 45, "expired", lease_expires_at=40), lease(2, "a", 2, 39, 50)],
        [("overlapping_leases", "a", None, 2, 1)],
    ),
    "a lease without extent lies within another": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 2, 15, 15)],
        [("overlapping_leases", "a", None, 2, 1)],
    ),
    "a later row has a lower fence": Case(
        [lease(1, "a", 2, 10, 20, "retried"), lease(2, "a", 1, 30, 40)],
        [("fence_out_of_order", "a", None, 1, 2)],
    ),
    "a row without a lease carries an older fence": Case(
        [
            lease(1, "a", 1, 10, 11, "retried"),
            lease(2, "a", 2, 20, 21, "retried"),
            unleased(3, "a", 1, 22, "cancelled", "cancelled"),
        ],
        [("fence_out_of_order", "a", None, 1, 2)],
    ),
    "two leases have one fence": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 1, 30, 40)],
        [("fence_used_twice", "a", None, 1, 1)],
    ),
    "a lease left no row": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 3, 30, 40)],
        [("fence_gap", "a", None, 3, 1)],
    ),
    "the first lease left no row, in a log that reaches back far enough": Case(
        [lease(1, "old", 1, 1, 2), lease(2, "a", 2, 30, 40, created_at=20, run_at=20)],
        [("fence_gap", "a", None, 2, 0)],
    ),
    "a job was cancelled with the fence of a lease that left no row": Case(
        [lease(1, "a", 1, 10, 20, "retried"), unleased(2, "a", 2, 30, "cancelled", "cancelled")],
        [("fence_gap", "a", None, 2, 1)],
    ),
    "three leases where two are allowed": Case(
        [lease(1, "a", 1, 10, 20), lease(2, "b", 1, 11, 20), lease(3, "c", 1, 19.999999, 25)],
        [("limit_exceeded", "c", None, 1, None)],
        limits=[("q", 2, 100)],
    ),
    "a lease that began many buckets before still counts": Case(
        [
            lease(1, "a", 1, 10, 5000, lease_expires_at=5030),
            *(lease(n, f"s{n}", 1, 30 + n, 30.5 + n) for n in range(2, 900)),
            lease(900, "b", 1, 4999, 5001),
        ],
        [("limit_exceeded", "b", None, 1, None)]
        + [("limit_exceeded", f"s{n}", None, 1, None) for n in range(2, 900)],
        limits=[("q", 1, 100)],
    ),
    "the larger of two limits was exceeded between them": Case(
        [lease(n, f"j{n}", 1, 10 + n / 10, 20) for n in range(1, 5)],
        [("limit_exceeded", "j4", None, 1, None)],
        limits=[("q", 2, 5), ("q", 3, 60)],
    ),
    "leased before it was due": Case(
        [lease(1, "a", 1, 10, 20, run_at=10.000001)], [("started_early", "a", None, 1, None)]
    ),
    "two jobs of a key at once": Case(
        [lease(1, "a", 1, 10, 20, key="k"), lease(2, "b", 1, 19, 30, key="k")],
        [("key_held_twice", "b", "a", 1, 1)],
    ),
    "done and then dead": Case(
        [lease(1, "a", 1, 10, 20), lease(2, "a", 2, 30, 40, "dead")], [("ended_twice", "a", None, 2, 1)]
    ),
    "cancelled and then leased": Case(
        [unleased(1, "a", 0, 5, "cancelled", "cancelled"), lease(2, "a", 1, 30, 40, "retried")],
        [("active_after_end", "a", None, 1, 0)],
    ),
    "requeued though done": Case(
        [lease(1, "a", 1, 10, 20), unleased(2, "a", 1, 30, "requeued", "ready")],
        [("requeued_alive", "a", None, 1, 1)],
    ),
    "settled at the instant the lease was over": Case(
        [lease(1, "a", 1, 10, 40)], [("settled_too_late", "a", None, 1, None)]
    ),
    "expired while it was valid": Case(
        [lease(1, "a", 1, 10, 39.999999, "expired")], [("expired_too_early", "a", None, 1, None)]
    ),
    "ended before it began": Case([lease(1, "a", 1, 10, 9)], [("times_out_of_order", "a", None, 1, None)]),
    "leased long before it was created": Case(
        [lease(1, "a", 1, 10, 20, created_at=15.5)], [("times_out_of_order", "a", None, 1, None)]
    ),
    "over before it began": Case(
        [lease(1, "a", 1, 10, 12, "expired", lease_expires_at=10)],
        [("times_out_of_order", "a", None, 1, None)],
    ),
    "done, and yet ready": Case(
        [lease(1, "a", 1, 10, 20, state="ready")], [("state_contradicts_outcome", "a", None, 1, None)]
    ),
    "requeued to be scheduled": Case(
        [lease(1, "a", 1, 10, 20, "dead"), unleased(2, "a", 1, 30, "requeued", "scheduled")],
        [("state_contradicts_outcome", "a", None, 1, None)],
    ),
    "done without a lease": Case(
        [unleased(1, "a", 0, 20, "done", "done")], [("lease_contradicts_outcome", "a", None, 0, None)]
    ),
    "merged under a lease": Case(
        [lease(1, "a", 1, 10, 20, "merged", state="cancelled")],
        [("lease_contradicts_outcome", "a", None, 1, None)],
    ),
    "an outcome nobody knows": Case(
        [lease(1, "a", 1, 10, 20, "vanished", state="done")], [("unknown_outcome", "a", None, 1, None)]
    ),
    "a row is there twice": Case(
        [lease(1, "a", 1, 10, 20), lease(1, "a", 1, 10, 20)], [("duplicate_row", "a", None, 1, 1)]
    ),
    "a number belongs to two rows": Case(
        [lease(1, "a", 1, 10, 20), lease(1, "b", 1, 10, 20)], [("duplicate_row", "a", "b", 1, 1)]
    ),
    "a lease ended twice, under two numbers": Case(
        [lease(1, "a", 1, 10, 20), lease(2, "a", 1, 10, 20)], [("duplicate_row", "a", None, 1, 1)]
    ),
    "a copied row does not count twice in W": Case(
        [lease(1, "a", 1, 10, 20), lease(1, "a", 1, 10, 20), lease(2, "b", 1, 12, 20)],
        [("duplicate_row", "a", None, 1, 1)],
        limits=[("q", 2, 100)],
    ),
    "the store has lost a job": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "b", 1, 10, 20)],
        [("lost_job", "a", None, 1, None)],
        live=[("b", "done", 1)],
    ),
    "the store has an older state than the log": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 2, 30, 40, "retried"), lease(3, "b", 1, 10, 20)],
        [
            ("store_contradicts_log", "a", None, 2, 1),
            ("store_contradicts_log", "b", None, 1, 1),
        ],
        live=[("a", "ready", 1), ("b", "ready", 1)],
    ),
}

CLEAN: dict[str, Case] = {
    "a lease begins when the one before ends": Case(
        [lease(1, "a", 1, 10, 20, "retried"), lease(2, "a", 2, 20, 30)], limits=[("q", 1, 0)]
    ),
    "leases without extent, all at one instant": Case(
        [
            lease(1, "a", 1, 10, 10, "released"),
            lease(2, "a", 2, 10, 10, "released"),
            lease(3, "a", 3, 10, 20),
        ],
        limits=[("q", 1, 0)],
    ),
    "an expired lease frees its place before anybody sweeps": Case(
        [lease(1, "a", 1, 10, 60, "expired", state="dead"), lease(2, "b", 1, 40, 50)], limits=[("q", 1, 0)]
    ),
    "requeued, and the fence goes on": Case(
        [
            lease(1, "a", 1, 10, 20, "dead"),
            unleased(2, "a", 1, 30, "requeued", "ready"),
            lease(3, "a", 2, 40, 50, "dead"),
            unleased(4, "a", 2, 60, "requeued", "blocked"),
            unleased(5, "a", 2, 70, "merged", "cancelled"),
        ]
    ),
    "an expired job that absorbed one which is due later": Case(
        [
            lease(1, "a", 1, 10, 40, "expired", state="scheduled", key="k"),
            unleased(2, "b", 0, 40, "merged", "cancelled", key="k"),
            lease(3, "a", 2, 90, 95, key="k"),
        ]
    ),
    "the first rows of a job have been removed by retention": Case(
        [lease(7, "a", 4, 10, 20, "retried"), lease(9, "a", 5, 30, 40)]
    ),
    "an id is given to another job": Case(
        [lease(1, "a", 1, 10, 20), lease(2, "a", 1, 110, 120, created_at=100, run_at=100)]
    ),
    "a job that was due before it was stored is claimed by a clock that is behind": Case(
        [lease(1, "a", 1, 10, 20, created_at=11, run_at=9)]
    ),
    "two jobs of a key, one after the other": Case(
        [lease(1, "a", 1, 10, 20, key="k"), lease(2, "b", 1, 20, 30, key="k")]
    ),
    "one key in two queues": Case(
        [lease(1, "a", 1, 10, 20, key="k"), lease(2, "b", 1, 15, 30, key="k", queue="r")]
    ),
    "a lowered limit revokes no lease": Case(
        [lease(n, f"j{n}", 1, 10 + n / 10, 300, lease_expires_at=330) for n in range(1, 4)],
        limits=[("q", 3, 0), ("q", 3, 100), ("q", 1, 200), ("q", 1, 400)],
    ),
    "between two limits the larger one counts": Case(
        [lease(n, f"j{n}", 1, 150 + n / 10, 160) for n in range(1, 4)],
        limits=[("q", 1, 0), ("q", 1, 100), ("q", 3, 200)],
    ),
    "around no limit nothing is checked": Case(
        [lease(n, f"j{n}", 1, 150 + n / 10, 160) for n in range(1, 4)],
        limits=[("q", 1, 0), ("q", None, 200), ("q", 1, 400)],
    ),
    "the store is ahead of the log": Case(
        [
            lease(1, "a", 1, 10, 20, "retried"),
            lease(2, "b", 1, 10, 20, "dead"),
            lease(3, "c", 1, 10, 20),
        ],
        live=[("a", "inflight", 2), ("b", "ready", 1)],
    ),
}

CASES = BROKEN | CLEAN
INSTANTS = ("created_at", "run_at", "reserved_at", "lease_expires_at", "ended_at")


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> dict[str, list[Any]]:
    """What the audit says of each case."""
    from taskharbor.spark.audit import audit

    rows = []
    for name, case in CASES.items():
        for row in case.rows:
            timed = {key: at(row[key]) for key in INSTANTS if row[key] is not None}
            rows.append(tuple((row | timed)[column] for column in ATTEMPTS.names) + (name,))
    attempts = spark.createDataFrame(rows, attempts_schema())
    limits = spark.createDataFrame(
        [(name, *limit[:2], at(limit[2])) for name, case in CASES.items() for limit in case.limits],
        "source string, queue string, max_inflight int, observed_at timestamp",
    )
    # Where a case says nothing of the store, it has what the log ended with.
    live = [
        (name, job, state, fence, START)
        for name, case in CASES.items()
        for job, state, fence in (case.live if case.live is not None else in_the_store(case.rows))
    ]
    jobs = spark.createDataFrame(
        live, "source string, id string, state string, fence long, created_at timestamp"
    )
    by_case = defaultdict(list)
    for violation in audit(attempts, live_jobs=jobs, limits=limits).collect():
        by_case[violation["source"]].append(violation)
    return by_case


def attempts_schema() -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StringType

    return from_arrow_schema(ATTEMPTS).add("source", StringType())


def in_the_store(rows: list[Row]) -> list[tuple[str, str, int]]:
    last = {row["job_id"]: row for row in sorted(rows, key=lambda row: row["seq"])}
    return [(job, row["state"], row["fence"]) for job, row in last.items()]


@pytest.mark.parametrize("name", BROKEN)
def test_the_audit_finds_exactly_what_is_wrong(found: dict[str, list[Any]], name: str) -> None:
    seen = [(v["kind"], v["job_id"], v["other_job_id"], v["fence"], v["other_fence"]) for v in found[name]]
    assert Counter(seen) == Counter(BROKEN[name].finds)
    for violation in found[name]:
        assert violation["job_id"] in violation["text"]
        assert "2026-03-01 12:" in violation["text"] or "2026-03-01 13:" in violation["text"]
        assert violation["at"] is not None


@pytest.mark.parametrize("name", CLEAN)
def test_the_audit_finds_nothing_where_nothing_is_wrong(found: dict[str, list[Any]], name: str) -> None:
    assert [violation["text"] for violation in found[name]] == []


def test_every_kind_has_a_case() -> None:
    from taskharbor.spark.audit import Kind

    assert {finding[0] for case in BROKEN.values() for finding in case.finds} == set(Kind)


def test_a_violation_reads_as_a_sentence(found: dict[str, list[Any]]) -> None:
    (violation,) = found["two leases of a job overlap by a moment"]
    assert violation["text"] == (
        "job a was leased (lease 2) at 2026-03-01 12:00:19.999999 while lease 1, from 2026-03-01 12:00:10, "
        "was valid until 2026-03-01 12:00:20"
    )
