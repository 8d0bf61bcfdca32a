"""The reference model on update flags: the one thing about which the cases of the kit ask the model."""

from __future__ import annotations

from typing import Any

from records import make_record
from taskharbor.drivers.contract import RetryAt
from taskharbor.jobs import Failure, JobRecord, JobState, Outcome, UpdateFlags
from taskharbor_testkit.model import Model


def job(job_id: str, *, run_at: int = 0, **fields: Any) -> JobRecord:
    return make_record(job_id, now=0, run_at_us=run_at, key="k", **fields)


def test_a_blocked_job_gathers_flags_and_hands_them_on_at_the_merge() -> None:
    model = Model()
    model.enqueue([job("a", max_attempts=9)], now=0)
    (held,) = model.reserve("q", limit=1, lease_for=10, now=0, worker="w")
    model.enqueue([job("b", run_at=50, update=UpdateFlags(payload=False, run_at="later"))], now=0)
    model.enqueue([job("c", payload=b"new", update=UpdateFlags(reset_counts=True))], now=0)
    assert model.jobs["b"].update == UpdateFlags(payload=True, run_at="later", retry=False, reset_counts=True)
    assert model.jobs["b"].run_at_us == 50
    model.settle([RetryAt("a", held.token or "", 20, 1, Failure("ValueError", "boom"))], now=5)
    survivor, merged = model.jobs["a"], model.jobs["b"]
    assert (survivor.payload, survivor.run_at_us, survivor.attempts) == (b"new", 50, 0)
    assert survivor.state is JobState.SCHEDULED
    assert (merged.state, merged.merged_into) == (JobState.CANCELLED, "a")
    assert [row.outcome for row in model.log] == [Outcome.RETRIED, Outcome.MERGED]
    assert model.stats(now=5)[0].cancelled_total == 1
