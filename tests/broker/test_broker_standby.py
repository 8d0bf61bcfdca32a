"""Several brokers on one store: the one that leads answers, the others say who does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from broker.broker_client import Client
from broker.broker_loops import wait_until
from taskharbor.broker.app import ROUTES
from taskharbor.drivers.http.protocol import LEADER as LEADER_HEADER
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import OPERATIONS as DRIVER_OPERATIONS
from taskharbor.errors import BackendUnavailable
from taskharbor.testing.broker import RunningBroker, broker_thread

LEADER = "http://queue-1.internal:7433"


class Election:
    """Leadership as a test decides it. (The store's own is tested where it lives.)"""

    def __init__(self) -> None:
        self.is_leader = False
        self.leader_url: str | None = LEADER
        self.runs = 0
        self.resigned = 0
        self.looks = 0

    async def run(self) -> None:
        self.runs += 1
        await asyncio.Event().wait()

    async def resign(self) -> None:
        self.resigned += 1
        self.is_leader = False

    def look_now(self) -> None:
        self.looks += 1


@pytest.fixture
def election() -> Election:
    return Election()


@pytest.fixture
def broker(election: Election) -> Iterator[RunningBroker]:
    with broker_thread("memory://", leads=election) as broker:
        yield broker


CALLS = [(one.method, one.path) for one in ROUTES if not one.on_standby] + [
    ("POST", f"/v1/driver/{name}") for name in DRIVER_OPERATIONS
]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_a_standby_names_the_leader_and_does_nothing(
    broker: RunningBroker, election: Election, method: str, path: str
) -> None:
    with Client(broker.url) as client:
        path = path.replace("{id}", "x").replace("{name}", "x")
        answer = client.ask(method, path, {"type": "t"} if method != "GET" else None)
        assert (answer.status, answer.body["code"]) == (421, "not_leader")
        assert answer.headers[LEADER_HEADER.lower()] == LEADER
        assert answer.body["leader"] == LEADER
        election.is_leader = True
        assert client.ok("GET", "/v1/jobs")["jobs"] == []


def test_a_standby_that_knows_no_leader_says_so(broker: RunningBroker, election: Election) -> None:
    election.leader_url = None
    with Client(broker.url) as client:
        answer = client.get("/v1/stats")
        assert (answer.status, answer.body["code"]) == (421, "not_leader")
        assert LEADER_HEADER.lower() not in answer.headers
        assert answer.headers["retry-after"] == "1"


def test_a_leader_that_lost_its_term_unnoticed_sends_nobody_to_itself(election: Election) -> None:
    with broker_thread("memory://", leads=election, advertise=LEADER) as broker, Client(broker.url) as client:
        answer = client.get("/v1/stats")
        assert (answer.status, answer.body["code"]) == (421, "not_leader")
        assert LEADER_HEADER.lower() not in answer.headers
        assert client.ok("GET", "/v1/leader")["leader_url"] is None
        election.is_leader = True
        assert client.ok("GET", "/v1/leader")["leader_url"] == LEADER


def test_a_standby_is_healthy_but_not_ready(broker: RunningBroker, election: Election) -> None:
    with Client(broker.url) as client:
        assert client.get("/health").status == 200
        ready = client.get("/ready")
        assert (ready.status, ready.body["reason"]) == (503, "standby")
        assert client.ok("GET", "/v1/leader") == {
            "is_leader": False,
            "is_elected": True,
            "leader_url": LEADER,
        }
        assert client.get("/openapi.json").status == 200
        election.is_leader = True
        assert client.get("/ready").status == 200


def test_leadership_comes_and_goes_while_requests_do(broker: RunningBroker, election: Election) -> None:
    with Client(broker.url) as client:
        statuses = []
        for is_leader in (False, True, False, True):
            election.is_leader = is_leader
            statuses.append(client.post("/v1/jobs", {"type": "t"}).status)
        assert statuses == [421, 201, 421, 201]
        assert len(client.ok("GET", "/v1/jobs")["jobs"]) == 2


def test_a_stop_gives_leadership_back(election: Election) -> None:
    with broker_thread("memory://", leads=election) as broker:
        election.is_leader = True
        wait_until(broker, lambda: election.runs == 1)
    assert election.resigned == 1


class Deposed(MemoryDriver):
    """A store that another leader has taken: every write is refused."""

    async def reserve(self, *_: object, **__: object) -> object:  # type: ignore[override]
        raise BackendUnavailable("there is a newer leader")


def test_a_call_that_fails_makes_the_leader_look_whether_it_still_is_one(election: Election) -> None:
    with broker_thread(Deposed(), leads=election) as broker, Client(broker.url) as client:
        election.is_leader = True
        answer = client.post("/v1/jobs/claim")
        assert (answer.status, answer.body["code"], election.looks) == (503, "backend_unavailable", 1)
        assert "newer leader" not in str(answer.body)


def test_a_call_under_way_when_leadership_is_lost_is_sent_to_the_new_leader(election: Election) -> None:
    class Losing(MemoryDriver):
        async def reserve(self, *_: object, **__: object) -> object:  # type: ignore[override]
            election.is_leader = False
            raise BackendUnavailable("there is a newer leader")

    with broker_thread(Losing(), leads=election) as broker, Client(broker.url) as client:
        election.is_leader = True
        answer = client.post("/v1/jobs/claim")
        assert (answer.status, answer.headers[LEADER_HEADER.lower()]) == (421, LEADER)


def test_a_leadership_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.service.LEAD_AGAIN_SECONDS", 0.001)

    class Failing(Election):
        async def run(self) -> None:
            self.runs += 1
            raise BackendUnavailable("the store is away")

    election = Failing()
    with broker_thread("memory://", leads=election) as broker:
        wait_until(broker, lambda: election.runs >= 3)
