"""What a claim of 100 jobs costs beside a million others, behind a million of other types, and against a claim of any type.

Every claim names all types that an app declares, as a worker does, and the jobs are spread over these types.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from functools import partial
from typing import Any

from benchmarks.measure import Figure, Series, alternate
from benchmarks.workload import TYPES, names
from taskharbor import JobRequest
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Ack
from taskharbor.jobs import SECOND, JobRecord

Fill = Callable[[AsyncClient, int, Sequence[str]], Coroutine[Any, Any, None]]
"""Puts so many jobs of these types into a store."""

Stores = Callable[[], AbstractContextManager[Sequence[str]]]
"""The URLs of two empty stores."""

AHEAD = "of other types ahead"
_WAITING = 1_000
_CLAIMED = 100
_LOOKS = 200
_CHUNK = 1_000
_TOMORROW = 24 * 3600.0


async def fill_waiting(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that can be claimed at once."""
    await _enqueue(client, count, types)


async def fill_ahead(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs of a type that no claim names. They are due before all jobs that are enqueued later."""
    await _enqueue(client, count, ["another"])


async def fill_scheduled(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that will be due, none of them today."""
    await _enqueue(client, count, types, delay=_TOMORROW)


async def fill_history(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that are done and `count` rows of the attempt log."""
    for start in range(0, count, _CHUNK):
        await _enqueue(client, min(_CHUNK, count - start), types)
        await _finish(client, await _claim(client, _CHUNK, types))


def figures(
    stores: Stores,
    kinds: Mapping[str, Fill],
    more: int,
    rounds: int,
    settle_down: Callable[[], None] = lambda: None,
) -> list[Callable[[], Figure]]:
    """Every kind of neighbour with one type. Jobs of other types also with many types, at most a million of them."""
    return [
        *(partial(_beside, stores, *kind, more, 1, rounds, settle_down) for kind in kinds.items()),
        *(
            partial(_beside, stores, AHEAD, kinds[AHEAD], min(more, 1_000_000), types, rounds, settle_down)
            for types in TYPES[1:]
        ),
        *(partial(_against_any, stores, types, rounds) for types in TYPES),
    ]


def _beside(
    stores: Stores, what: str, fill: Fill, more: int, types: int, rounds: int, settle_down: Callable[[], None]
) -> Figure:
    """With `more` of one kind beside 1,000 waiting jobs, against those alone. Filled once, then measured in turns."""
    with stores() as urls, _opened(urls) as (runner, (crowded, plain)):
        runner.run(fill(crowded, more, names(types)))
        for client in (crowded, plain):
            runner.run(fill_waiting(client, _WAITING, names(types)))
        settle_down()
        mine, limit = alternate(
            rounds,
            (f"{more:,} {what}", lambda: runner.run(_cost(crowded, types, names(types)))),
            (f"{_WAITING:,} waiting", lambda: runner.run(_cost(plain, types, names(types)))),
            "ms",
        )
    return _figure(f"{types} declared, many {what}", mine, limit)


def _against_any(stores: Stores, types: int, rounds: int) -> Figure:
    """A claim that names the types of all jobs there are, against one that names none."""
    with stores() as urls, _opened(urls) as (runner, (client, _)):
        runner.run(fill_waiting(client, 10 * _WAITING, names(types)))
        mine, limit = alternate(
            rounds,
            (f"{types} types named", lambda: runner.run(_cost(client, types, names(types)))),
            ("none named", lambda: runner.run(_cost(client, types, None))),
            "ms",
        )
    return _figure(f"{types} declared, against any type", mine, limit)


def _figure(name: str, mine: Series, limit: Series) -> Figure:
    return Figure(
        name=f"claim of {_CLAIMED}, {name}", ours=mine, limit=limit, goal=1.3, higher_is_better=False
    )


@contextmanager
def _opened(urls: Sequence[str]) -> Iterator[tuple[asyncio.Runner, list[AsyncClient]]]:
    """Open until the end: a store in memory lives no longer than its handles."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner, [runner.run(stack.enter_async_context(AsyncClient(url))) for url in urls]
        finally:
            runner.run(stack.aclose())


async def _cost(client: AsyncClient, types: int, named: Sequence[str] | None) -> float:
    """Median milliseconds of leasing. What was leased is finished and as many enqueued, so the backlog stays as it is."""
    spent = []
    for _ in range(_LOOKS):
        began = time.perf_counter()
        held = await _claim(client, _CLAIMED, named)
        spent.append(time.perf_counter() - began)
        assert len(held) == _CLAIMED
        await _finish(client, held)
        await _enqueue(client, _CLAIMED, [one.type for one in held])
    return statistics.median(spent) * 1000


async def _claim(client: AsyncClient, limit: int, types: Sequence[str] | None) -> Sequence[JobRecord]:
    now = await client.now()
    return await client.driver.reserve(
        "default", limit=limit, lease_for=60 * SECOND, now=now, worker="w", types=types
    )


async def _finish(client: AsyncClient, held: Sequence[JobRecord]) -> None:
    await client.driver.settle([Ack(one.id, one.token or "") for one in held], now=await client.now())


async def _enqueue(client: AsyncClient, count: int, types: Sequence[str], delay: float | None = None) -> None:
    for start in range(0, count, _CHUNK):
        numbers = range(start, min(start + _CHUNK, count))
        await client.enqueue_batch(
            [JobRequest(type=types[n % len(types)], payload=n, delay=delay) for n in numbers]
        )
