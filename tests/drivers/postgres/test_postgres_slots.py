"""Places for calls: never more than there are, in order, and none is lost when somebody gives up."""

from __future__ import annotations

import asyncio
import random

import pytest

from taskharbor.drivers.postgres.connections import Slots


def test_who_comes_when_all_are_taken_waits_in_line() -> None:
    async def story() -> None:
        slots = Slots(1)
        assert slots.take_at_once()
        assert not slots.take_at_once()
        order: list[int] = []

        async def come(number: int) -> None:
            await slots.take(60)
            order.append(number)
            slots.give_back()

        coming = [asyncio.create_task(come(number)) for number in range(5)]
        await asyncio.sleep(0)
        slots.give_back()
        # Somebody's turn has come but it has not run yet: the place is not free.
        assert not slots.take_at_once()
        await asyncio.gather(*coming)
        assert order == [0, 1, 2, 3, 4]
        assert slots.take_at_once()

    asyncio.run(story())


def test_who_waits_too_long_is_told_so_and_costs_nothing() -> None:
    async def story() -> None:
        slots = Slots(1)
        assert slots.take_at_once()
        with pytest.raises(TimeoutError):
            await slots.take(0)
        slots.give_back()
        assert slots.take_at_once()
        assert not slots.take_at_once()

    asyncio.run(story())


def test_a_place_that_comes_to_one_who_was_cancelled_goes_to_the_next() -> None:
    async def story() -> None:
        slots = Slots(1)
        assert slots.take_at_once()
        first = asyncio.create_task(slots.take(60))
        second = asyncio.create_task(slots.take(60))
        await asyncio.sleep(0)
        slots.give_back()
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not slots.take_at_once()

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_lost_or_given_twice(seed: int) -> None:
    dice = random.Random(seed)

    async def story() -> None:
        slots = Slots(3)
        used = 0

        async def use() -> None:
            nonlocal used
            await slots.take(60)
            used += 1
            assert used <= 3
            try:
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                used -= 1
                slots.give_back()

        tasks = [asyncio.create_task(use()) for _ in range(40)]
        while any(not task.done() for task in tasks):
            if dice.random() < 0.3:
                dice.choice(tasks).cancel()
            await asyncio.sleep(0)
        assert [slots.take_at_once() for _ in range(4)] == [True, True, True, False]

    asyncio.run(story())
