"""Storing new jobs: plain batches with one command per structure, all others by the contract's rules, each in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.redis.library import Call, Word
from taskharbor.drivers.redis.records import encode, head_and_rest, place_in_line, stored_tail
from taskharbor.drivers.redis.store import Store
from taskharbor.jobs import JobRecord, Micros
from taskharbor.requests import new_token

_KNOWN = -1
_kind = attrgetter("type", "priority", "run_at_us")


async def enqueue(
    store: Store, records: Sequence[JobRecord], now: Micros, *, new_ids: bool
) -> list[Enqueued]:
    groups: dict[str, list[int]] = {}
    for n, record in enumerate(records):
        groups.setdefault(record.queue, []).append(n)
    if len(groups) > 1 and _is_shared(records):
        # One after the other: only what became of the first of them tells whether the id is known to the second.
        return [(await enqueue(store, [record], now, new_ids=False))[0] for record in records]
    if not groups.keys() <= store.numbers.keys():
        await store.register(groups)
    elsewhere = {} if new_ids else await store.located([record.id for record in records])
    return await _enqueue(store, records, groups, elsewhere, now, new_ids=new_ids)


def _is_shared(records: Sequence[JobRecord]) -> bool:
    """Whether one id is given to two queues."""
    homes: dict[str, str] = {}
    return any(homes.setdefault(record.id, record.queue) != record.queue for record in records)


async def _enqueue(
    store: Store,
    records: Sequence[JobRecord],
    groups: dict[str, list[int]],
    elsewhere: dict[str, str],
    now: Micros,
    *,
    new_ids: bool,
) -> list[Enqueued]:
    answers = [Enqueued(record.id, record.id in elsewhere) for record in records]
    if elsewhere:
        # Of its own queue the script knows better.
        home = {n: elsewhere.get(record.id, record.queue) for n, record in enumerate(records)}
        groups = {queue: [n for n in ns if home[n] == queue] for queue, ns in groups.items()}
        groups = {queue: ns for queue, ns in groups.items() if ns}
    if not groups:
        return answers
    is_plain = new_ids and len(groups) == 1 and _is_plain(records)
    # Jobs of several queues are listed in the order they were given in, so they count from one number.
    base: Word = "" if len(groups) == 1 else await _server_time(store)
    # Ids that were made for this call name it too.
    name = records[0].id if new_ids else new_token()

    def ruled(again: int) -> list[Call]:
        return [_ruled(store, queue, records, ns, now, name, again, base) for queue, ns in groups.items()]

    first = [_new(store, queue, records, now, name) for queue in groups] if is_plain else ruled(0)
    said = await store.client.run(lambda again: ruled(1) if again else first)
    if said == [_KNOWN]:
        said = await store.client.run(ruled)
    firsts: list[str] = []
    for (queue, ns), answer in zip(groups.items(), said, strict=True):
        if isinstance(answer, int):
            is_first = answer
        else:
            is_first = answer[0]
            for n, known in zip(ns, answer[1:], strict=True):
                answers[n] = Enqueued(records[n].id) if known == 0 else Enqueued(known.decode(), True)
        if is_first:
            firsts.append(queue)
    if firsts:
        # A server that came back without its data has forgotten the names too.
        await store.register(firsts)
    return answers


def _is_plain(records: Sequence[JobRecord]) -> bool:
    return all(record.key is None and record.idempotency_key is None for record in records)


async def _server_time(store: Store) -> Micros:
    seconds, micros = await store.client.command("TIME")
    return int(seconds) * 1_000_000 + int(micros)


def _new(store: Store, queue: str, records: Sequence[JobRecord], now: Micros, name: str) -> Call:
    args: list[Word] = [name]
    # Most batches are of one kind: what their jobs have in common is said once.
    for (_, _, run_at), run in groupby(records, _kind):
        several = list(run)
        place = place_in_line(several[0]) if run_at <= now else b""
        args += (len(several), run_at if run_at > 0 else 1, place)
        for record in several:
            args += (record.id, stored_tail(record))
    return store.call("enqueue_new", queue, now, *args)


def _ruled(
    store: Store,
    queue: str,
    records: Sequence[JobRecord],
    ns: Sequence[int],
    now: Micros,
    name: str,
    again: int,
    base: Word,
) -> Call:
    given = [(n, *head_and_rest(records[n])) for n in ns]
    packed = encode([(records[n].id, n, head) for n, head, _ in given])
    return store.call("enqueue", queue, now, name, again, base, packed, *[rest for _, _, rest in given])
