"""The reference model on its trickiest rules, so that it is not trusted on faith alone."""

from __future__ import annotations

from typing import Any

import msgspec

from records import make_record
from taskharbor.drivers.contract import Ack, Fail, FailurePayload, JobFilter, QueueSettings, Release, RetryAt
from taskharbor.errors import JobNotInflight, KeyConflict, LeaseExpired, LeaseMismatch
from taskharbor.jobs import Failure, JobRecord, JobState, Outcome, UpdateFlags
from taskharbor_testkit.model import Model

BOOM = Failure("ValueError", "boom")


def job(job_id: str, *, run_at: int = 0, **fields: Any) -> JobRecord:
    return make_record(job_id, now=0, run_at_us=run_at, **fields)


def lease(model: Model, now: int = 0, lease_for: int = 10) -> tuple[str, str]:
    (held,) = model.reserve("q", limit=1, lease_for=lease_for, now=now, worker="w")
    assert held.token is not None
    return held.id, held.token


def test_claim_order_is_priority_then_run_at_then_insertion() -> None:
    model = Model()
    model.enqueue([job("d"), job("c", run_at=-1), job("a", priority=1), job("b"), job("e")], now=0)
    assert [one.id for one in model.runnable("q", 0)] == ["a", "c", "d", "b", "e"]


def test_validation_order() -> None:
    model = Model()
    model.enqueue([job("a")], now=0)
    job_id, token = lease(model)
    assert isinstance(model.settle([Ack(job_id, "wrong")], now=99)[0], LeaseMismatch)
    assert isinstance(model.settle([Ack(job_id, token)], now=10)[0], LeaseExpired)
    assert model.settle([Ack(job_id, token)], now=9) == [None]
    assert isinstance(model.settle([RetryAt(job_id, token, 0, 1, BOOM)], now=9)[0], JobNotInflight)
    assert model.settle([Ack(job_id, "whatever"), Fail(job_id, "whatever", 1, BOOM)], now=99) == [None, None]
    assert len(model.log) == 1


def test_a_blocked_job_gathers_flags_and_hands_them_on_at_the_merge() -> None:
    model = Model()
    model.enqueue([job("a", key="k", max_attempts=9)], now=0)
    job_id, token = lease(model)
    model.enqueue([job("b", key="k", run_at=50, update=UpdateFlags(payload=False, run_at="later"))], now=0)
    model.enqueue([job("c", key="k", payload=b"new", update=UpdateFlags(reset_counts=True))], now=0)
    assert model.jobs["b"].update == UpdateFlags(payload=True, run_at="later", retry=False, reset_counts=True)
    assert model.jobs["b"].run_at_us == 50
    model.settle([RetryAt(job_id, token, 20, 1, BOOM)], now=5)
    survivor, merged = model.jobs["a"], model.jobs["b"]
    assert (survivor.payload, survivor.run_at_us, survivor.attempts) == (b"new", 50, 0)
    assert survivor.state is JobState.SCHEDULED
    assert (merged.state, merged.merged_into) == (JobState.CANCELLED, "a")
    assert [row.outcome for row in model.log] == [Outcome.RETRIED, Outcome.MERGED]
    assert model.stats(now=5)[0].cancelled_total == 1


def test_an_end_frees_the_blocked_job_by_its_own_run_at() -> None:
    model = Model()
    model.enqueue([job("a", key="k")], now=0)
    job_id, token = lease(model)
    model.enqueue([job("b", key="k", run_at=50)], now=0)
    model.settle([Ack(job_id, token)], now=5)
    assert model.jobs["b"].state is JobState.SCHEDULED
    assert [one.id for one in model.runnable("q", 50)] == ["b"]


def test_a_stall_kills_by_either_bound_and_serves_the_failure_queue() -> None:
    for fields in ({"max_attempts": 1}, {"max_attempts": 9, "max_stalls": 1}):
        model = Model()
        model.configure("q", QueueSettings(failure_queue="f"), now=0)
        model.enqueue([job("a", **fields)], now=0)
        lease(model)
        model.reclaim_jobs(model.expired(10), now=10)
        assert model.jobs["a"].state is JobState.DEAD
        told = model.listing(JobFilter(queue="f"), now=10)
        assert [msgspec.json.decode(one.payload, type=FailurePayload).stalls for one in told] == [1]


def test_an_expired_lease_frees_its_place_under_w() -> None:
    model = Model()
    model.configure("q", QueueSettings(max_inflight=1), now=0)
    model.enqueue([job("a", priority=1, max_attempts=1), job("b")], now=0)
    lease(model)
    assert model.reserve("q", limit=9, lease_for=10, now=9, worker="w") == []
    assert lease(model, now=10)[0] == "b"


def test_an_idempotency_key_leads_to_the_job_it_updated_and_goes_with_it() -> None:
    model = Model()
    model.enqueue([job("a", key="k")], now=0)
    wish = job("b", key="k", idempotency_key="i")
    assert [one.id for one in model.enqueue([wish, wish], now=0)] == ["a", "a"]
    model.cancel(["a"], now=0)
    assert model.enqueue([wish], now=0)[0].id == "a"
    model.forget(["a"])
    assert model.enqueue([wish], now=0)[0].id == "b"


def test_requeue_conflicts_with_a_waiting_key_and_blocks_behind_an_inflight_one() -> None:
    model = Model()
    model.enqueue([job("a", key="k")], now=0)
    job_id, token = lease(model)
    model.settle([Fail(job_id, token, 1, BOOM)], now=1)
    model.enqueue([job("b", key="k")], now=1)
    assert isinstance(model.requeue(["a"], now=2)[0], KeyConflict)
    job_id, token = lease(model, now=2)
    assert model.requeue(["a"], now=3) == [JobState.BLOCKED]
    model.settle([Release(job_id, token)], now=4)
    assert model.jobs["a"].merged_into == "b"


def test_a_cancel_request_decides_at_retry_release_and_stall() -> None:
    for settle in (True, False):
        model = Model()
        model.enqueue([job("a")], now=0)
        job_id, token = lease(model)
        assert model.cancel(["a"], now=1) == [JobState.INFLIGHT]
        if settle:
            model.settle([RetryAt(job_id, token, 5, 1, BOOM)], now=2)
            assert (model.log[-1].outcome, model.jobs["a"].attempts) == (Outcome.CANCELLED, 1)
        else:
            model.reclaim_jobs(["a"], now=10)
            assert (model.log[-1].outcome, model.jobs["a"].stalls) == (Outcome.EXPIRED, 1)
        assert model.jobs["a"].state is JobState.CANCELLED


def test_a_copy_is_independent() -> None:
    model = Model()
    model.enqueue([job("a")], now=0)
    twin = model.copy()
    lease(twin)
    assert model.jobs["a"].state is JobState.READY
