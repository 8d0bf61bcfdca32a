"""Virtual time, seeded turns, frozen and killed threads: the ground the simulation stands on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from taskharbor_testkit.simulation.scheduler import Scheduler, SimulatedLoop, Stuck


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(random.Random(1))


def test_an_hour_of_sleep_takes_no_time_and_a_run_gives_up_at_its_deadline(scheduler: Scheduler) -> None:
    task = scheduler.new_loop("a").create_task(asyncio.sleep(3600))
    assert not scheduler.run(task.done, seconds=5)
    assert scheduler.now == 5
    assert scheduler.run(task.done, seconds=4000)
    assert scheduler.now == pytest.approx(3600)


def test_a_machine_measures_time_by_its_own_clock(scheduler: Scheduler) -> None:
    loop = scheduler.new_loop("fast", offset=1000.0, rate=2.0)
    assert loop.time() == pytest.approx(1000.0)
    scheduler.run(loop.create_task(asyncio.sleep(10)).done, seconds=60)
    assert loop.time() == pytest.approx(1010.0)
    assert scheduler.now == pytest.approx(5.0)
    assert loop.monotonic_us() == pytest.approx(1010e6)


def test_callbacks_of_one_loop_keep_their_order_and_loops_are_interleaved() -> None:
    def interleaving(seed: int) -> list[str]:
        scheduler = Scheduler(random.Random(seed))
        order: list[str] = []
        for name in "ab":
            loop = scheduler.new_loop(name)
            for number in range(5):
                loop.call_soon(order.append, f"{name}{number}")
        scheduler.after(1, lambda: None)
        scheduler.run(lambda: True, seconds=2)
        return order

    orders = [interleaving(seed) for seed in range(10)]
    for order in orders:
        assert sorted(order, key=lambda step: step[0]) == [f"{name}{n}" for name in "ab" for n in range(5)]
    assert len(set(map(tuple, orders))) > 5
    assert interleaving(3) == orders[3]


def test_a_frozen_loop_does_nothing_until_it_is_thawed(scheduler: Scheduler) -> None:
    loop = scheduler.new_loop("a")
    task = loop.create_task(asyncio.sleep(1))
    loop.block(5)
    loop.block(3)
    scheduler.run(task.done, seconds=60)
    assert scheduler.now == pytest.approx(6)


def test_a_killed_loop_never_cleans_up_until_it_is_buried(scheduler: Scheduler) -> None:
    loop = scheduler.new_loop("a")
    done: list[str] = []

    async def nap() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            done.append("cleaned up")

    loop.create_task(nap())
    scheduler.run(lambda: True, seconds=1)
    loop.kill()
    scheduler.after(10, lambda: None)
    scheduler.run(lambda: scheduler.now >= 10, seconds=20)
    assert done == []

    loop.bury()
    scheduler.run(lambda: not loop.tasks, seconds=1)
    assert done == ["cleaned up"]


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def spin() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("work", "complaint"), [(wait_for_ever, "nobody has anything to do"), (spin, "time does not move")]
)
def test_a_deadlock_and_a_busy_loop_are_noticed(scheduler: Scheduler, work: Any, complaint: str) -> None:
    loop = scheduler.new_loop("a")
    loop.create_task(work())
    with pytest.raises(Stuck, match=complaint):
        scheduler.run(lambda: False, seconds=10)
    loop.bury()
    scheduler.run(lambda: not loop.tasks, seconds=1)


def test_what_nobody_caught_is_kept(scheduler: Scheduler) -> None:
    loop: SimulatedLoop = scheduler.new_loop("a")
    loop.call_soon(lambda: 1 / 0)
    scheduler.run(lambda: True, seconds=1)

    assert "ZeroDivisionError" in loop.errors[0]
