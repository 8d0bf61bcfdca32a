"""A queue's state as bytes: what was written reads the same, and costs little."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from jobs_here import NOW, a_job

from taskharbor.drivers.contract import Ack, Fail, JobFilter, QueueSettings
from taskharbor.drivers.objectstore import encoding, stored_jobs
from taskharbor.drivers.objectstore.archived import QueueState
from taskharbor.drivers.objectstore.building import segment_of
from taskharbor.drivers.objectstore.encoding import QueueCodec
from taskharbor.drivers.objectstore.numbers import Numbering, take_stamps
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import SchemaMismatch
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, UpdateFlags

CODEC = QueueCodec("q")


def enqueue(state: QueueState, *jobs: JobRecord) -> None:
    first = take_stamps(len(jobs))
    state.enqueue_known(jobs, range(first, first + len(jobs)), NOW, {})


def read_again(state: QueueState) -> QueueState:
    return CODEC.decode(b"".join(CODEC.encode(state)))


def shown(state: QueueState) -> tuple[Any, ...]:
    return (
        state.listed(JobFilter(), NOW, 1000, None, {}),
        state.stats_at(NOW),
        state.rows_after(0, 1000, {}),
        state.next_due(("q",), ALWAYS),
        state.settings("q"),
    )


def a_full_state() -> QueueState:
    """Every state a job can be in, with every kind of field filled."""
    state = CODEC.empty()
    state.configure("q", QueueSettings(max_inflight=5, failure_queue="failed", keep_dead_us=None))
    enqueue(
        state,
        a_job(key="k", headers={"trace": "1"}, payload=b"\x00\xff", idempotency_key="i", priority=3),
        a_job(),
        a_job(),
        a_job(),
    )
    held = state.reserve("q", 4, 10 * SECOND, NOW, "w", None)
    boom = Failure("ValueError", "boom", "Traceback")
    state.settle(
        [Ack(held[1].id, held[1].token or "", b"r"), Fail(held[2].id, held[2].token or "", 1, boom)], NOW
    )
    enqueue(
        state,
        a_job(key="k", update=UpdateFlags(run_at="later")),
        a_job(run_at_us=NOW + SECOND),
        a_job(type="sms", max_stalls=2, timeout_us=SECOND),
    )
    state.cancel([held[3].id], NOW)
    return state


def test_a_state_that_was_written_and_read_shows_the_same() -> None:
    state = a_full_state()
    again = read_again(state)
    assert shown(again) == shown(state)
    assert again.outbox == state.outbox
    assert not again.touched


def test_a_state_that_was_read_goes_on_as_the_one_that_was_written() -> None:
    """Line by line: the same jobs are reserved in the same order, the same leases end at the same time."""
    state = a_full_state()
    again = read_again(state)
    for now in (NOW, NOW + SECOND, NOW + 11 * SECOND):
        ours = [job.id for job in state.reserve("q", 2, SECOND, now, "w", None)]
        assert [job.id for job in again.reserve("q", 2, SECOND, now, "w", None)] == ours
    numberless = [(row.job_id, row.outcome, row.ended_at) for row in state.tail.rows]
    assert [(row.job_id, row.outcome, row.ended_at) for row in again.tail.rows] == numberless


def test_an_empty_state_is_one_that_nobody_used() -> None:
    again = read_again(CODEC.empty())
    assert again.queue is None
    assert again.stats_at(NOW) is None


def test_only_what_changed_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = CODEC.empty()
    enqueue(state, *(a_job() for _ in range(100)))
    again = read_again(state)
    encoded: list[int] = []

    def noting(number: int, record: JobRecord) -> bytes:
        encoded.append(number)
        return stored_jobs.encode_job(number, record)

    monkeypatch.setattr("taskharbor.drivers.objectstore.kept.encode_job", noting)
    for one in (state, again):
        encoded.clear()
        CODEC.encode(one)
        assert encoded == []
        one.reserve("q", 3, SECOND, NOW, "w", None)
        CODEC.encode(one)
        assert len(encoded) == 3


def test_looking_touches_nothing() -> None:
    state = read_again(a_full_state())
    shown(state)
    state.reserve("q", 5, SECOND, NOW, "w", [])
    assert not state.touched


def test_numbers_of_a_queue_grow_even_where_the_clock_does_not() -> None:
    numbering = Numbering("q/0")
    numbers = [numbering.number(stamp) for stamp in (1000, 1000, 5, 1001, 2000)]
    assert numbers == sorted(set(numbers))
    assert Numbering("r/0").number(1000) != numbers[0]


def test_jobs_of_a_version_with_other_fields_are_read_by_their_names() -> None:
    """One field that we do not know any more, one that it did not know yet."""
    record = a_job(payload=b"p", key="k", update=UpdateFlags(run_at="yes"))
    values = msgspec.structs.asdict(record) | {"colour": "red"}
    del values["progress"]
    piece = msgspec.msgpack.encode([7, *values.values()])
    assert stored_jobs.job_decoder(tuple(values))(piece) == (7, record)


def test_a_state_in_a_newer_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"".join(CODEC.encode(a_full_state()))
    monkeypatch.setattr(encoding, "FORMAT", 0)
    with pytest.raises(SchemaMismatch, match="use a newer one"):
        CODEC.decode(body)


def test_dead_jobs_stay_in_the_state_and_ended_ones_may_leave() -> None:
    state = a_full_state()
    assert {slot.record.state for slot in state.ended_slots()} <= {JobState.DONE, JobState.CANCELLED}
    assert state.ended_count == len(state.ended_slots()) == 1


def test_a_segment_that_was_given_up_never_becomes_part_of_the_queue() -> None:
    """Its writer may only have been asleep, and its object may be gone."""
    state = a_full_state()
    rows = list(zip(state.tail.rows, state.tail.pieces, strict=True))
    jobs = [((slot.seq, slot.record), slot.piece()) for slot in state.ended_slots()]
    entry = segment_of("slow", "q", rows, jobs).entry
    numbers = [row.number for row, _ in rows], [number for (number, _), _ in jobs]
    before = shown(state)
    assert not state.fold_in(entry, *numbers), "it was never begun"
    state.begin("slow", NOW)
    state = read_again(state)
    state.abandon("slow", 0)
    state = read_again(state)
    assert not state.fold_in(entry, *numbers)
    assert shown(state) == before
    assert state.retired == [("slow", 0)]
