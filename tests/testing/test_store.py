"""memory_store: a private store for a while, then everything as it was."""

from __future__ import annotations

import pytest

from taskharbor import Harbor
from taskharbor.clock import FakeClock, SystemClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.testing import memory_store


async def test_the_apps_own_store_clients_and_clock_come_back_untouched() -> None:
    clock = FakeClock()
    harbor = Harbor("memory://", clock=clock)
    harbor.enqueue("note")
    client, async_client, before = harbor.client, harbor.async_client(), SystemClock().now()
    with memory_store(harbor) as same:
        assert same is harbor
        assert harbor.client is not client
        assert harbor.async_client() is not async_client
        assert isinstance(harbor.clock, FakeClock)
        # Time stands still at the present.
        assert before <= harbor.clock.now() <= SystemClock().now()
        assert harbor.client.list_jobs().jobs == []
        harbor.enqueue("note")
    assert harbor.client is client
    assert harbor.async_client() is async_client
    assert harbor.clock is clock
    assert len(client.list_jobs().jobs) == 1


def test_they_come_back_after_an_error_too_and_are_not_opened_meanwhile() -> None:
    class NeverOpened(MemoryDriver):
        async def open(self) -> None:
            raise AssertionError("the app's own store was opened")

    driver = NeverOpened()
    harbor = Harbor(driver)
    clock = FakeClock(1_000_000)
    with memory_store(harbor, clock=clock):
        harbor.enqueue("note")
        clock.advance(5)
        assert harbor.client.now() == 6_000_000
    with pytest.raises(ValueError, match="oops"), memory_store(harbor):
        raise ValueError("oops")
    assert harbor._driver is driver
