"""A lease that somebody is changing at this very moment: a claim passes over it, and still reckons with it.

A heartbeat reads its clock before it takes effect. Meanwhile the lease may be over by another's clock, which yet cannot end
it; when the heartbeat is done it holds again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from drivers.postgres.outage_stage import LEASE, NOW, records
from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import SECOND, JobState

LATER = NOW + LEASE + SECOND


@contextlib.contextmanager
def heartbeat_under_way(driver: PostgresDriver, job_id: str) -> Iterator[None]:
    """What one does to the job's row, without the end of it: that comes with the end of the block."""
    table = sql.Identifier(driver.options.schema, "jobs")
    with psycopg.connect(driver.options.conninfo) as other:
        change = sql.SQL("UPDATE {} SET expires_at = expires_at + %s WHERE id = %s").format(table)
        other.execute(change, [LEASE, job_id])
        yield


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_lease_in_the_middle_of_a_heartbeat_takes_room(
    driver: PostgresDriver, key: str | None
) -> None:
    async with driver, driver.clone() as other:
        await driver.configure("q", QueueSettings(max_inflight=1), now=NOW)
        await driver.enqueue([*records(1, key=key), *records(1)], now=NOW)
        (held,) = await driver.reserve("q", limit=5, lease_for=LEASE, now=NOW, worker="w")
        with heartbeat_under_way(driver, held.id):
            taken = await other.reserve("q", limit=5, lease_for=LEASE, now=LATER, worker="other")
        jobs = await driver.get([held.id, *(job.id for job in taken)], now=LATER)
        valid = [job for job in jobs if job is not None and (job.expires_at_us or 0) > LATER]
        assert [job.id for job in valid] == [held.id]
        # Whose time is really over makes room at last.
        over = LATER + LEASE
        (next_one,) = await other.reserve("q", limit=5, lease_for=LEASE, now=over, worker="other")
        (stats,) = await driver.stats(now=over, queue="q")
        assert stats.counts[JobState.INFLIGHT] == 1
        assert next_one.expires_at_us == over + LEASE


async def test_a_lease_in_the_middle_of_a_heartbeat_is_not_reclaimed(driver: PostgresDriver) -> None:
    async with driver, driver.clone() as other:
        await driver.enqueue(records(3), now=NOW)
        held, *free = await driver.reserve("q", limit=3, lease_for=LEASE, now=NOW, worker="w")
        with heartbeat_under_way(driver, held.id):
            assert await other.reclaim(now=LATER, queue="q") == 2
            taken = await other.reserve("q", limit=5, lease_for=LEASE, now=LATER, worker="other")
        assert {job.id for job in taken} == {job.id for job in free}
        (job,) = await driver.get([held.id], now=LATER)
        assert job is not None
        assert (job.state, job.fence, job.worker) == (JobState.INFLIGHT, 1, "w")
        # And its end is not forgotten.
        assert await other.reclaim(now=LATER + LEASE, queue="q") == 3
