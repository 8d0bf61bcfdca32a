"""The runner by itself: what comes in leaves exactly once, whatever happens in between."""

import asyncio
from collections.abc import Callable
from typing import Any

from records import make_record
from taskharbor import CodecRegistry, Job
from taskharbor.drivers.contract import Ack, Discard, Release, Retry
from taskharbor.handlers import Handler
from taskharbor.jobs import SECOND
from taskharbor.middleware import recover
from taskharbor.worker.run import CANCELLED, LEASE_LOST, SHUTDOWN, Hold, Runner
from worker.stage import eventually


class Bench:
    def __init__(self, handler: Callable[[Job], Any], concurrency: int = 2) -> None:
        self.left: list[Hold] = []
        chain = recover(handler)
        self.runner = Runner(
            {"t": (Handler("t", handler), chain)},
            concurrency=concurrency,
            codecs=CodecRegistry(),
            now=lambda: 5 * SECOND,
        )
        self.runner.finished = self.left.append

    def feed(self, count: int, *, name: str = "j", type: str = "t") -> list[Hold]:
        holds = [
            Hold(make_record(f"{name}{n}", now=0, type=type, token="k", expires_at_us=60 * SECOND))
            for n in range(count)
        ]
        self.runner.feed(holds)
        return holds

    async def until_left(self, count: int) -> None:
        await eventually(lambda: len(self.left) == count)
        assert self.runner.completed == count


async def quick(job: Job) -> str:
    return job.id


async def for_ever(job: Job) -> None:
    await asyncio.Event().wait()


async def test_everything_fed_leaves_with_its_settlement() -> None:
    bench = Bench(quick)
    holds = bench.feed(5)
    await bench.until_left(5)
    assert bench.left == holds
    assert [hold.settlement for hold in holds] == [Ack(f"j{n}", "k", f'"j{n}"'.encode()) for n in range(5)]


async def test_no_more_than_concurrency_at_once() -> None:
    now = most = 0

    async def counting(job: Job) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    bench = Bench(counting, concurrency=3)
    bench.feed(20)
    await bench.until_left(20)
    assert most == 3


async def test_a_job_whose_lease_ran_out_in_the_buffer_is_not_begun() -> None:
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.id)

    bench = Bench(handler, concurrency=1)
    valid, expired = bench.feed(2)
    expired.expires_at_us = 5 * SECOND
    await bench.until_left(2)
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
    (runs,) = bench.feed(1)
    await eventually(lambda: runs.job is not None)
    bench.runner.abort(runs, SHUTDOWN)
    await eventually(lambda: bench.left == [runs])


async def test_a_cancel_request_reaches_a_job_that_still_waits_in_the_buffer() -> None:
    bench = Bench(for_ever, concurrency=1)
    running, waiting = bench.feed(2)
    bench.runner.abort(waiting, CANCELLED)
    assert bench.left == [waiting]
    assert isinstance(waiting.settlement, Discard)
    bench.runner.abort(waiting, CANCELLED)
    assert bench.left == [waiting]
    bench.runner.abort(running, SHUTDOWN)
    await bench.until_left(2)


async def test_a_repeated_cancel_request_does_not_break_into_the_cleaning_up() -> None:
    cleaning, cleaned = asyncio.Event(), asyncio.Event()

    async def tidy(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await cleaned.wait()

    bench = Bench(tidy)
    (hold,) = bench.feed(1)
    await eventually(lambda: hold.job is not None)
    bench.runner.abort(hold, CANCELLED)
    await cleaning.wait()
    for _ in range(3):
        bench.runner.abort(hold, CANCELLED)
        await asyncio.sleep(0)
    assert bench.left == []
    cleaned.set()
    await bench.until_left(1)
    assert isinstance(hold.settlement, Discard)


async def test_thousands_of_lost_leases_leave_without_exhausting_the_stack() -> None:
    release = asyncio.Event()

    async def held(job: Job) -> None:
        await release.wait()

    bench = Bench(held, concurrency=1)
    holds = bench.feed(5000)
    for hold in holds[1:]:
        hold.lost = True
    release.set()
    await bench.until_left(5000)


async def test_a_job_may_come_back_while_its_old_execution_winds_up() -> None:
    winding_up, wound_up = asyncio.Event(), asyncio.Event()
    executions = 0

    async def slow_to_stop(job: Job) -> None:
        nonlocal executions
        executions += 1
        if executions > 1:
            return
        try:
            await asyncio.Event().wait()
        finally:
            winding_up.set()
            await wound_up.wait()

    bench = Bench(slow_to_stop)
    (old,) = bench.feed(1)
    await eventually(lambda: old.job is not None)
    old.lost = True
    bench.runner.abort(old, LEASE_LOST)
    await winding_up.wait()
    (new,) = bench.feed(1)
    await bench.until_left(1)
    assert isinstance(new.settlement, Ack)
    wound_up.set()
    await bench.until_left(2)
    assert old.settlement is None
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
    assert all(isinstance(hold.settlement, Release) for hold in bench.left)
    bench.runner.abort_running(SHUTDOWN)
    await bench.until_left(6)
    assert isinstance(first.settlement, Release)


async def test_one_jobs_cancellation_does_not_strike_the_next() -> None:
    """However a handler comes to cancel the task it runs on: the next job there has nothing to do with it."""

    async def handler(job: Job) -> str:
        if job.id == "j0":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return "left before it struck"
        await asyncio.sleep(0)
        return "undisturbed"

    bench = Bench(handler, concurrency=1)
    holds = bench.feed(3)
    await bench.until_left(3)
    assert [hold.settlement for hold in holds[1:]] == [Ack(f"j{n}", "k", b'"undisturbed"') for n in (1, 2)]


async def test_an_error_of_the_workers_own_costs_the_job_an_attempt_and_nobody_else_anything() -> None:
    bench = Bench(quick)
    handler, _ = bench.runner._chains["t"]

    async def broken(job: Job) -> None:
        raise AssertionError("a bug in a link of the chain that recover does not cover")

    bench.runner._chains = {"t": (handler, broken)}
    bench.feed(3)
    await bench.until_left(3)
    assert all(isinstance(hold.settlement, Retry) for hold in bench.left)
