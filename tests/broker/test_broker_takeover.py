"""Two broker processes on one object store, and the leader is killed. (Frozen and stopped ones: test_two_brokers.py.)"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.broker_client import Answer, Client
from taskharbor_testkit.servers.broker import BrokerProcess, broker_process

PATIENCE = 60.0
TERM = ("--term", "3s")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def first(store: str) -> Iterator[BrokerProcess]:
    with broker_process(store, *TERM) as broker:
        until(lambda: leads(broker))
        yield broker


@pytest.fixture
def second(first: BrokerProcess, store: str) -> Iterator[BrokerProcess]:
    with broker_process(store, *TERM) as broker:
        yield broker


def until(is_so: Callable[[], bool]) -> None:
    """Every look is a request, which takes its time."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, "it never became so"


def ask(broker: BrokerProcess, method: str, path: str, body: object = None) -> Answer:
    with Client(broker.url, timeout=PATIENCE) as client:
        return client.ask(method, path, body)


def leads(broker: BrokerProcess) -> bool:
    return ask(broker, "GET", "/ready").status == 200


def types_in(broker: BrokerProcess) -> set[str]:
    return {job["type"] for job in ask(broker, "GET", "/v1/jobs").body["jobs"]}


def test_a_standby_takes_over_from_a_leader_that_was_killed(
    first: BrokerProcess, second: BrokerProcess
) -> None:
    assert ask(first, "POST", "/v1/jobs", {"type": "before"}).status == 201
    assert ask(second, "POST", "/v1/jobs", {"type": "refused"}).status == 421
    until(lambda: ask(second, "GET", "/v1/leader").body["leader_url"] == first.url)
    first.kill()
    until(lambda: leads(second))
    assert ask(second, "POST", "/v1/jobs", {"type": "after"}).status == 201
    assert types_in(second) == {"before", "after"}
