"""The bell that wakes a task within the call that rings it."""

from __future__ import annotations

import asyncio

import pytest

from taskharbor.doorbell import Doorbell


async def waiting(bell: Doorbell, story: list[str]) -> None:
    assert asyncio.current_task() is not None
    story.append("waits")
    await bell
    story.append("goes on")


def test_the_task_goes_on_before_the_ring_returns() -> None:
    async def scene() -> list[str]:
        loop = asyncio.get_running_loop()
        bell, story = Doorbell(loop), list[str]()
        task = asyncio.create_task(waiting(bell, story))

        def ring() -> None:
            bell.ring()
            story.append("rung")
            bell.ring()  # Nobody is there any more.

        loop.call_soon(ring)
        await task
        return story

    assert asyncio.run(scene()) == ["waits", "goes on", "rung"]


def test_a_ring_before_anybody_waits_is_nobody_s() -> None:
    async def scene() -> None:
        bell = Doorbell(asyncio.get_running_loop())
        bell.ring()
        task = asyncio.create_task(waiting(bell, []))
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


def test_one_who_waits_can_be_cancelled_and_a_time_out_strikes() -> None:
    async def scene() -> None:
        bell = Doorbell(asyncio.get_running_loop())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await bell
        bell.ring()

    asyncio.run(scene())


def test_cancelled_in_the_turn_in_which_it_is_rung_it_ends_once() -> None:
    async def scene() -> list[str]:
        loop = asyncio.get_running_loop()
        bell, story = Doorbell(loop), list[str]()
        task = asyncio.create_task(waiting(bell, story))
        await asyncio.sleep(0)
        task.cancel()
        loop.call_soon(bell.ring)
        with pytest.raises(asyncio.CancelledError):
            await task
        return story

    assert asyncio.run(scene()) == ["waits"]


def test_rung_from_within_a_task_it_waits_for_its_turn() -> None:
    async def scene() -> list[str]:
        bell, story = Doorbell(asyncio.get_running_loop()), list[str]()
        task = asyncio.create_task(waiting(bell, story))
        await asyncio.sleep(0)
        bell.ring()
        story.append("rung")
        await task
        return story

    assert asyncio.run(scene()) == ["waits", "rung", "goes on"]
