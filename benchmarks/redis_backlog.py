"""What a claim costs with a million jobs beside it. They are put there by the driver itself, so they are what it would keep."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.measure import Figure, alternate
from benchmarks.redis_server import fresh_redis, settle_down
from taskharbor import JobRequest, connect
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Ack
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.servers import with_fresh_prefix

Fill = Callable[[AsyncClient, int], Awaitable[None]]

_CHUNK = 1000
_CLAIMED = 100
_TOMORROW = 24 * 3600.0


async def fill_waiting(client: AsyncClient, count: int) -> None:
    """`count` jobs that could be claimed at once."""
    await _enqueue(client, count)


async def fill_scheduled(client: AsyncClient, count: int) -> None:
    """`count` jobs that will be due, none of them today."""
    await _enqueue(client, count, delay=_TOMORROW)


async def fill_history(client: AsyncClient, count: int) -> None:
    """`count` jobs that are done and `count` rows of the attempt log."""
    for start in range(0, count, _CHUNK):
        await _enqueue(client, min(_CHUNK, count - start))
        await _finish(client, await _claim(client, _CHUNK))


def claim_cost(name: str, waiting: int, beside: Fill, more: int, rounds: int) -> Figure:
    """With `more` of one kind beside `waiting` jobs, against those alone. Filled once, then measured in turns."""
    with fresh_redis() as url:
        plain, crowded = with_fresh_prefix(url), with_fresh_prefix(url)
        asyncio.run(_fill(plain, [(fill_waiting, waiting)]))
        asyncio.run(_fill(crowded, [(beside, more), (fill_waiting, waiting)]))
        settle_down()
        mine, limit = alternate(
            rounds,
            (f"{more:,} {name}", lambda: asyncio.run(_claim_cost(crowded, looks=200))),
            (f"{waiting:,} waiting", lambda: asyncio.run(_claim_cost(plain, looks=200))),
            "ms",
        )
    return Figure(
        name=f"claim of {_CLAIMED} on Redis, many {name}",
        ours=mine,
        limit=limit,
        goal=1.3,
        higher_is_better=False,
    )


async def _fill(url: str, kinds: list[tuple[Fill, int]]) -> None:
    async with connect(url) as driver:
        for fill, count in kinds:
            await fill(AsyncClient(driver), count)


async def _claim_cost(url: str, looks: int) -> float:
    """Median milliseconds of leasing. What was leased is finished and as many enqueued, so the backlog stays as it is."""
    spent = []
    async with connect(url) as driver:
        client = AsyncClient(driver)
        for _ in range(looks):
            began = time.perf_counter()
            held = await _claim(client, _CLAIMED)
            spent.append(time.perf_counter() - began)
            await _finish(client, held)
            await _enqueue(client, _CLAIMED)
    return statistics.median(spent) * 1000


async def _claim(client: AsyncClient, limit: int) -> Sequence[JobRecord]:
    return await client.driver.reserve(
        "default", limit=limit, lease_for=60 * SECOND, now=await client.now(), worker="w"
    )


async def _finish(client: AsyncClient, held: Sequence[JobRecord]) -> None:
    await client.driver.settle([Ack(one.id, one.token or "") for one in held], now=await client.now())


async def _enqueue(client: AsyncClient, count: int, delay: float | None = None) -> None:
    for start in range(0, count, _CHUNK):
        numbers = range(start, min(start + _CHUNK, count))
        await client.enqueue_batch([JobRequest(type="t", payload=n, delay=delay) for n in numbers])
