"""A broker over a fresh store in memory, a clock that stands still, and a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.broker_client import Client
from taskharbor.clock import FakeClock
from taskharbor.testing.broker import running_broker


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def url(clock: FakeClock) -> Iterator[str]:
    with running_broker("memory://", clock=clock, sweeps=False) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
