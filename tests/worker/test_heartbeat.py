"""Leases: kept while a handler works, whatever it does to its event loop; and what happens when one is lost."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from records import present
from taskharbor import Job, JobState, LeaseMismatch, Outcome
from taskharbor.drivers.contract import Extension, Settlement
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Lease, Micros
from worker.stage import EVERYTHING, Gate, Stage, Trouble, eventually, finish, logged, running, stage


async def test_a_handler_that_blocks_its_loop_for_three_leases_keeps_its_lease(tmp_path: Path) -> None:
    runs: list[int] = []

    async def blocks(job: Job) -> None:
        runs.append(job.fence)
        threading.Event().wait(3.2)

    async with stage(connect(f"sqlite:///{tmp_path}/jobs.db")) as here:
        job_id = await here.enqueue()
        await here.drain(blocks, lease=1.0)
        assert runs == [1]
        (attempt,) = await here.log(job_id)
        assert attempt.outcome is Outcome.DONE
        assert attempt.ended_at_us - present(attempt.reserved_at_us) > 3 * SECOND
        assert present(attempt.lease_expires_at_us) > attempt.ended_at_us


STUCK = """
import sys, threading
from taskharbor import Worker

def stuck(job):
    print("began", job.fence, flush=True)
    threading.Event().wait()

worker = Worker(sys.argv[1], name="doomed", lease=1.0)
worker.register("work", stuck)
worker.run()
"""


async def test_a_killed_workers_job_runs_again_within_a_second_of_its_leases_end(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"

    async def survives(job: Job) -> str:
        return f"fence {job.fence}"

    async with stage(connect(url)) as here:
        job_id = await here.enqueue()
        command = [sys.executable, "-c", STUCK, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
            try:
                assert await finish(asyncio.to_thread(present(doomed.stdout).readline)) == "began 1\n"
            finally:
                doomed.kill()
        async with running(here.worker(survives, lease=1.0)):
            record = await here.ended(job_id)
        ended = (record.state, record.result, record.stalls, record.attempts)
        assert ended == (JobState.DONE, b'"fence 2"', 1, 0)
        first, second = await here.log(job_id)
        assert (first.outcome, second.outcome) == (Outcome.EXPIRED, Outcome.DONE)
        assert first.worker == "doomed"
        late = present(second.reserved_at_us) - present(first.lease_expires_at_us)
        assert 0 <= late < SECOND


async def test_a_lost_lease_cancels_the_handler_and_nothing_is_written_for_it(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    worker = here.worker(gate.on_loop, lease=60.0, heartbeat=0.02)
    async with running(worker):
        await gate.began()
        await here.pause()
        assert await here.take_away(job_id) == 1
        await eventually(lambda: worker.snapshot()["held"] == 0)
    assert gate.reasons == ["lease lost"]
    record = await here.get(job_id)
    assert (record.state, record.attempts, record.stalls) == (JobState.READY, 0, 1)
    assert await here.outcomes(job_id) == [Outcome.EXPIRED]
    assert worker.outcomes.total() == 0


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_stale_worker_changes_nothing(how: str, here: Stage) -> None:
    """Not even where it finds out by settling: the handler does not stop, and its worker's heart stands still."""
    gate = Gate("from a worker of the past")

    async def stale(job: Job) -> str:
        result: str = await gate.on_loop(job)
        if how == "raises":
            raise ValueError(result)
        return result

    async def fresh(job: Job) -> str:
        return f"fence {job.fence}"

    job_id = await here.enqueue()
    # A single claim, or the old worker claims the job again.
    old = here.worker(stale, lease=60.0, max_jobs=1)
    async with running(old):
        await gate.began()
        assert await here.take_away(job_id) == 1
        await here.drain(fresh)
        before = (await here.get(job_id), await here.log(job_id))
        gate.go_on.set()
        with logged() as told:
            await eventually(lambda: old.snapshot()["held"] == 0)
            if how == "raises":  # The other thread writes the line after it has let go of the job.
                await eventually(lambda: told.count("could not be settled") == 1)
    assert (await here.get(job_id), await here.log(job_id)) == before
    assert before[0].result == b'"fence 2"'


@pytest.mark.parametrize("kind", ["loop", "thread", "stubborn"])
async def test_a_cancel_request_reaches_the_handler(kind: str, here: Stage) -> None:
    gate = Gate()

    async def stubborn(job: Job) -> str:
        with suppress(asyncio.CancelledError):
            await gate.on_loop(job)
        return "too late to stop"

    handlers = {"loop": gate.on_loop, "thread": gate.until_stopped, "stubborn": stubborn}
    job_id = await here.enqueue()
    async with running(here.worker(handlers[kind], heartbeat=0.02)):
        await gate.began()
        assert await here.client.cancel(job_id) is JobState.INFLIGHT
        record = await here.ended(job_id)
    assert gate.reasons == ["cancelled"]
    # A handler that finishes all the same is done.
    assert await here.outcomes(job_id) == [Outcome.DONE if kind == "stubborn" else Outcome.CANCELLED]
    assert record.result == (b'"too late to stop"' if kind == "stubborn" else None)


async def test_progress_is_sent_once_and_seen_by_others_while_the_job_runs() -> None:
    sent: list[bytes | None] = []

    class Recording(MemoryDriver):
        async def extend_lease(self, extensions: Sequence[Extension], **options: Any) -> Any:
            sent.extend(extension.progress for extension in extensions)
            return await super().extend_lease(extensions, **options)

    go_on, may_end = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        job.progress({"done": 1})
        await go_on.wait()
        job.progress({"done": 2})
        await may_end.wait()

    async with stage(Recording()) as here:
        job_id = await here.enqueue()
        async with running(here.worker(handler, heartbeat=0.01)):
            await here.until(job_id, lambda job: job.progress == b'{"done":1}')
            go_on.set()
            await here.until(job_id, lambda job: job.progress == b'{"done":2}')
            await eventually(lambda: sent[-2:] == [None, None])
            may_end.set()
            assert (await here.ended(job_id)).progress is None
    assert [report for report in sent if report is not None] == [b'{"done":1}', b'{"done":2}']


# -- tokens that change ---------------------------------------------------------------------------------------------


class RotatingDriver(MemoryDriver):
    """Every heartbeat changes the token, as the contract allows; and its answer can be made to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.rotations, self.mismatches, self.is_slow = 0, 0, False
        self.go_on = threading.Event()
        self._stored: dict[str, str] = {}
        """The token that the store knows, by the one that we gave out."""

    def clone(self) -> Any:
        return self

    async def extend_lease(self, extensions: Sequence[Extension], **options: Any) -> list[Lease | JobError]:
        translated = [Extension(one.job_id, self._stored.get(one.token, one.token)) for one in extensions]
        answers = await super().extend_lease(translated, **options)
        for at, answer in enumerate(answers):
            if isinstance(answer, Lease):
                self.rotations += 1
                token = f"token {self.rotations}"
                self._stored |= {token: answer.token, extensions[at].token: "no longer valid"}
                answers[at] = replace(answer, token=token)
        if self.is_slow:
            await eventually(self.go_on.is_set)
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        translated = [replace(one, token=self._stored.get(one.token, one.token)) for one in settlements]
        answers = await super().settle(translated, now=now)
        if any(isinstance(answer, LeaseMismatch) for answer in answers):
            self.mismatches += 1
            self.go_on.set()
        return answers


@pytest.mark.parametrize("is_slow", [False, True])
async def test_settling_uses_the_latest_token(is_slow: bool) -> None:
    """Also where a heartbeat has reached the backend but not come back: nobody here knows the token that is valid there."""
    driver = RotatingDriver()
    driver.is_slow = is_slow

    async def handler(job: Job) -> None:
        await eventually(lambda: driver.rotations >= (1 if is_slow else 3))

    async with stage(driver) as here:
        job_id = await here.enqueue()
        await here.drain(handler, lease=60.0, heartbeat=0.5 if is_slow else 0.01)
        assert driver.mismatches == is_slow
        assert await here.outcomes(job_id) == [Outcome.DONE]


# -- outages --------------------------------------------------------------------------------------------------------


async def test_an_outage_longer_than_the_lease_cancels_the_handler(troubled: Stage, trouble: Trouble) -> None:
    gate = Gate()

    async def handler(job: Job) -> str:
        if job.fence == 1:
            await gate.on_loop(job)
        return "second"

    job_id = await troubled.enqueue()
    async with running(troubled.worker(handler, lease=1.0)):
        await gate.began()
        trouble.before = set(EVERYTHING)
        await eventually(lambda: gate.reasons == ["lease lost"])
        assert present((await troubled.get(job_id)).expires_at_us) <= await troubled.client.now()
        trouble.before = set()
        record = await troubled.ended(job_id)
    assert (record.result, record.stalls, record.attempts, record.fence) == (b'"second"', 1, 0, 2)


async def test_a_heartbeat_that_hangs_is_asked_again(troubled: Stage, trouble: Trouble) -> None:
    gate = Gate()
    job_id = await troubled.enqueue()
    async with running(troubled.worker(gate.on_loop, lease=20.0, heartbeat=0.05)):
        await gate.began()
        trouble.hang.add("extend_lease")
        await eventually(lambda: trouble.hanging >= 2)
        trouble.hang.clear()
        first = present((await troubled.get(job_id)).expires_at_us)
        await troubled.until(job_id, lambda job: present(job.expires_at_us) > first)
        gate.go_on.set()
        assert (await troubled.ended(job_id)).stalls == 0
