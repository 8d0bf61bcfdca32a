"""Storing new jobs: plain ones in a few wide INSERTs, keyed and idempotent ones by the contract's five rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

from taskharbor.drivers.contract import Enqueued, gather_flags
from taskharbor.drivers.engine.loaded_jobs import Unit, new_job
from taskharbor.drivers.engine.tables import (
    DEFAULT_SPEC,
    INLINE_PAYLOAD,
    Spec,
    State,
    Transaction,
    in_steps,
    load,
    spec_values,
    to_json,
)
from taskharbor.jobs import DEFAULT_FLAGS, JobRecord, Micros

_SQL = load("enqueue")
_QUEUES = load("queues")

_queue_of = attrgetter("queue")
_place_of = attrgetter("queue", "run_at_us")
_key_of = attrgetter("key")
_idempotency_key_of = attrgetter("idempotency_key")
_FIELDS = ("id", "type", "priority", "run_at_us", "created_at_us", "max_attempts", "max_stalls", "payload")
_VALUES = {field.removesuffix("_us"): attrgetter(field) for field in _FIELDS}
"""Columns that hold a field of the record as it is."""


def enqueue(
    transaction: Transaction,
    records: Sequence[JobRecord],
    now: Micros,
    new_ids: bool = False,
    numbers: Sequence[int] = (),
) -> list[Enqueued]:
    """`new_ids` makes no difference here: a look at the index of ids is part of every insert. `numbers`: where given, the least
    number that each job may get, in rising order."""
    if not records:
        return []
    names = set(map(_queue_of, records))
    known = {name: transaction.connection.execute(_QUEUES["id_of"], (name,)).fetchone() for name in names}
    queues = {name: transaction.queue_id(name) if row is None else row[0] for name, row in known.items()}
    if {*map(_key_of, records), *map(_idempotency_key_of, records)} == {None}:
        answers = _enqueue_plain(transaction, records, queues, now, numbers)
    else:
        answers = _enqueue_by_rules(transaction, records, queues, now, numbers)
    if None in known.values():
        used = {record.queue for record, answer in zip(records, answers, strict=True) if not answer.existed}
        for name, row in known.items():
            if row is None and name not in used:
                # It was only named: every job for it was known before, elsewhere.
                transaction.connection.execute(_QUEUES["remove"], (queues[name],))
    return answers


def _enqueue_plain(
    transaction: Transaction,
    records: Sequence[JobRecord],
    queues: dict[str, int],
    now: Micros,
    numbers: Sequence[int],
) -> list[Enqueued]:
    (last,) = transaction.connection.execute(_SQL["last_seq"]).fetchone()
    columns = {
        "seq": list(accumulate(numbers, lambda seq, least: max(seq + 1, least), initial=last))[1:] or [None],
        "queue_id": list(map(queues.get, map(_queue_of, records))),
        "spec": _specs(records),
        **{column: list(map(value_of, records)) for column, value_of in _VALUES.items()},
    }
    if _insert(transaction, columns, now) == len(records):
        new: Sequence[JobRecord] = records
        answers = list(map(Enqueued, columns["id"]))
    else:
        stored = set(transaction.fetch(_SQL["ids_after"], (last,)))
        new, answers = [], []
        for record in records:
            answers.append(Enqueued(record.id, record.id not in stored))
            if record.id in stored:
                # The first of that id: others in the batch find it there.
                stored.remove(record.id)
                new.append(record)
    long = {record.id: record.payload for record in new if len(record.payload) > INLINE_PAYLOAD}
    if long:
        seqs = transaction.fetch(_SQL["seqs_by_id"], (to_json(list(long)),))
        transaction.insert_rows(_SQL["insert_payload"], [(seq, long[job_id]) for job_id, seq in seqs])
    _count(transaction, new, queues, now)
    return answers


def _specs(records: Sequence[JobRecord]) -> list[str | None]:
    """The specs of new jobs; one for all of them if they use only defaults."""
    specs = list(map(spec_values, records))
    return [None] if specs.count(DEFAULT_SPEC) == len(specs) else [Spec(*one).text() for one in specs]


def _insert(transaction: Transaction, columns: dict[str, list[Any]], now: Micros) -> int:
    """Store jobs and return their number. A column in which all jobs agree is bound once: each bound value has its cost."""
    own = {"id": columns["id"], "payload": columns["payload"]}
    shared = [now, INLINE_PAYLOAD]
    for column, values in columns.items():
        if column not in own:
            if values.count(values[0]) == len(values):
                shared.append(values[0])
            else:
                own[column] = values
    rows = list(zip(*own.values(), strict=True))
    stored = start = 0
    for statement, end in _insert_statements(tuple(columns), tuple(own), len(rows)):
        stored += transaction.connection.execute(
            statement, [*shared, *chain.from_iterable(rows[start:end])]
        ).rowcount
        start = end
    return stored


@lru_cache(maxsize=1000)
def _insert_statements(columns: tuple[str, ...], own: tuple[str, ...], count: int) -> list[tuple[str, int]]:
    """Statements that store so many jobs together, each with the number of jobs up to its end."""
    places = {column: f"column{place}" for place, column in enumerate(own, 1)}
    shared = [column for column in columns if column not in own]
    # Behind `now` and the longest inline payload.
    places |= {column: f"?{place}" for place, column in enumerate(shared, 3)}
    statement = _SQL["insert"]
    for column, place in places.items():
        statement = statement.replace(f"/*{column}*/", place)
    return list(in_steps(statement.replace("/*rows*/", f"/*rows: {len(own)}*/"), count))


def _count(transaction: Transaction, new: Sequence[JobRecord], queues: dict[str, int], now: Micros) -> None:
    due: dict[str, dict[Micros, int]] = {}
    for (queue, run_at), jobs in Counter(map(_place_of, new)).items():
        due.setdefault(queue, {})[run_at] = jobs
    for queue, instants in due.items():
        number = queues[queue]
        later = {run_at: jobs for run_at, jobs in instants.items() if run_at > now}
        scheduled = sum(later.values())
        ready = sum(instants.values()) - scheduled
        stirs = ready > 0 or transaction.is_next_due(number, min(later))
        transaction.connection.execute(_SQL["count"], (ready, scheduled, stirs, number))
        transaction.notifies = transaction.notifies or stirs


def _enqueue_by_rules(
    transaction: Transaction,
    records: Sequence[JobRecord],
    queues: dict[str, int],
    now: Micros,
    numbers: Sequence[int],
) -> list[Enqueued]:
    unit = Unit(transaction, now, [record.id for record in records])
    unit.load_keys({(queues[record.queue], record.key) for record in records if record.key is not None})
    given = [(queues[one.queue], one.idempotency_key) for one in records if one.idempotency_key is not None]
    found = transaction.fetch(_SQL["known_idempotency"], (to_json(given),)) if given else []
    known = {(queue, key): job_id for queue, key, job_id in found}
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
    transaction.insert_rows(_SQL["insert_idempotency"], rows)
    return answers


def _store(unit: Unit, record: JobRecord, queue: int, number: int) -> Enqueued:
    """Rules 3 to 5."""
    flags = record.update or DEFAULT_FLAGS
    waiting = unit.waiting(queue, record.key)
    if waiting is not None:
        unit.change(waiting, new_job(record, queue, 0), Spec.of(record), flags)
        if waiting.state == State.BLOCKED:
            spec = Spec.read(waiting.spec)
            spec.update = gather_flags(spec.update or DEFAULT_FLAGS, flags)
            unit.set_spec(waiting, spec)
        else:
            unit.wait_by_run_at(waiting)
        return Enqueued(waiting.id, existed=True)
    is_blocked = unit.inflight(queue, record.key) is not None
    job = unit.insert(record, queue, State.BLOCKED if is_blocked else None, number)
    if is_blocked and record.update is None:
        spec = Spec.read(job.spec)
        spec.update = flags
        unit.set_spec(job, spec)
    return Enqueued(job.id)
