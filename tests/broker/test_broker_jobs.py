"""What a client in any language can do, by the JSON API alone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from broker.broker_client import Client
from taskharbor.broker.job_routes import in_turns
from taskharbor.clock import FakeClock


def outcomes(results: list[dict[str, Any]], field: str) -> list[Any]:
    """This field, or the code of the error, of each answer of a batch."""
    return [one["error"]["code"] if "error" in one else one[field] for one in results]


def test_every_option_of_a_job_is_kept_and_a_listed_job_can_be_sent_again(client: Client) -> None:
    asked = {
        **{"queue": "q", "run_at": "2030-01-02T03:04:05.678901+01:00", "timeout_seconds": 1.5},
        **{"max_attempts": 7, "max_stalls": 2, "backoff_seconds": [0.5, 20.0], "headers": {"trace": "1"}},
        **{"payload": {"n": 1}, "key": "k", "codec": "json", "priority": -3},
    }
    first = client.submit(**asked, idempotency_key="i")
    client.ok("POST", f"/v1/jobs/{first}/cancel")
    (listed,) = client.ok("GET", "/v1/jobs?payload=true")["jobs"]
    assert (listed["state"], listed["idempotency_key"]) == ("cancelled", "i")
    again = client.ok("POST", "/v1/jobs", {**listed, "idempotency_key": None})["id"]
    assert again != first
    kept = {**asked, "type": "t", "run_at": "2030-01-02T02:04:05.678901Z"}
    for job in (listed, client.job(again)):
        assert {name: job[name] for name in kept} == kept
    assert client.job(again)["state"] == "scheduled"


def test_a_job_without_a_payload_has_an_empty_one_and_a_listed_one_does_not_lose_its_own(
    client: Client,
) -> None:
    assert client.job(client.submit())["payload"] == {}
    job_id = client.submit(key="k", payload=1)
    for listed in client.jobs():
        assert client.post("/v1/jobs", listed).refusal == (422, "invalid_request")
    assert client.job(job_id)["payload"] == 1
    empty = client.submit(payload_base64="", codec="msgpack")
    sent = client.post("/v1/jobs", client.job(empty))
    assert client.job(sent.body["id"])["payload_base64"] == ""


def test_a_job_that_exists_is_not_stored_again_but_may_be_changed(client: Client) -> None:
    first, second = [client.post("/v1/jobs", {"type": "a", "idempotency_key": "k"}) for _ in range(2)]
    assert (first.status, second.status) == (201, 200)
    job_id = first.body["id"]
    assert second.body == {"id": job_id, "jobId": job_id, "existed": True}
    job_id = client.submit(key="k", payload=1)
    for change, payload in (({"update": {"payload": False}}, 1), ({}, 2)):
        assert client.submit(key="k", payload=2, **change) == job_id
        assert client.job(job_id)["payload"] == payload


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.50, "\\u00e9", null, true]}', "12345678901234567890.123456789", '"é"', "null", "[]"]
)
def test_a_payload_keeps_its_text(client: Client, text: str) -> None:
    """A number keeps its digits: the broker checks the text and does not rebuild it."""
    job_id = client.ask("POST", "/v1/jobs", data=b'{"type":"t","payload":%s}' % text.encode()).body["id"]
    assert client.job(job_id)["payload"] == json.loads(text)
    (claimed,) = client.claim()
    assert claimed["payload"] == json.loads(text)


@pytest.mark.parametrize(("codec", "data"), [("msgpack", b"\x81\xa1a\x01"), ("json", b'{"a":')])
def test_bytes_that_are_no_json_travel_in_base64(client: Client, codec: str, data: bytes) -> None:
    """Also those that some producer stored as JSON: they must not break the answer's own."""
    packed = base64.b64encode(data).decode()
    job_id = client.submit(payload_base64=packed, codec=codec)
    assert (client.job(job_id)["payload_base64"], "payload" in client.job(job_id)) == (packed, False)
    (job,) = client.claim()
    assert job["payload_base64"] == packed
    client.act(job, "complete", result_base64=packed)
    assert client.job(job_id)["result_base64"] == packed


def test_progress_goes_up_and_a_cancel_comes_down(client: Client) -> None:
    job = client.held()
    job_id = job["id"]
    # It has no name of its own, so it is called after its token.
    assert job["worker"] == "everybody"
    assert client.act(job, "heartbeat", progress={"done": 0.5})["cancel_requested"] is False
    assert client.job(job_id)["progress"] == {"done": 0.5}
    assert client.ok("POST", f"/v1/jobs/{job_id}/cancel")["state"] == "inflight"
    beats = {"jobs": [{"id": job_id, "token": job["token"]}]}
    assert client.ok("POST", "/v1/jobs/heartbeat", beats)["results"][0]["cancel_requested"] is True
    client.act(job, "discard", reason="asked to stop")
    assert client.job(job_id)["state"] == "cancelled"


def test_a_failure_follows_the_jobs_own_limits_and_back_off(client: Client, clock: FakeClock) -> None:
    job_id = client.submit(max_attempts=3, backoff_seconds=[10, 15])
    applied = []
    for _ in range(3):
        (job,) = client.claim()
        error = {"type": "ValueError", "message": "no good", "detail": "line 1"}
        applied.append(client.act(job, "fail", error=error)["applied"])
        assert client.claim() == []
        clock.advance(15)
    assert applied == ["retry", "retry", "fail"]
    dead = client.job(job_id)
    assert (dead["state"], dead["attempts"]) == ("dead", 3)
    assert dead["last_error"] == "ValueError: no good\nline 1"
    # Told again after a lost answer: no error, and no change.
    assert client.act({**job, "token": "gone"}, "fail", error="x")["applied"] == "fail"
    assert client.job(job_id)["attempts"] == 3


def test_a_job_comes_back_at_a_time_of_ones_own_spent_or_not(client: Client, clock: FakeClock) -> None:
    client.act(client.held(max_attempts=2), "release", delay_seconds=10)
    assert client.claim() == []
    clock.advance(10)
    (job,) = client.claim()
    assert (job["attempts"], job["stalls"], job["fence"]) == (0, 0, 2)
    client.act(job, "release")
    (job,) = client.claim()
    assert client.act(job, "retry", error="busy", delay_seconds=90)["applied"] == "retry"
    clock.advance(89)
    assert client.claim() == []
    clock.advance(1)
    (job,) = client.claim()
    # The last attempt: a wish for another is not granted.
    assert client.act(job, "retry", error="busy", delay_seconds=90)["applied"] == "fail"


def test_each_heartbeat_and_each_end_in_a_batch_stands_for_itself(client: Client, clock: FakeClock) -> None:
    client.ok("POST", "/v1/jobs", {"jobs": [{"type": "t"}] * 5})
    jobs = client.claim(limit=5, lease_seconds=10)
    done, failed, retried, lost, released = [{"id": job["id"], "token": job["token"]} for job in jobs]
    clock.advance(5)
    unknown = {"id": "unknown", "token": "x"}
    beats = [done, failed, retried, {**lost, "token": "stale"}, released, {"id": "unknown", "workerId": "w"}]
    results = client.ok("POST", "/v1/jobs/heartbeat", {"jobs": beats, "lease_seconds": 10})["results"]
    tokens = [one["token"] for one in (done, failed, retried)]
    assert outcomes(results, "token") == [*tokens, "lease_mismatch", released["token"], "job_not_found"]
    clock.advance(5)
    assert [job["id"] for job in client.claim(limit=5)] == [lost["id"]]
    ends = [
        {"action": "complete", **done, "result": {"n": 1}},
        {"action": "fail", **failed, "error": "x", "retryable": False},
        {"action": "retry", **retried, "error": "x", "delay_seconds": 5},
        {"action": "complete", **lost},
        {"action": "release", **released},
        {"action": "fail", **unknown},
        {"action": "discard", **unknown},
    ]
    results = client.ok("POST", "/v1/jobs/settle", {"settlements": ends})["results"]
    assert outcomes(results, "applied") == [
        *("complete", "fail", "retry", "lease_mismatch", "release", "job_not_found", "job_not_found")
    ]
    states = [client.job(job["id"])["state"] for job in jobs]
    assert states == ["done", "dead", "scheduled", "inflight", "ready"]
    assert client.job(done["id"])["result"] == {"n": 1}


def test_every_refusal_has_its_code(client: Client, clock: FakeClock) -> None:
    job_id = client.submit()
    path = f"/v1/jobs/{job_id}"
    answers = [client.post(f"{path}/complete", {"token": "x"}), client.post(f"{path}/requeue")]
    (job,) = client.claim(lease_seconds=10)
    answers += [client.post(f"{path}/complete", {proof: "x"}) for proof in ("token", "workerId")]
    clock.advance(10)
    answers += [client.post(f"{path}/heartbeat", {"token": job["token"]})]
    (job,) = client.claim()
    client.act(job, "complete")
    answers += [client.post(f"{path}/cancel"), client.get("/v1/jobs/unknown")]
    answers += [client.post(f"{path}/complete", {})]
    conflicts = ("job_not_inflight", "job_not_dead", "lease_mismatch", "lease_mismatch", "lease_expired")
    assert [one.refusal for one in answers] == [
        *((409, code) for code in (*conflicts, "job_finished")),
        (404, "job_not_found"),
        (422, "invalid_request"),
    ]
    for one in answers:
        assert one.headers["content-type"] == "application/problem+json"
        assert one.body["status"] == one.status


def test_jobs_are_listed_by_filter_and_page_by_page(client: Client) -> None:
    ids = [client.submit(type=f"t{n % 2}", queue=f"q{n % 3}", payload=n) for n in range(12)]
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = client.ok("GET", f"/v1/jobs?limit=5&cursor={cursor}")
        seen += [job["id"] for job in page["jobs"]]
        assert all("payload" not in job for job in page["jobs"])
        cursor = page["cursor"]
    assert seen == ids[::-1]
    listed = client.ok("GET", "/v1/jobs?queue=q1&type=t0&type=t1&state=ready&state=done&payload=true")["jobs"]
    assert [job["payload"] for job in listed] == [10, 7, 4, 1]
    assert client.ok("GET", "/v1/jobs?state=done")["jobs"] == []
    refused = client.get("/v1/jobs?finished_before=1700000000")
    assert "finished_before must be a time with a zone" in refused.body["detail"]


def test_queue_settings_change_by_field_under_any_name(client: Client) -> None:
    """A queue that was never seen is made only if the request says so."""
    path, name = "/v1/queues/a%2Fb%20%C3%A9", "a/b é"
    refused = client.ask("PATCH", path, {"paused": True})
    assert (refused.status, refused.body["code"]) == (404, "queue_not_found")
    client.ok("PATCH", path, {"create": True, "paused": True, "max_inflight": 2})
    assert client.ok("PATCH", path, {"keep_done_seconds": None}) == client.ok("GET", path)
    kept = client.ok("GET", path)
    assert (kept["queue"], kept["paused"]) == (name, True)
    assert (kept["max_inflight"], kept["keep_done_seconds"]) == (2, None)
    client.submit(queue=name)
    assert client.claim(queue=name) == []
    client.ok("PATCH", path, {"paused": False})
    assert client.ok("PATCH", path, {"max_inflight": None})["max_inflight"] is None
    assert len(client.claim(queue=name)) == 1
    for wrong in ({"failure_queue": name}, {"max_inflight": 0}, {"paused": None}, {"declaration": "x"}):
        assert client.ask("PATCH", path, wrong).status == 422
    assert client.get("/v1/queues/a/b").status == 404
    assert client.get("/v1/queues/%ff").status == 422
    assert client.ok("GET", "/v1/queues/%7Bname%7D")["queue"] == "{name}"


def test_the_attempt_log_is_read_from_a_cursor(client: Client) -> None:
    job_id = client.submit()
    (job,) = client.claim(worker="w")
    first = client.ok("GET", "/v1/attempts")
    assert first["attempts"] == []
    client.ok("POST", f"/v1/jobs/{job_id}/complete", {"token": job["token"]})
    page = client.ok("GET", f"/v1/attempts?after={first['cursor']}")
    (row,) = page["attempts"]
    assert (row["job_id"], row["outcome"], row["worker"], row["fence"]) == (job_id, "done", "w", 1)
    assert client.ok("GET", f"/v1/attempts?after={page['cursor']}")["attempts"] == []
    assert client.ok("GET", f"/v1/jobs/{job_id}/attempts")["attempts"] == [row]


@pytest.mark.parametrize("max_attempts", [2, 3])
@pytest.mark.parametrize("end", ["complete", "fail"])
def test_a_failure_may_be_repeated_and_a_retry_only_if_it_was_the_last(
    client: Client, end: str, max_attempts: int
) -> None:
    job = client.held(max_attempts=max_attempts)
    client.act(job, end, **({"retryable": False} if end == "fail" else {}))
    job["token"] = "nonsense"
    assert client.act(job, "fail")["applied"] == "fail"
    answer = client.post(f"/v1/jobs/{job['id']}/retry", {"token": "nonsense", "error": "x"})
    is_last = end == "fail" and max_attempts == 2
    assert answer.status == 200 if is_last else answer.refusal == (409, "job_not_inflight")


def test_an_operator_requeues_cancels_and_purges(client: Client) -> None:
    job = client.held()
    job_id = job["id"]
    assert client.act(job, "fail", error="bad", retryable=False)["applied"] == "fail"
    assert client.job(job_id)["last_error"] == "Error: bad"
    assert client.ok("POST", f"/v1/jobs/{job_id}/requeue")["state"] == "ready"
    assert client.job(job_id)["attempts"] == 0
    client.act(client.claim()[0], "fail", retryable=False)
    for action, state in (("requeue", "ready"), ("cancel", "cancelled")):
        results = client.ok("POST", f"/v1/jobs/{action}", {"ids": [job_id, "unknown"]})["results"]
        assert outcomes(results, "state") == [state, "job_not_found"]
    kept = client.submit()
    assert client.ok("POST", "/v1/purge", {"states": ["cancelled", "ready"]}) == {"removed": 1}
    assert [job["id"] for job in client.jobs()] == [kept]


def test_an_operator_requeues_at_a_time_and_cancels_by_key_or_only_what_waits(client: Client) -> None:
    job = client.held(key="k")
    job_id, waiting = job["id"], client.submit(key="k")
    assert client.ok("POST", f"/v1/jobs/{job_id}/cancel", {"only_waiting": True})["state"] == "inflight"
    assert not client.job(job_id)["cancel_requested"]
    path = "/v1/queues/default/cancel"
    assert client.ok("POST", path, {"keys": ["k"], "only_waiting": True}) == {"cancelled": {"k": 1}}
    assert client.job(waiting)["state"] == "cancelled"
    assert client.ok("POST", path, {"keys": ["k", "no", "k"]}) == {"cancelled": {"k": 1, "no": 0}}
    client.act(job, "fail", retryable=False)
    later = {"run_at": "2100-01-01T00:00:00Z", "keep_counts": True}
    (requeued,) = client.ok("POST", "/v1/jobs/requeue", {"ids": [job_id], **later})["results"]
    assert (requeued["state"], client.job(job_id)["attempts"]) == ("scheduled", 1)
    assert client.job(job_id)["run_at"] == later["run_at"]
    assert client.post(f"/v1/jobs/{job_id}/requeue", {"run_at": "2100-01-01"}).status == 422


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"type": "t", "prioritty": 1}, "prioritty"),
        ({"type": ""}, "type"),
        ({"type": "x" * 201}, "type"),
        ({"type": "a\x00b"}, "type"),
        ({"type": "t", "priority": 40_000}, "priority"),
        ({"type": "t", "run_at": "2030-01-01T00:00:00"}, "run_at"),
        ({"type": "t", "run_at": "2030-01-01T00:00:00Z", "delay_seconds": 1}, "delay"),
        ({"type": "t", "update": {}}, "key"),
        ({"type": "t", "max_attempts": 0}, "max_attempts"),
        ({"type": "t", "maxAttempts": 0}, "maxAttempts"),
        ({"jobs": [{"type": "t", "key": "k", "attempts": 0}]}, "`attempts`, as a listing shows it"),
        ({"type": "t", "payload": 1, "payload_base64": ""}, "payload"),
        ({"type": "t", "payload": 1, "codec": "msgpack"}, "base64"),
        ({"type": "t", "headers": {"a": "x" * 9000}}, "headers"),
        ({"jobs": []}, "jobs"),
        ({"jobs": [{"type": "t"}, {"type": 5}]}, "jobs[1]"),
        ({"jobs": [{"type": "t"}, {"type": "t", "backoff_seconds": [9, 1]}]}, "backoff"),
        ([], "object"),
        ("x", "object"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_the_place(client: Client, body: Any, where: str) -> None:
    answer = client.post("/v1/jobs", body)
    assert answer.refusal == (422, "invalid_request")
    assert where in answer.body["detail"] + answer.body.get("hint", "")
    assert client.jobs() == []


def test_a_request_that_is_repeated_under_its_name_gets_the_same_answer(
    client: Client, clock: FakeClock
) -> None:
    """What an unclear end of a connection asks for: no job is stored twice, none is left with nobody."""

    def claim() -> list[dict[str, Any]]:
        return list(client.post("/v1/jobs/claim", {}, TaskHarbor_Request="claim-1").body["jobs"])

    # A claim that found nothing is made anew under its name.
    assert claim() == []
    job = {"type": "t", "payload": 1}
    answers = [client.post("/v1/jobs", job, TaskHarbor_Request="submit-1").body for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    client.post("/v1/jobs", job, TaskHarbor_Request="submit-2")
    assert len(client.jobs()) == 2
    claims = [claim(), claim()]
    assert claims[0] == claims[1]
    assert claims[0][0]["id"] == answers[0]["id"]
    clock.advance(31)
    # That lease is over: the name leads to a new claim.
    (again,) = claim()
    assert (again["id"], again["fence"]) == (answers[0]["id"], 2)
    # A name is for one request.
    for path, body in (("/v1/jobs", {"type": "u"}), ("/v1/jobs/claim", {})):
        answer = client.post(path, body, TaskHarbor_Request="submit-1")
        assert answer.refusal == (422, "invalid_request")
        assert "make a new one for every call" in answer.body["detail"]
    assert client.post("/v1/jobs", job, TaskHarbor_Request="x" * 65).status == 422
    assert len(client.jobs()) == 2


async def test_a_long_batch_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.job_routes.TURN_SECONDS", 0.0)
    order: list[str] = []

    def items() -> Iterator[int]:
        for number in range(3):
            order.append(f"item {number}")
            yield number

    asyncio.get_running_loop().call_soon(order.append, "other")
    assert await in_turns(items()) == [0, 1, 2]
    assert order == ["item 0", "other", "item 1", "item 2"]
