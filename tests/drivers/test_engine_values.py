"""Every byte comes back from the engine: payloads and results short and long."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from records import NOW, make_record
from taskharbor.drivers.contract import Ack
from taskharbor.drivers.engine.tables import INLINE_PAYLOAD
from taskharbor.drivers.memory import MemoryDriver

_long = st.integers(INLINE_PAYLOAD - 2, INLINE_PAYLOAD + 2).map(
    lambda size: bytes(range(256)) * 5 + b"\xff" * size
)
_payloads = st.lists(st.one_of(st.binary(), st.text().map(str.encode), _long), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(_payloads)
def test_payloads_and_results_are_exact(payloads: list[bytes]) -> None:
    async def use(driver: MemoryDriver) -> None:
        await driver.enqueue([make_record(payload=one) for one in payloads], now=NOW)
        jobs = await driver.reserve("q", limit=10, lease_for=1000, now=NOW, worker="w")
        assert [job.payload for job in jobs] == payloads
        acks = [Ack(job.id, job.token or "", job.payload) for job in jobs]
        assert await driver.settle(acks, now=NOW) == [None] * len(jobs)
        read = await driver.get([job.id for job in jobs], now=NOW)
        assert [job and (job.payload, job.result) for job in read] == [(one, one) for one in payloads]

    asyncio.run(use(MemoryDriver()))
