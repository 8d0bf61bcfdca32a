"""How jobs come in: each queue's part of a batch is one change of its object."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.memory.copies import accepted
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.locating import Place, shard_of
from taskharbor.drivers.objectstore.numbers import take_stamps
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.jobs import JobRecord, Micros


async def enqueue(
    store: OpenStore, records: Sequence[JobRecord], now: Micros, new_ids: bool
) -> list[Enqueued]:
    fresh = [accepted(record) for record in records]
    shards = store.catalog.shards
    places: list[Place] = [(record.queue, shard_of(record, shards)) for record in fresh]
    for place in dict.fromkeys(places):
        store.cell(*place).refuse_when_full(
            sum(len(record.payload) for record, at in zip(fresh, places, strict=True) if at == place)
        )
    await store.catalog.add_queues(queue for queue, _ in places)
    answers: list[Enqueued | None] = [None] * len(fresh)
    for run in _runs(fresh, places):
        await _enqueue_run(store, fresh, places, run, now, new_ids, answers)
    return [answer for answer in answers if answer is not None]


def _runs(records: list[JobRecord], places: list[Place]) -> list[range]:
    """Nearly always one. An id that is given to two queues in one batch is known to the second, which must see it."""
    seen: dict[str, Place] = {}
    runs: list[range] = []
    start = 0
    for at, (record, place) in enumerate(zip(records, places, strict=True)):
        if seen.setdefault(record.id, place) != place:
            runs.append(range(start, at))
            start, seen = at, {record.id: place}
    runs.append(range(start, len(records)))
    return runs


async def _enqueue_run(
    store: OpenStore,
    records: list[JobRecord],
    places: list[Place],
    run: range,
    now: Micros,
    new_ids: bool,
    answers: list[Enqueued | None],
) -> None:
    elsewhere: dict[str, Place] = {}
    if not new_ids or run.start > 0:
        elsewhere = await _known_elsewhere(store, [(records[at].id, places[at]) for at in run])
    by_place: dict[Place, list[int]] = {}
    for at in run:
        home = elsewhere.get(records[at].id)
        if home is not None and home != places[at]:
            answers[at] = Enqueued(records[at].id, True)
        else:
            by_place.setdefault(places[at], []).append(at)
    first = take_stamps(len(run)) - run.start
    parts = await asyncio.gather(
        *(
            _enqueue_part(store.cell(*place), [records[at] for at in part], [first + at for at in part], now)
            for place, part in by_place.items()
        )
    )
    for (place, part), made in zip(by_place.items(), parts, strict=True):
        store.whereabouts.note((one.id for one in made), place)
        for at, answer in zip(part, made, strict=True):
            answers[at] = answer


async def _known_elsewhere(store: OpenStore, wanted: list[tuple[str, Place]]) -> dict[str, Place]:
    """An id is known wherever in the store it is."""
    targets = {place for _, place in wanted}
    cells = await store.all_cells()
    if len(targets) == 1:
        # Its own queue looks for itself.
        cells = [cell for cell in cells if (cell.queue, cell.shard) not in targets]
    return await store.ask_who_has(list(dict.fromkeys(job_id for job_id, _ in wanted)), cells)


async def _enqueue_part(
    cell: QueueCell, records: list[JobRecord], stamps: list[int], now: Micros
) -> list[Enqueued]:
    def step(state: QueueState, brought: Brought) -> list[Enqueued]:
        return state.enqueue_known(records, stamps, now, brought)

    return await cell.change(step)
