"""A stored job that no call could have stored harms nothing but itself."""

from __future__ import annotations

import pytest

from drivers.postgres.harness import NOW, Raw, make_record, present
from taskharbor.drivers.contract import Ack, JobFilter, QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.errors import JobDamaged
from taskharbor.jobs import LATEST, SECOND, JobState

DAMAGES = {
    "headers that are no JSON": "headers = '{'",
    "headers that are a number": "headers = '5'",
    "flags": "flags = 99",
    "attempts": "attempts = 2147483647",
    "stalls": "stalls = 2147483647",
    "fence": "fence = 9223372036854775807",
    "run_at": "run_at = -9223372036854775808",
    "no id": "id = ''",
    "blank type": "type = ' '",
}


@pytest.mark.parametrize("repairs", [False, True], ids=["found by a worker", "repaired"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_job_is_set_aside_and_its_neighbours_go_on(
    damage: str, repairs: bool, store: PostgresDriver, raw: Raw
) -> None:
    await store.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await store.enqueue([make_record(name, payload=b"12") for name in ("one", "bad", "two")], now=NOW)
    raw(f"UPDATE jobs SET {DAMAGES[damage]} WHERE id = 'bad'")  # noqa: S608
    if repairs:
        (found,) = await store.repair()
        assert "of queue 'q' has damaged values" in found
    jobs = await store.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w")
    good = [job for job in jobs if job.id in ("one", "two")]
    assert [(job.id, job.payload) for job in good] == [("one", b"12"), ("two", b"12")]
    assert await store.settle([Ack(job.id, present(job.token)) for job in good], now=NOW) == [None, None]
    for late in range(1, 7):
        await store.reclaim(now=NOW + 2 * late * SECOND)
        await store.reserve("q", limit=10, lease_for=SECOND, now=NOW + 2 * late * SECOND, worker="w")
    assert not repairs or await store.repair() == []
    (dead,) = (await store.list_jobs(JobFilter(states=frozenset({JobState.DEAD})), now=NOW)).jobs
    assert dead.last_error is not None
    (failed, queue) = await store.stats(now=LATEST)
    assert (queue.counts[JobState.DONE], queue.counts[JobState.DEAD], sum(queue.counts.values())) == (2, 1, 3)
    assert failed.counts[JobState.READY] == 1
    if dead.id:
        *_, last = await store.job_attempts(dead.id)
        assert last.state is JobState.DEAD


@pytest.mark.parametrize("has_ended", [False, True], ids=["waiting", "ended"])
@pytest.mark.parametrize("damage", ["headers that are no JSON", "flags"])
async def test_a_listing_names_the_damaged_job_and_what_mends_it(
    damage: str, has_ended: bool, store: PostgresDriver, raw: Raw
) -> None:
    await store.enqueue([make_record(name) for name in ("one", "bad", "two")], now=NOW)
    if has_ended:
        await store.cancel(["bad"], now=NOW)
    raw(f"UPDATE {'ended' if has_ended else 'jobs'} SET {DAMAGES[damage]} WHERE id = 'bad'")  # noqa: S608
    for look in (store.list_jobs(JobFilter(), now=NOW), store.get(["one", "bad"], now=NOW)):
        with pytest.raises(JobDamaged, match=r"job 'bad' .* run `taskharbor doctor --repair`"):
            await look
    assert len(await store.repair()) == 1
    assert [job.id for job in (await store.list_jobs(JobFilter(), now=NOW)).jobs] == ["two", "bad", "one"]
