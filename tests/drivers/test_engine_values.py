"""Every byte comes back from the engine: payloads and results short and long, and any text a name may hold."""

from __future__ import annotations

import asyncio
from typing import Any

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
_characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
# The contract refuses names that are only blanks.
_names = st.text(_characters, min_size=1, max_size=40).filter(lambda name: not name.isspace())


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


@settings(max_examples=40, deadline=None)
@given(_names, _names, _names, _names, _names)
def test_names_are_exact(queue: str, type_: str, key: str, idempotency_key: str, worker: str) -> None:
    async def use(driver: MemoryDriver) -> None:
        names: dict[str, Any] = {"queue": queue, "idempotency_key": idempotency_key}
        given_job = make_record(type=type_, key=key, headers={key: worker}, **names)
        await driver.enqueue([given_job], now=NOW)
        (answer,) = await driver.enqueue([make_record(payload=b"y", **names)], now=NOW)
        assert (answer.id, answer.existed) == (given_job.id, True)
        (job,) = await driver.reserve(queue, limit=1, lease_for=9, now=NOW, worker=worker, types=[type_])
        assert (job.queue, job.type, job.key, job.idempotency_key) == (queue, type_, key, idempotency_key)
        assert (job.headers, job.worker) == ({key: worker}, worker)
        assert await driver.get([job.id], now=NOW) == [job]
        await driver.ack(job.id, job.token or "", now=NOW)
        (row,) = await driver.job_attempts(job.id)
        assert (row.queue, row.type, row.key, row.worker) == (queue, type_, key, worker)

    asyncio.run(use(MemoryDriver()))
