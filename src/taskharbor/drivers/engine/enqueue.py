"""Storing new jobs: plain ones in a few wide INSERTs, keyed and idempotent ones by the contract's five rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import Enqueued, gather_flags
from taskharbor.drivers.engine.tables import (
    BLOCKED,
    INLINE_PAYLOAD,
    READY,
    SCHEDULED,
    Counts,
    Transaction,
    forget_queue,
    insert_rows,
    known_queue_id,
    load,
    queue_id,
    read_spec,
    spec_of,
    spec_text,
    to_json,
)
from taskharbor.drivers.engine.unit import Unit, new_job
from taskharbor.jobs import DEFAULT_FLAGS, JobRecord, Micros

_SQL = load("enqueue")
_decode_ids = msgspec.json.Decoder(list[str]).decode
_decode_seqs = msgspec.json.Decoder(list[tuple[str, int]]).decode
_decode_known = msgspec.json.Decoder(list[tuple[int, str, str]]).decode


def enqueue(
    transaction: Transaction,
    records: Sequence[JobRecord],
    now: Micros,
    new_ids: bool = False,
    numbers: Sequence[int] = (),
) -> list[Enqueued]:
    """`new_ids` makes no difference here: a look at the index of ids is part of every insert. `numbers`: where given, the least
    number that each job may get, in rising order."""
    names = {record.queue for record in records}
    unknown = [name for name in names if known_queue_id(transaction, name) is None]
    queues = {name: queue_id(transaction, name) for name in names}
    if any(record.key is not None or record.idempotency_key is not None for record in records):
        answers = _enqueue_by_rules(transaction, records, queues, now, numbers)
    else:
        answers = _enqueue_plain(transaction, records, queues, now, numbers)
    if unknown:
        used = {record.queue for record, answer in zip(records, answers, strict=True) if not answer.existed}
        for name in unknown:
            if name not in used:
                forget_queue(transaction, queues[name])
    return answers


def _enqueue_plain(
    transaction: Transaction,
    records: Sequence[JobRecord],
    queues: dict[str, int],
    now: Micros,
    numbers: Sequence[int],
) -> list[Enqueued]:
    connection = transaction.connection
    rows: list[tuple[Any, ...]] = []
    long: dict[str, bytes] = {}
    (last,) = connection.execute(_SQL["last_seq"]).fetchone()
    seq = last
    for at, record in enumerate(records):
        seq = max(seq + 1, numbers[at]) if numbers else seq + 1
        payload: bytes | None = record.payload
        size = len(record.payload)
        if size > INLINE_PAYLOAD:
            long.setdefault(record.id, record.payload)
            payload = None
        rows.append(
            (
                queues[record.queue],
                SCHEDULED if record.run_at_us > now else READY,
                record.priority,
                record.run_at_us,
                record.created_at_us,
                record.max_attempts,
                record.max_stalls,
                record.id,
                record.type,
                None,
                spec_text(record),
                size,
                payload,
                seq,
            )
        )
    inserted = insert_rows(connection, _SQL["insert"], rows)
    if inserted == len(records):
        answers = [Enqueued(record.id) for record in records]
    else:
        (text,) = connection.execute(_SQL["ids_after"], (last,)).fetchone()
        new = set(_decode_ids(text))
        answers = []
        for record in records:
            answers.append(Enqueued(record.id, record.id not in new))
            new.discard(record.id)
    if long:
        _insert_long(
            transaction,
            {answer.id: long[answer.id] for answer in answers if not answer.existed and answer.id in long},
        )
    _count(transaction, rows, answers)
    return answers


def _insert_long(transaction: Transaction, payloads: dict[str, bytes]) -> None:
    (text,) = transaction.connection.execute(_SQL["seqs_by_id"], (to_json(list(payloads)),)).fetchone()
    rows = [(seq, payloads[job_id]) for job_id, seq in _decode_seqs(text)]
    insert_rows(transaction.connection, _SQL["insert_payload"], rows)


def _count(transaction: Transaction, rows: Sequence[tuple[Any, ...]], answers: Sequence[Enqueued]) -> None:
    counts = Counts(transaction)
    new = [row for row, answer in zip(rows, answers, strict=True) if not answer.existed]
    for (queue, state), jobs in Counter([row[:2] for row in new]).items():
        counts.move(queue, None, state, jobs)
        if state == READY:
            counts.stir(queue)
        else:
            counts.schedule(queue, min(row[3] for row in new if row[0] == queue and row[1] == SCHEDULED))
    counts.flush()


def _enqueue_by_rules(
    transaction: Transaction,
    records: Sequence[JobRecord],
    queues: dict[str, int],
    now: Micros,
    numbers: Sequence[int],
) -> list[Enqueued]:
    unit = Unit(transaction, now)
    unit.load(record.id for record in records)
    unit.load_keys({(queues[record.queue], record.key) for record in records if record.key is not None})
    known = _known_idempotency(transaction, records, queues)
    fresh: dict[tuple[int, str], str] = {}
    answers = []
    for at, record in enumerate(records):
        queue = queues[record.queue]
        name = None if record.idempotency_key is None else (queue, record.idempotency_key)
        if unit.job(record.id) is not None:
            answers.append(Enqueued(record.id, existed=True))
            continue
        if name is not None and name in known:
            answers.append(Enqueued(known[name], existed=True))
            continue
        answer = _store(unit, record, queue, numbers[at] if numbers else 0)
        answers.append(answer)
        if name is not None:
            known[name] = fresh[name] = answer.id
    unit.flush()
    rows = [(queue, key, job_id) for (queue, key), job_id in fresh.items()]
    insert_rows(transaction.connection, _SQL["insert_idempotency"], rows)
    return answers


def _known_idempotency(
    transaction: Transaction, records: Sequence[JobRecord], queues: dict[str, int]
) -> dict[tuple[int, str], str]:
    wanted = [
        (queues[record.queue], record.idempotency_key)
        for record in records
        if record.idempotency_key is not None
    ]
    if not wanted:
        return {}
    (text,) = transaction.connection.execute(_SQL["known_idempotency"], (to_json(wanted),)).fetchone()
    return {(queue, key): job_id for queue, key, job_id in _decode_known(text)}


def _store(unit: Unit, record: JobRecord, queue: int, number: int) -> Enqueued:
    """Rules 3 to 5."""
    flags = record.update or DEFAULT_FLAGS
    waiting = unit.waiting(queue, record.key)
    if waiting is not None:
        unit.change(waiting, new_job(record, queue, 0), spec_of(record), flags)
        if waiting.state == BLOCKED:
            spec = read_spec(waiting.spec)
            spec.update = gather_flags(spec.update or DEFAULT_FLAGS, flags)
            unit.set_spec(waiting, spec)
        else:
            unit.wait_by_run_at(waiting)
        return Enqueued(waiting.id, existed=True)
    is_blocked = unit.inflight(queue, record.key) is not None
    job = unit.insert(record, queue, BLOCKED if is_blocked else None, number)
    if is_blocked and record.update is None:
        spec = read_spec(job.spec)
        spec.update = flags
        unit.set_spec(job, spec)
    return Enqueued(job.id)
