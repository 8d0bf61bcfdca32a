"""A queue's state as bytes: one array, in which jobs and rows stand as they were encoded when they last changed.

Encoding a state is joining pieces, so its cost is that of what changed, and of copying. Decoding happens when a handle first
comes to a queue, and when another writer was there.
"""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.memory.queues import CANCELLED, DEAD, DONE, INFLIGHT
from taskharbor.drivers.objectstore.archived import QueueState
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.kept import KeptQueue, KeptSlot
from taskharbor.drivers.objectstore.packing import array_head
from taskharbor.drivers.objectstore.published import PublishedWrites
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.stored_jobs import FIELDS, job_decoder
from taskharbor.errors import SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

FORMAT = 1


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What is written anew each time."""

    format: int
    is_known: bool
    """Whether anybody ever used the queue."""
    settings: QueueSettings
    stirs: int
    latest_end: Micros
    gone: tuple[int, int, int]
    """How many jobs left done, dead and cancelled."""
    last_job: int
    last_row: int
    outbox: list[JobRecord]
    segments: list[SegmentEntry]
    retired: list[tuple[str, Micros]]
    accepted: dict[str, str]
    """Idempotency key -> job."""
    fields: tuple[str, ...]
    """Of the jobs' records."""
    trimmed: int = 0
    published: PublishedWrites = {}
    begun: list[tuple[str, Micros]] = []
    """Segments that somebody is writing, and since when."""


_Pieces = list[msgspec.Raw]
_encode = msgspec.msgpack.Encoder().encode
_decode_document = msgspec.msgpack.Decoder(tuple[msgspec.Raw, _Pieces, _Pieces]).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_parts = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw]).decode
_decode_row = msgspec.msgpack.Decoder(StoredRow).decode
_TRIPLE = b"\x93"


class QueueCodec:
    """For the state of one queue, or of one shard of it."""

    def __init__(self, name: str, shard: int = 0, shards: int = 1) -> None:
        self.name = name
        self.shard = shard
        self.shards = shards

    def empty(self) -> QueueState:
        return QueueState(self.name, self.shard, self.shards)

    def encode(self, state: QueueState) -> list[bytes]:
        queue = state.queue
        head = Head(
            FORMAT,
            queue is not None,
            QueueSettings() if queue is None else queue.settings,
            state.stirs,
            0 if queue is None else queue.latest_end,
            (0, 0, 0) if queue is None else (queue.gone[DONE], queue.gone[DEAD], queue.gone[CANCELLED]),
            state.accepted_order.numbering.last,
            state.tail.numbering.last,
            state.outbox,
            state.segments,
            state.retired,
            {} if queue is None else queue.accepted,
            FIELDS,
            state.tail.trimmed,
            state.published,
            state.begun,
        )
        slots = state.kept_slots()
        jobs = [slot.encoded or slot.piece() for slot in slots]
        rows = state.tail.pieces
        return [_TRIPLE, _encode(head), array_head(len(jobs)), *jobs, array_head(len(rows)), *rows]

    def decode(self, body: bytes) -> QueueState:
        raw_head, jobs, rows = _decode_document(body)
        head = _checked_head(raw_head, self.name)
        state = self.empty()
        state.stirs = head.stirs
        state.outbox = head.outbox
        state.segments = head.segments
        state.retired = head.retired
        state.begun = head.begun
        state.accepted_order.numbering.last = head.last_job
        state.tail.numbering.last = head.last_row
        state.tail.trimmed = head.trimmed
        state.published = head.published
        if head.is_known:
            _restore_queue(state, head, jobs)
        for row in rows:
            state.tail.restore(_decode_row(row), bytes(row))
        state.touched = False
        return state


def opened(body: bytes, queue: str) -> tuple[Head, msgspec.Raw, msgspec.Raw]:
    """For those who only look: the head, and the arrays of jobs and of rows as they stand there."""
    raw_head, jobs, rows = _decode_parts(body)
    return _checked_head(raw_head, queue), jobs, rows


def _checked_head(raw: msgspec.Raw, queue: str) -> Head:
    head = _decode_head(raw)
    if head.format != FORMAT:
        raise SchemaMismatch(
            f"queue {queue!r} was written in format {head.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    return head


def _restore_queue(state: QueueState, head: Head, pieces: _Pieces) -> None:
    queue = state.queues[state.name] = KeptQueue(state.name, state)
    queue.settings = head.settings
    queue.latest_end = head.latest_end
    decode_job = job_decoder(head.fields)
    is_current = head.fields == FIELDS
    waiting: list[KeptSlot] = []
    others: list[KeptSlot] = []
    by_number, by_id = state.accepted_order.slots, state.jobs
    for piece in pieces:
        number, record = decode_job(piece)
        slot = KeptSlot.stored(number, record, queue, bytes(piece) if is_current else None)
        by_number[number] = by_id[record.id] = slot
        (waiting if record.state.is_waiting else others).append(slot)
    others.sort(key=_end)
    for slot in waiting:
        queue.restore(slot)
    for slot in others:
        queue.restore(slot)
    state.note_grants()
    queue.gone.update(zip((DONE, DEAD, CANCELLED), head.gone, strict=True))
    for idempotency_key, job_id in head.accepted.items():
        queue.accepted[idempotency_key] = job_id
        queue.led_here.setdefault(job_id, []).append(idempotency_key)


def _end(slot: KeptSlot) -> Micros:
    record = slot.record
    end = record.expires_at_us if record.state is INFLIGHT else record.finished_at_us
    assert end is not None
    return end
