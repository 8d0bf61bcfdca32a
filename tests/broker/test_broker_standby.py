"""Several brokers on one store: the one that leads answers, the others say who does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker.broker_client import Client
from broker.broker_loops import Election, wait_until
from taskharbor.broker.routes import ROUTES
from taskharbor.drivers.broker_protocol import LEADER as LEADER_HEADER
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import OPERATIONS as DRIVER_OPERATIONS
from taskharbor.drivers.operations import Operation, Reserve
from taskharbor.errors import BackendUnavailable
from taskharbor.testing.broker import RunningBroker, broker_thread

LEADER = "http://queue-1.internal:7433"


@pytest.fixture
def election() -> Election:
    return Election(LEADER)


@pytest.fixture
def broker(election: Election) -> Iterator[RunningBroker]:
    with broker_thread("memory://", leads=election) as broker:
        yield broker


CALLS = [(one.method, one.path) for one in ROUTES if not one.on_standby] + [
    ("POST", f"/v1/driver/{name}") for name in DRIVER_OPERATIONS
]


def test_a_standby_names_the_leader_and_does_nothing(broker: RunningBroker, election: Election) -> None:
    with Client(broker.url) as client:
        for method, path in CALLS:
            path = path.replace("{id}", "x").replace("{name}", "x")
            answer = client.ask(method, path, {"type": "t"} if method != "GET" else None)
            assert answer.refusal == (421, "not_leader"), path
            assert (answer.headers[LEADER_HEADER.lower()], answer.body["leader"]) == (LEADER, LEADER)
        election.is_leader = True
        assert client.jobs() == []


@pytest.mark.parametrize("leader_url", [None, LEADER], ids=["unknown", "this one, by its own word"])
def test_where_no_leader_is_known_nobody_is_sent_anywhere(leader_url: str | None) -> None:
    """A leader that lost its term without noticing must not send its callers to itself."""
    election = Election(leader_url)
    with broker_thread("memory://", leads=election, advertise=LEADER) as broker, Client(broker.url) as client:
        answer = client.get("/v1/stats")
        assert answer.refusal == (421, "not_leader")
        assert LEADER_HEADER.lower() not in answer.headers
        assert answer.headers["retry-after"] == "1"
        assert client.ok("GET", "/v1/leader")["leader_url"] is None
        election.leader_url = LEADER
        election.is_leader = True
        assert client.ok("GET", "/v1/leader")["leader_url"] == LEADER


def test_leadership_comes_and_goes_while_requests_do(broker: RunningBroker, election: Election) -> None:
    """A standby is healthy, but not ready."""
    with Client(broker.url) as client:
        for is_leader in (False, True, False, True):
            election.is_leader = is_leader
            assert client.post("/v1/jobs", {"type": "t"}).status == (201 if is_leader else 421)
            assert [client.get(path).status for path in ("/health", "/openapi.json")] == [200, 200]
            ready = client.get("/ready")
            assert (ready.status, ready.body.get("reason")) == (
                (200, None) if is_leader else (503, "standby")
            )
            said = {"is_leader": is_leader, "is_elected": True, "leader_url": LEADER}
            assert client.ok("GET", "/v1/leader") == said
        assert len(client.jobs()) == 2


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_call_that_another_leader_fenced_off_is_not_lost(election: Election, is_noticed: bool) -> None:
    """The leader looks whether it still is one. If it knows that it is not, it names the new one."""

    class Deposed(MemoryDriver):
        async def _deposed(self) -> Any:
            election.is_leader = not is_noticed
            raise BackendUnavailable("there is a newer leader")

        def run(self, call: Operation[Any]) -> Any:
            return self._deposed() if isinstance(call, Reserve) else super().run(call)

    with broker_thread(Deposed(), leads=election) as broker, Client(broker.url) as client:
        election.is_leader = True
        answer = client.post("/v1/jobs/claim")
        assert "newer leader" not in str(answer.body)
        if is_noticed:
            assert (answer.status, answer.headers[LEADER_HEADER.lower()]) == (421, LEADER)
        else:
            assert (*answer.refusal, election.looks) == (503, "backend_unavailable", 1)


def test_a_leadership_that_fails_is_tried_again_and_a_stop_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskharbor.broker.runtime.LEAD_AGAIN_SECONDS", 0.001)

    class Failing(Election):
        async def run(self) -> None:
            self.runs += 1
            raise BackendUnavailable("the store is away")

    election = Failing()
    with broker_thread("memory://", leads=election) as broker:
        wait_until(broker, lambda: election.runs >= 3)
    assert election.resigned == 1
