"""Leases: kept while a handler works, whatever it does to its event loop; and what happens when one is lost."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from records import present
from taskharbor import Job, JobState, LeaseMismatch, Outcome
from taskharbor.drivers.contract import Driver, Extension, Settlement
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Lease, Micros
from worker.stage import (
    EVERYTHING,
    PATIENCE,
    Gate,
    Stage,
    Trouble,
    eventually,
    logged,
    never,
    running,
    stage,
)


@pytest.fixture(params=["memory", "sqlite"])
def driver(request: pytest.FixtureRequest, tmp_path: Any) -> Driver:
    return MemoryDriver() if request.param == "memory" else connect(f"sqlite:///{tmp_path}/jobs.db")


async def test_a_handler_that_blocks_its_loop_for_three_leases_keeps_its_lease(driver: Driver) -> None:
    async with stage(driver) as here:
        runs: list[int] = []

        async def blocks(job: Job) -> str:
            runs.append(job.fence)
            threading.Event().wait(3.2)
            return "still mine"

        job_id = await here.enqueue()
        await here.drain(blocks, lease=1.0)
        assert runs == [1]
        (attempt,) = await here.log(job_id)
        assert attempt.outcome is Outcome.DONE
        assert attempt.ended_at_us - present(attempt.reserved_at_us) > 3 * SECOND
        assert present(attempt.lease_expires_at_us) > attempt.ended_at_us
        assert (await here.get(job_id)).stalls == 0


async def test_a_lost_lease_cancels_the_handler_and_nothing_is_written_for_it(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    worker = here.worker(gate.handler, lease=60.0, heartbeat=0.02)
    async with running(worker):
        await gate.began.wait()
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

    began, go_on = asyncio.Event(), asyncio.Event()

    async def stale(job: Job) -> str:
        began.set()
        await go_on.wait()
        if how == "raises":
            raise ValueError("from a worker of the past")
        return "from a worker of the past"

    async def fresh(job: Job) -> str:
        return f"fence {job.fence}"

    job_id = await here.enqueue()
    old = here.worker(stale, lease=60.0)
    async with running(old):
        await began.wait()
        await here.pause()
        assert await here.take_away(job_id) == 1
        # Before the queue goes on, or the old worker claims the job again.
        old._engines[0]._fetch.stop()
        await here.resume()
        await here.drain(fresh)
        before = (await here.get(job_id), await here.log(job_id))
        go_on.set()
        with logged() as told:
            await eventually(lambda: old.snapshot()["held"] == 0)
            assert told.count("could not be settled") == 1 if how == "raises" else True
    assert (await here.get(job_id), await here.log(job_id)) == before
    assert before[0].result == b'"fence 2"'


async def test_a_cancel_request_cancels_an_async_handler(here: Stage) -> None:
    gate = Gate()
    job_id = await here.enqueue()
    async with running(here.worker(gate.handler, heartbeat=0.02)):
        await gate.began.wait()
        assert await here.client.cancel(job_id) is JobState.INFLIGHT
        record = await here.ended(job_id)
    assert record.state is JobState.CANCELLED
    assert gate.reasons == ["cancelled"]
    assert await here.outcomes(job_id) == [Outcome.CANCELLED]


async def test_a_cancel_request_is_seen_by_a_thread(here: Stage) -> None:
    began = threading.Event()
    seen: list[Any] = []

    def handler(job: Job) -> None:
        began.set()
        seen.append(job.wait_for_stop(PATIENCE))
        seen.append((job.should_stop, job.stop_reason))

    job_id = await here.enqueue()
    async with running(here.worker(handler, heartbeat=0.02)):
        await eventually(began.is_set)
        await here.client.cancel(job_id)
        assert (await here.ended(job_id)).state is JobState.CANCELLED
    assert seen == [True, (True, "cancelled")]


async def test_a_handler_that_finishes_in_spite_of_a_cancel_request_is_done(here: Stage) -> None:
    began = asyncio.Event()

    async def stubborn(job: Job) -> str:
        began.set()
        try:
            await never()
        except asyncio.CancelledError:
            return "too late to stop"

    job_id = await here.enqueue()
    async with running(here.worker(stubborn, heartbeat=0.02)):
        await began.wait()
        await here.client.cancel(job_id)
        record = await here.ended(job_id)
    assert (record.state, record.result) == (JobState.DONE, b'"too late to stop"')


async def test_progress_is_seen_by_others_while_the_job_runs(here: Stage) -> None:
    reported, go_on, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        job.progress({"done": 1})
        reported.set()
        await go_on.wait()
        job.progress({"done": 2})
        await finish.wait()

    job_id = await here.enqueue()

    async with running(here.worker(handler, heartbeat=0.02)):
        await reported.wait()
        await here.until(job_id, lambda job: job.progress == b'{"done":1}')
        go_on.set()
        await here.until(job_id, lambda job: job.progress == b'{"done":2}')
        finish.set()
        await here.ended(job_id)
    assert (await here.get(job_id)).progress is None


async def test_progress_is_sent_once() -> None:
    class Recording(MemoryDriver):
        sent: list[bytes | None] = []  # noqa: RUF012

        async def extend_lease(self, extensions: Sequence[Extension], **options: Any) -> Any:
            Recording.sent.extend(extension.progress for extension in extensions)
            return await super().extend_lease(extensions, **options)

    async with stage(Recording()) as here:
        finish = asyncio.Event()

        async def handler(job: Job) -> None:
            job.progress(1)
            await finish.wait()

        await here.enqueue()
        async with running(here.worker(handler, heartbeat=0.01)):
            await eventually(lambda: len(Recording.sent) >= 4)
            finish.set()
        assert [report for report in Recording.sent if report is not None] == [b"1"]


# -- tokens that change ---------------------------------------------------------------------------------------------


class RotatingDriver(MemoryDriver):
    """Every heartbeat changes the token, as the contract allows; and its answer can be made to wait."""

    def __init__(self, store: Any = None, *, clock: Any = None) -> None:
        super().__init__(store, clock=clock)
        self.rotations = 0
        self.mismatches = 0
        self.slow = threading.Event()
        self.extended = threading.Event()
        self.go_on = threading.Event()
        self._tokens: dict[str, tuple[str, str]] = {}
        """By job: the token that is valid, and the one that the store knows."""

    def clone(self) -> Any:
        return self

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        translated = [Extension(one.job_id, self._stored(one.job_id, one.token)) for one in extensions]
        answers = await super().extend_lease(translated, lease_for=lease_for, now=now)
        for at, answer in enumerate(answers):
            if isinstance(answer, Lease):
                self.rotations += 1
                token = f"token {self.rotations}"
                self._tokens[answer.job_id] = (token, answer.token)
                answers[at] = Lease(answer.job_id, token, answer.expires_at_us, answer.cancel_requested)
        self.extended.set()
        if self.slow.is_set():
            await eventually(self.go_on.is_set)
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        translated = [replace(one, token=self._stored(one.job_id, one.token)) for one in settlements]
        answers = await super().settle(translated, now=now)
        refused = sum(isinstance(answer, LeaseMismatch) for answer in answers)
        if refused:
            self.mismatches += refused
            self.go_on.set()
        return answers

    def _stored(self, job_id: str, token: str) -> str:
        valid, stored = self._tokens.get(job_id, (token, token))
        return stored if token == valid else "no longer valid"


async def test_settling_uses_the_latest_token() -> None:
    driver = RotatingDriver()
    async with stage(driver) as here:

        async def handler(job: Job) -> str:
            await eventually(lambda: driver.rotations >= 3)
            return "done"

        job_id = await here.enqueue()
        await here.drain(handler, heartbeat=0.01)
        assert (await here.get(job_id)).state is JobState.DONE
        assert await here.outcomes(job_id) == [Outcome.DONE]


async def test_a_token_that_changes_while_the_settlement_is_on_its_way() -> None:
    """The heartbeat has reached the backend but not come back: nobody here knows the token that is valid there."""

    driver = RotatingDriver()
    driver.slow.set()
    async with stage(driver) as here:

        async def handler(job: Job) -> str:
            await eventually(driver.extended.is_set)
            return "done"

        job_id = await here.enqueue()
        await here.drain(handler, lease=60.0, heartbeat=0.5)
        assert driver.mismatches == 1
        assert (await here.get(job_id)).state is JobState.DONE
        assert await here.outcomes(job_id) == [Outcome.DONE]


# -- outages --------------------------------------------------------------------------------------------------------


async def test_an_outage_longer_than_the_lease_cancels_the_handler(troubled: Stage, trouble: Trouble) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()
    executions: list[int] = []

    async def handler(job: Job) -> str:
        executions.append(job.fence)
        began.set()
        if job.fence > 1:
            return "second"
        try:
            await never()
        finally:
            cancelled.set()

    job_id = await troubled.enqueue()
    async with running(troubled.worker(handler, lease=1.0)):
        await began.wait()
        trouble.before = set(EVERYTHING)
        await cancelled.wait()
        lost = await troubled.get(job_id)
        assert present(lost.expires_at_us) <= await troubled.client.now()
        trouble.before = set()
        record = await troubled.ended(job_id)
    assert executions == [1, 2]
    assert (record.result, record.stalls, record.attempts) == (b'"second"', 1, 0)


async def test_a_heartbeat_that_hangs_is_asked_again(troubled: Stage, trouble: Trouble) -> None:
    gate = Gate()
    job_id = await troubled.enqueue()
    async with running(troubled.worker(gate.handler, lease=20.0, heartbeat=0.05)):
        await gate.began.wait()
        trouble.hang.add("extend_lease")
        await eventually(lambda: trouble.hanging >= 2)
        trouble.hang.clear()
        first = present((await troubled.get(job_id)).expires_at_us)
        await troubled.until(job_id, lambda job: present(job.expires_at_us) > first)
        gate.go_on.set()
        assert (await troubled.ended(job_id)).stalls == 0
