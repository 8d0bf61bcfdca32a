"""A client of the original protocol (submit, claim, heartbeat, complete, stats), by a transcript of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.broker_client import Client
from taskharbor.broker.tokens import parse_token
from taskharbor.clock import FakeClock
from taskharbor.testing.broker import running_broker


class OriginalClient:
    """The five calls of that protocol, as its own client makes them, and what it reads of the answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(self, type: str, payload: Any, **more: int) -> str:
        return str(self._client.ok("POST", "/v1/jobs", {"payload": payload, "type": type, **more})["jobId"])

    def claim(self, worker: str, *types: str) -> tuple[str, str, Any] | None:
        asked = {"workerId": worker} | ({"types": types} if types else {})
        job = self._client.ok("POST", "/v1/jobs/claim", asked)
        if job["jobId"]:
            self.attempts = job["attempts"]
        return (job["jobId"], job["type"], job["payload"]) if job["jobId"] else None

    def heartbeat(self, job_id: str, worker: str) -> int:
        return self._client.post(f"/v1/jobs/{job_id}/heartbeat", {"workerId": worker}).status

    def complete(self, job_id: str, worker: str) -> int:
        return self._client.post(f"/v1/jobs/{job_id}/complete", {"workerId": worker}).status

    def stats(self) -> tuple[int, int, int, int]:
        stats = self._client.ok("GET", "/v1/stats")
        return stats["total"], stats["unclaimed"], stats["inProgress"], stats["completedTotal"]


@pytest.fixture(params=["memory", "objectstore"])
def url(request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path) -> Iterator[str]:
    store = "memory://" if request.param == "memory" else f"file://{tmp_path}/store?sync=off"
    with running_broker(store, clock=clock, sweeps=False) as url:
        yield url


def test_a_client_of_the_original_protocol_works_unchanged(
    client: Client, url: str, clock: FakeClock
) -> None:
    queue = OriginalClient(client)
    assert queue.claim("w1") is None
    mail = {"to": "user@example.com", "subject": "Hello"}
    first = queue.submit("email:send", mail, maxAttempts=2)
    resize = queue.submit("image:resize", [1, 2])
    second = queue.submit("email:send", None)
    assert queue.stats() == (3, 3, 0, 0)
    assert client.ok("GET", "/v1/stats")["brokerAddress"] == url.removeprefix("http://")

    # The oldest job of the wanted types; nothing if none matches.
    assert queue.claim("w1", "other") is None
    assert queue.claim("w1", "image:resize", "other") == (resize, "image:resize", [1, 2])
    assert queue.claim("w1", "email:send") == (first, "email:send", mail)
    assert queue.claim("w2") == (second, "email:send", None)
    assert queue.attempts == 1
    assert queue.claim("w2") is None
    assert queue.stats() == (3, 0, 3, 0)

    # Heartbeats keep a job for longer than the 30 seconds; only for its own worker.
    for _ in range(3):
        clock.advance(20)
        assert [queue.heartbeat(resize, worker) for worker in ("w1", "w2")] == [200, 409]
    assert [queue.complete(resize, worker) for worker in ("w2", "w1")] == [409, 200]
    assert queue.heartbeat("unknown", "w1") == 404

    # The other two stopped: each is claimed again, and a late worker has lost it.
    assert queue.claim("w3") == (first, "email:send", mail)
    assert queue.complete(first, "w1") == 409
    assert queue.claim("w3") == (second, "email:send", None)
    assert queue.attempts == 2
    assert queue.complete(second, "w3") == 200
    assert queue.stats() == (1, 0, 1, 2)

    # Its second attempt was the last one.
    clock.advance(31)
    assert queue.claim("w3") is None
    assert queue.stats() == (0, 0, 0, 2)
    assert client.job(first)["state"] == "dead"


def test_the_workers_id_proves_a_claim_under_the_same_access_token_only(clock: FakeClock) -> None:
    tokens = [parse_token(f"{name}:work,produce:{name}-secret-0123456789") for name in ("crew", "others")]
    with running_broker("memory://", clock=clock, sweeps=False, tokens=tuple(tokens)) as url:
        ours, theirs = [Client(url, secret=f"{name}-secret-0123456789") for name in ("crew", "others")]
        with ours, theirs:
            ids = [ours.submit() for _ in range(2)]
            assert OriginalClient(ours).claim("w") == (ids[0], "t", {})
            assert ours.job(ids[0])["worker"] == "/crew/w"
            assert OriginalClient(theirs).complete(ids[0], "w") == 409
            # A claim that was not made so needs its lease token.
            ours.claim(worker="w")
            assert OriginalClient(ours).complete(ids[1], "w") == 409
            assert OriginalClient(ours).complete(ids[0], "w") == 200
            # The protocol has no other way to end a job, and no other options of a claim.
            for path, body in ((f"{ids[1]}/fail", {}), ("claim", {"limit": 2}), ("claim", {"worker": "w"})):
                assert ours.post(f"/v1/jobs/{path}", {"workerId": "w", **body}).status == 422


def test_a_claim_of_the_original_protocol_may_be_repeated_under_its_name(
    client: Client, clock: FakeClock
) -> None:
    def claim() -> Any:
        return client.post("/v1/jobs/claim", {"workerId": "w"}, TaskHarbor_Request="claim-1").body

    assert claim() == {"jobId": None}
    job_id = client.submit()
    assert [claim()["jobId"], claim()["fence"]] == [job_id, 1]
    clock.advance(31)
    assert claim()["fence"] == 2
