"""Several processes on one store: what holds when one of them dies, and what no two of them may do at once."""

import asyncio
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from records import present
from taskharbor import Attempt, Job, JobState, Outcome, QueueSettings
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND
from worker.fleet import AT_ONCE
from worker.stage import finish, running, stage

FLEET = Path(__file__).with_name("fleet.py")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


def start(url: str, name: str) -> subprocess.Popen[str]:
    folder = str(Path(url.removeprefix("sqlite:///")).parent)
    return subprocess.Popen(
        [sys.executable, str(FLEET), url, name, folder], stdout=subprocess.PIPE, text=True
    )


async def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await finish(asyncio.to_thread(process.stdout.readline))


async def test_a_killed_workers_job_runs_again_within_a_second_of_its_leases_end(url: str) -> None:
    async with stage(connect(url)) as here:
        job_id = await here.enqueue("stuck")
        doomed = start(url, "doomed")
        try:
            assert await read_line(doomed) == "began 1\n"
        finally:
            doomed.kill()
            doomed.communicate()

        async def survives(job: Job) -> str:
            return f"fence {job.fence}"

        heir = here.worker(lease=1.0)
        heir.register("stuck", survives)
        async with running(heir):
            record = await here.ended(job_id)
        assert (record.state, record.result) == (JobState.DONE, b'"fence 2"')
        assert (record.stalls, record.attempts) == (1, 0)
        first, second = await here.log(job_id)
        assert (first.outcome, second.outcome) == (Outcome.EXPIRED, Outcome.DONE)
        assert first.worker == "doomed"
        late = present(second.reserved_at_us) - present(first.lease_expires_at_us)
        assert 0 <= late < SECOND


def most_at_once(attempts: list[Attempt]) -> int:
    """The most leases of the log that were valid at one instant."""
    changes: list[tuple[int, int]] = []
    for attempt in attempts:
        assert attempt.reserved_at_us is not None
        assert attempt.lease_expires_at_us is not None
        over = min(attempt.ended_at_us, attempt.lease_expires_at_us)
        changes += [(attempt.reserved_at_us, 1), (over, -1)]
    # At one instant an end comes before a beginning: a lease does not include the moment it is over.
    return max(accumulate(step for _, step in sorted(changes)))


async def test_two_processes_never_exceed_the_limit_of_a_queue(url: str) -> None:
    """Each runs two jobs at a time: only together they come up to the limit of three, and want to exceed it."""

    async with stage(connect(url)) as here:
        await here.client.configure("default", QueueSettings(max_inflight=AT_ONCE))
        await here.enqueue_many(200, "short")
        fleet = [start(url, name) for name in ("one", "two")]
        try:
            for process in fleet:
                assert await finish(asyncio.to_thread(process.wait)) == 0
        finally:
            for process in fleet:
                process.kill()
                process.communicate()
        page = await here.client.read_attempts(limit=1000)
        assert [attempt.outcome for attempt in page.attempts] == [Outcome.DONE] * 200
        assert len({attempt.job_id for attempt in page.attempts}) == 200
        assert {attempt.worker for attempt in page.attempts} == {"one", "two"}
        assert most_at_once(page.attempts) == AT_ONCE
