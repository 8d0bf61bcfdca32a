"""The runner by itself: what comes in leaves exactly once, whatever happens in between. A lane runs many jobs in one asyncio
task, and none of them may notice."""

import asyncio
from collections.abc import Callable
from typing import Any

from records import make_record, present
from taskharbor import Job
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import Ack, Discard, Release, RetryAt
from taskharbor.handlers import Handler
from taskharbor.jobs import SECOND
from taskharbor.middleware import recover
from taskharbor.worker.processes import SuspectPool
from taskharbor.worker.run import CANCELLED, LEASE_LOST, SHUTDOWN, Hold, Runner
from worker.stage import Gate, eventually, never


class Bench:
    def __init__(self, handler: Callable[[Job], Any], concurrency: int = 2, chain: Any = None) -> None:
        self.left: list[Hold] = []
        chains = {"t": (Handler("t", handler), chain or recover(handler))}
        codecs = CodecRegistry()
        pool = SuspectPool((), codecs=codecs)
        pool.chains = dict(chains)
        self.runner = Runner(
            chains, concurrency=concurrency, codecs=codecs, now=lambda: 5 * SECOND, suspects=pool
        )
        self.runner.finished = self.left.extend

    def feed(self, count: int, *, name: str = "j", suspects: bool = False) -> list[Hold]:
        records = [make_record(f"{name}{n}", now=0, type="t", token="k") for n in range(count)]
        holds = [Hold(record, "k", 60 * SECOND) for record in records]
        self.runner.feed(*((), holds) if suspects else (holds,))
        return holds

    async def until_left(self, count: int) -> None:
        await eventually(lambda: len(self.left) == count)
        assert self.runner.completed == count


async def for_ever(job: Job) -> None:
    await never()


async def test_everything_fed_leaves_with_its_settlement_and_runs_within_concurrency() -> None:
    now = most = 0

    async def counting(job: Job) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return job.id

    bench = Bench(counting, concurrency=3)
    holds = bench.feed(20)
    await bench.until_left(20)
    assert most == 3
    assert [hold.settlement for hold in holds] == [Ack(f"j{n}", "k", f'"j{n}"'.encode()) for n in range(20)]


async def test_jobs_whose_lease_ran_out_in_the_buffer_are_not_begun() -> None:
    """Thousands of them do not exhaust the stack either."""
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.id)

    bench = Bench(handler, concurrency=1)
    valid, expired, *lost = bench.feed(5000)
    expired.expires_at_us = 5 * SECOND
    for hold in lost:
        hold.lost = True
    await bench.until_left(5000)
    assert ran == [valid.record.id]
    assert expired.settlement is None


async def test_an_abort_before_the_first_step_frees_the_place() -> None:
    """A task cancelled before it began runs none of its code: not even the code that says it is over."""
    bench = Bench(for_ever, concurrency=1)
    for reason, expected in ((CANCELLED, Discard), (SHUTDOWN, Release), (LEASE_LOST, type(None))):
        (hold,) = bench.feed(1, name=reason)
        bench.runner.abort(hold, reason)
        assert bench.left.pop() is hold
        assert isinstance(hold.settlement, expected)
    runs, waits = bench.feed(2)
    for _ in range(2):
        bench.runner.abort(waits, CANCELLED)
        assert bench.left == [waits]
    await eventually(lambda: runs.job is not None)
    bench.runner.abort(runs, SHUTDOWN)
    await eventually(lambda: bench.left == [waits, runs])


async def test_nothing_breaks_into_the_cleaning_up_and_the_job_may_come_back_meanwhile() -> None:
    cleaning, cleaned = asyncio.Event(), asyncio.Event()

    async def tidy(job: Job) -> None:
        if not cleaning.is_set():
            try:
                await never()
            finally:
                cleaning.set()
                await cleaned.wait()

    bench = Bench(tidy)
    (old,) = bench.feed(1)
    await eventually(lambda: old.job is not None)
    bench.runner.abort(old, CANCELLED)
    await cleaning.wait()
    for _ in range(3):
        bench.runner.abort(old, CANCELLED)
        await asyncio.sleep(0)
    assert bench.left == []
    (new,) = bench.feed(1)
    await bench.until_left(1)
    assert isinstance(new.settlement, Ack)
    cleaned.set()
    await bench.until_left(2)
    assert isinstance(old.settlement, Discard)
    more = bench.feed(2, name="k")
    await bench.until_left(4)
    assert all(isinstance(hold.settlement, Ack) for hold in more)


async def test_release_gives_back_the_buffer_and_all_that_still_comes() -> None:
    bench = Bench(for_ever, concurrency=1)
    first, *rest = bench.feed(4)
    await eventually(lambda: first.job is not None)
    bench.runner.release_buffered()
    late = bench.feed(2, name="late")
    assert bench.left == [*rest, *late]
    bench.runner.abort_running(SHUTDOWN)
    await bench.until_left(6)
    assert all(isinstance(hold.settlement, Release) for hold in bench.left)


async def test_an_error_of_the_workers_own_costs_the_job_an_attempt_and_nobody_else_anything() -> None:
    async def broken(job: Job) -> None:
        raise AssertionError("a bug in a link of the chain that recover does not cover")

    bench = Bench(for_ever, chain=broken)
    bench.feed(3)
    await bench.until_left(3)
    assert all(isinstance(hold.settlement, RetryAt) for hold in bench.left)


# -- lanes ----------------------------------------------------------------------------------------------------------


async def test_one_jobs_cancellation_does_not_strike_the_next() -> None:
    """However a handler comes to cancel the task it runs on: the next job there has nothing to do with it."""

    async def handler(job: Job) -> str:
        if job.id == "j0":
            present(asyncio.current_task()).cancel()
            return "left before it struck"
        if job.id == "j1":
            await never()
        # Looks at the task's cancel count: one left over from another job would strike here.
        async with asyncio.timeout(30):
            await asyncio.sleep(0)
        return "undisturbed"

    bench = Bench(handler, concurrency=1)
    holds = bench.feed(4)
    await eventually(lambda: holds[1].task is not None)
    bench.runner.abort(holds[1], CANCELLED)
    await bench.until_left(4)
    assert isinstance(holds[1].settlement, Discard)
    assert [hold.settlement for hold in holds[2:]] == [Ack(f"j{n}", "k", b'"undisturbed"') for n in (2, 3)]


async def test_a_job_that_waits_has_its_task_to_itself() -> None:
    bound: dict[object, str] = {}  # What a session registry scoped by task would hold.

    async def handler(job: Job) -> None:
        await asyncio.sleep(0)
        assert bound.setdefault(asyncio.current_task(), job.id) == job.id

    bench = Bench(handler)
    bench.feed(50)
    await bench.until_left(50)
    assert len(bound) == 50


async def test_jobs_that_never_wait_leave_turns_to_the_rest_of_the_loop() -> None:
    turns = 0

    async def handler(job: Job) -> None:
        for _ in range(2000):
            pass

    bench = Bench(handler, concurrency=1)
    bench.feed(2000)
    while len(bench.left) < 2000:
        turns += 1
        await asyncio.sleep(0)
    assert turns > 3


async def test_suspects_run_one_by_one_beside_the_lanes_and_can_be_called_off() -> None:
    gate = Gate()
    bench = Bench(gate.on_loop, concurrency=1)
    first, second, third, last = suspects = bench.feed(4, name="s", suspects=True)
    (beside,) = bench.feed(1)
    await eventually(lambda: beside.task is not None and first.task is not None)
    bench.runner.abort(second, CANCELLED)
    third.lost = True
    bench.runner.abort(third, LEASE_LOST)
    await bench.until_left(2)
    bench.runner.release_buffered()
    gate.go_on.set()
    await bench.until_left(5)
    assert isinstance(second.settlement, Discard)
    assert [hold.settlement for hold in (third, last)] == [None, Release("s3", "k")]
    assert [hold.job is None for hold in suspects] == [False, True, True, True]
    assert isinstance(first.settlement, Ack)
