"""Leases: kept while a handler works, whatever it does to its event loop; and what happens when one is lost."""

import asyncio
import signal
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
from taskharbor import BackendUnavailable, InvalidRequest, Job, JobState, LeaseMismatch, Outcome, Worker
from taskharbor.drivers.contract import Extension, Settlement
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Lease, Micros
from worker.stage import (
    EVERYTHING,
    Gate,
    Stage,
    Trouble,
    eventually,
    finish,
    logged,
    never,
    running,
    stage,
)


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


HOLDS = """
import os, re, sys, time
from contextlib import suppress
from glob import glob
from taskharbor import Worker

def helper_sleeps():
    # Connected, and with nothing to do. Its event loop has two sockets of its own.
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    opened, state = [], ""
    for pid in children:
        for open_file in glob(f"/proc/{pid}/fd/*"):
            with suppress(OSError):
                opened.append(os.readlink(open_file))
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    return state == "S" and sum(file.startswith("socket:") for file in opened) > 2

def spin(letters):
    return re.match("(a+)+$", "a" * letters + "b")

def holds(job):
    looks = 0
    while sys.argv[2] == "helped" and looks < 30:
        looks = looks + 1 if helper_sleeps() else 0
        time.sleep(0.01)
    print("began", flush=True)
    # One call of C code that keeps the interpreter for several leases, and that nothing can break into.
    spin(letters)

letters = 40  # For hours: who waits for the end of the pause kills this process.
worker = Worker(sys.argv[1], lease=5.0, heartbeat_process=sys.argv[2] == "helped", max_jobs=1)
worker.register("work", holds)
worker.run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the heartbeat process reads /proc")
@pytest.mark.parametrize("how", ["alone", "helped", "helped and stopped", "helped and late"])
async def test_a_handler_that_holds_the_interpreter_lock(how: str, redis_url: str) -> None:
    """Alone it loses its lease. A heartbeat process keeps it, but not for a worker that is frozen, nor past the job's timeout.

    Not on SQLite: a handler that takes the lock in the middle of a write there locks the file for everybody."""
    async with stage(connect(redis_url)) as here:
        job_id = await here.enqueue(timeout=4 if how == "helped and late" else 0, max_attempts=1)
        command = [sys.executable, "-c", HOLDS, redis_url, how.partition(" ")[0]]

        async def died() -> bool:
            # The holder takes a whole core for itself, so a call may be late.
            with suppress(BackendUnavailable):
                await here.client.driver.reclaim(now=await here.client.now(), limit=1)
                return await here.state(job_id) is JobState.DEAD
            return False

        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert await finish(asyncio.to_thread(present(holder.stdout).readline)) == "began\n"
                first = present((await here.get(job_id)).expires_at_us)
                if how == "helped":
                    # Its own heartbeats end within a lease.
                    await here.until(job_id, lambda job: present(job.expires_at_us) > first + 10 * SECOND)
                    return
                if how == "helped and stopped":
                    holder.send_signal(signal.SIGSTOP)
                await eventually(died)
            finally:
                holder.kill()
        assert await here.outcomes(job_id) == [Outcome.EXPIRED]


async def test_after_a_standstill_the_store_is_asked_before_a_lease_is_given_up() -> None:
    """A heartbeat was under way when everything stood still, and has timed out. Somebody else has kept the lease meanwhile."""
    gate = Gate()

    class StandsStill(MemoryDriver):
        has_stood = False

        def clone(self) -> Any:
            return self

        async def extend_lease(self, extensions: Sequence[Extension], **options: Any) -> Any:
            if not self.has_stood:
                self.has_stood = True
                await super().extend_lease(extensions, **{**options, "lease_for": 60 * SECOND})
                threading.Event().wait(1.2)
                await never()
            return await super().extend_lease(extensions, **options)

    async with stage(StandsStill()) as here:
        job_id = await here.enqueue()
        with logged() as told:
            async with running(here.worker(gate.on_loop, lease=1.0, heartbeat=0.1)):
                await eventually(lambda: told.count("no heartbeat for") == 1)
                gate.go_on.set()
                assert (await here.ended(job_id)).state is JobState.DONE
    assert gate.reasons == []


def test_a_heartbeat_process_needs_a_store_that_it_can_reach() -> None:
    for url in ("memory://", "http://127.0.0.1:1"):
        with pytest.raises(InvalidRequest, match="heartbeat_process"):
            Worker(url, heartbeat_process=True)
    with pytest.raises(InvalidRequest, match="heartbeat_process"):
        Worker(connect("sqlite:///jobs.db"), heartbeat_process=True)


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
