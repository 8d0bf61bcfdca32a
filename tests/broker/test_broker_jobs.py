"""What a client in any language can do, by the JSON API alone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from broker.broker_client import Client
from broker.broker_loops import on_a_loop
from taskharbor.broker.job_routes import in_turns
from taskharbor.clock import FakeClock


def test_the_life_of_a_job_as_the_original_protocol_tells_it(client: Client, clock: FakeClock) -> None:
    """Submit, claim by type, heartbeat and complete by the worker's name; completedTotal counts it."""
    submitted = client.post(
        "/v1/jobs", {"type": "email:send", "payload": {"to": "user@example.com"}, "maxAttempts": 3}
    )
    assert (submitted.status, submitted.body["existed"]) == (201, False)
    assert client.claim(workerId="worker-1", types=["other"]) == []
    (job,) = client.claim(workerId="worker-1", types=["email:send"])
    assert job["payload"] == {"to": "user@example.com"}
    assert (job["state"], job["worker"], job["max_attempts"]) == ("inflight", "worker-1", 3)
    clock.advance(5)
    held = client.ok("POST", f"/v1/jobs/{job['id']}/heartbeat", {"workerId": "worker-1"})
    assert held["expires_at"] > job["expires_at"]
    assert client.post(f"/v1/jobs/{job['id']}/complete", {"workerId": "worker-2"}).status == 409
    client.ok("POST", f"/v1/jobs/{job['id']}/complete", {"workerId": "worker-1"})
    stats = client.ok("GET", "/v1/stats")
    assert stats["completedTotal"] == 1
    assert stats["queues"][0]["completedTotal"] == 1
    assert client.job(job["id"])["state"] == "done"


def test_a_job_that_was_listed_can_be_sent_again(client: Client) -> None:
    asked = {"payload": {"n": 1}, "priority": 3, "timeout_seconds": 5.0, "backoff_seconds": [1.0, 2.0]}
    first = client.job(client.submit(**asked, headers={"a": "b"}, max_attempts=2))
    client.ok("POST", f"/v1/jobs/{first['id']}/cancel")
    listed = client.ok("GET", "/v1/jobs?payload=true")["jobs"][0]
    assert listed["state"] == "cancelled"
    again = client.job(client.ok("POST", "/v1/jobs", listed)["id"])
    assert again["id"] != first["id"]
    kept = {
        name: first[name] for name in (*asked, "type", "queue", "state", "headers", "max_attempts", "run_at")
    }
    assert {name: again[name] for name in kept} == kept


def test_a_silent_worker_loses_its_job_and_the_third_one_kills_it(client: Client, clock: FakeClock) -> None:
    job_id = client.submit(maxAttempts=3)
    for claims in range(3):
        (job,) = client.claim(worker="w", lease_seconds=30)
        assert (job["id"], job["stalls"]) == (job_id, claims)
        clock.advance(30)
    assert client.claim(worker="w") == []
    assert client.job(job_id)["state"] == "dead"


def test_many_jobs_are_stored_all_or_not_at_all(client: Client) -> None:
    answer = client.post("/v1/jobs", {"jobs": [{"type": "a"}, {"type": "b", "delay_seconds": 60}]})
    assert answer.status == 201
    assert [client.job(one["id"])["state"] for one in answer.body["jobs"]] == ["ready", "scheduled"]
    # The second has a backoff that ends before it begins.
    refused = client.post("/v1/jobs", {"jobs": [{"type": "c"}, {"type": "d", "backoff_seconds": [9, 1]}]})
    assert refused.status == 422
    assert len(client.ok("GET", "/v1/jobs")["jobs"]) == 2


def test_a_job_that_exists_is_not_stored_again(client: Client) -> None:
    first = client.post("/v1/jobs", {"type": "a", "idempotency_key": "k"})
    second = client.post("/v1/jobs", {"type": "a", "idempotency_key": "k"})
    assert (first.status, second.status) == (201, 200)
    assert second.body == {"id": first.body["id"], "existed": True}


def test_a_keyed_job_is_changed_by_its_flags(client: Client) -> None:
    job_id = client.submit(key="k", payload=1)
    again = client.ok(
        "POST", "/v1/jobs", {"type": "t", "key": "k", "payload": 2, "update": {"payload": False}}
    )
    assert again == {"id": job_id, "existed": True}
    assert client.job(job_id)["payload"] == 1
    client.submit(key="k", payload=3)
    assert client.job(job_id)["payload"] == 3


def test_every_option_of_a_job_is_kept(client: Client) -> None:
    job = client.job(
        client.submit(
            queue="q",
            run_at="2030-01-02T03:04:05.678901+01:00",
            timeout_seconds=1.5,
            priority=-3,
            key="k",
            idempotency_key="i",
            max_attempts=7,
            max_stalls=2,
            backoff_seconds=[0.5, 20],
            headers={"trace": "1"},
        )
    )
    assert job["run_at"] == "2030-01-02T02:04:05.678901Z"
    assert (job["queue"], job["priority"], job["key"], job["idempotency_key"]) == ("q", -3, "k", "i")
    assert (job["max_attempts"], job["max_stalls"], job["backoff_seconds"]) == (7, 2, [0.5, 20.0])
    assert (job["timeout_seconds"], job["headers"], job["codec"]) == (1.5, {"trace": "1"}, "json")


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.50, "\\u00e9", null, true]}', "12345678901234567890.123456789", '"é"', "null", "[]"]
)
def test_a_payload_keeps_its_text(client: Client, text: str) -> None:
    """A number keeps its digits: the broker checks the text and does not rebuild it."""
    data = b'{"type":"t","payload":%s}' % text.encode()
    job_id = client.ask("POST", "/v1/jobs", data=data, Content_Type="application/json").body["id"]
    assert client.job(job_id)["payload"] == json.loads(text)
    (claimed,) = client.claim()
    assert claimed["payload"] == json.loads(text)


def test_bytes_in_another_codec_travel_in_base64(client: Client) -> None:
    packed = base64.b64encode(b"\x81\xa1a\x01").decode()
    job_id = client.submit(payload_base64=packed, codec="msgpack")
    assert (client.job(job_id)["payload_base64"], "payload" in client.job(job_id)) == (packed, False)
    (job,) = client.claim()
    assert job["payload_base64"] == packed
    client.ok("POST", f"/v1/jobs/{job_id}/complete", {"token": job["token"], "result_base64": packed})
    assert client.job(job_id)["result_base64"] == packed


def test_what_only_claims_to_be_json_is_answered_in_base64(client: Client) -> None:
    """A payload that some other producer stored under the wrong name must not break the answer's own JSON."""
    broken = base64.b64encode(b'{"a":').decode()
    job_id = client.submit(payload_base64=broken, codec="json")
    assert client.job(job_id)["payload_base64"] == broken
    assert client.claim()[0]["payload_base64"] == broken


def test_a_claim_takes_up_to_its_limit_in_order(client: Client) -> None:
    client.ok("POST", "/v1/jobs", {"jobs": [{"type": "t", "priority": n} for n in range(5)]})
    assert [job["priority"] for job in client.claim(limit=3)] == [4, 3, 2]
    assert [job["priority"] for job in client.claim(limit=10)] == [1, 0]


def test_a_worker_without_a_name_is_called_after_its_token(client: Client) -> None:
    client.submit()
    assert client.claim()[0]["worker"] == "everybody"


def test_progress_goes_up_and_a_cancel_comes_down(client: Client) -> None:
    job_id = client.submit()
    (job,) = client.claim()
    proof = {"token": job["token"]}
    held = client.ok("POST", f"/v1/jobs/{job_id}/heartbeat", {**proof, "progress": {"done": 0.5}})
    assert held["cancel_requested"] is False
    assert client.job(job_id)["progress"] == {"done": 0.5}
    assert client.ok("POST", f"/v1/jobs/{job_id}/cancel")["state"] == "inflight"
    results = client.ok("POST", "/v1/jobs/heartbeat", {"jobs": [{"id": job_id, **proof}]})["results"]
    assert results[0]["cancel_requested"] is True
    client.ok("POST", f"/v1/jobs/{job_id}/discard", {**proof, "reason": "asked to stop"})
    assert client.job(job_id)["state"] == "cancelled"


def test_a_failure_follows_the_jobs_own_limits_and_back_off(client: Client, clock: FakeClock) -> None:
    job_id = client.submit(max_attempts=3, backoff_seconds=[10, 15])
    applied = []
    for _ in range(3):
        (job,) = client.claim()
        error = {"type": "ValueError", "message": "no good", "detail": "line 1"}
        settled = client.ok("POST", f"/v1/jobs/{job_id}/fail", {"token": job["token"], "error": error})
        applied.append(settled["applied"])
        if settled["applied"] == "retry":
            assert client.claim() == []
            assert client.job(job_id)["state"] == "scheduled"
        clock.advance(15)
    assert applied == ["retry", "retry", "fail"]
    dead = client.job(job_id)
    assert (dead["state"], dead["attempts"]) == ("dead", 3)
    assert dead["last_error"] == "ValueError: no good\nline 1"
    # Told again after a lost answer: no error, and no change.
    assert client.ok("POST", f"/v1/jobs/{job_id}/fail", {"token": "gone", "error": "x"})["applied"] == "fail"
    assert client.job(job_id)["attempts"] == 3


def test_a_failure_that_no_try_can_mend_kills_at_once(client: Client) -> None:
    job_id = client.submit()
    (job,) = client.claim()
    settled = client.ok(
        "POST", f"/v1/jobs/{job_id}/fail", {"token": job["token"], "error": "bad input", "retryable": False}
    )
    assert settled["applied"] == "fail"
    assert client.job(job_id)["last_error"] == "Error: bad input"
    assert client.ok("POST", f"/v1/jobs/{job_id}/requeue")["state"] == "ready"
    assert client.job(job_id)["attempts"] == 0


def test_a_retry_at_a_time_of_ones_own(client: Client, clock: FakeClock) -> None:
    job_id = client.submit(max_attempts=2)
    (job,) = client.claim()
    body: dict[str, Any] = {"token": job["token"], "error": "busy", "delay_seconds": 90}
    assert client.ok("POST", f"/v1/jobs/{job_id}/retry", body)["applied"] == "retry"
    clock.advance(89)
    assert client.claim() == []
    clock.advance(1)
    (job,) = client.claim()
    # The last attempt: a wish for another is not granted.
    body["token"] = job["token"]
    assert client.ok("POST", f"/v1/jobs/{job_id}/retry", body)["applied"] == "fail"


def test_a_released_job_is_unspent(client: Client, clock: FakeClock) -> None:
    job_id = client.submit()
    (job,) = client.claim()
    client.ok("POST", f"/v1/jobs/{job_id}/release", {"token": job["token"], "delay_seconds": 10})
    assert client.claim() == []
    clock.advance(10)
    (job,) = client.claim()
    assert (job["attempts"], job["stalls"], job["fence"]) == (0, 0, 2)
    client.ok("POST", f"/v1/jobs/{job_id}/release", {"worker": "everybody"})
    assert client.job(job_id)["state"] == "ready"


def test_each_end_in_a_batch_stands_for_itself(client: Client) -> None:
    client.ok("POST", "/v1/jobs", {"jobs": [{"type": "t"}] * 5})
    jobs = client.claim(limit=5, worker="w")
    ends = [
        {"action": "complete", "id": jobs[0]["id"], "token": jobs[0]["token"], "result": {"n": 1}},
        {"action": "fail", "id": jobs[1]["id"], "token": jobs[1]["token"], "error": "x", "retryable": False},
        {"action": "retry", "id": jobs[2]["id"], "token": jobs[2]["token"], "error": "x", "delay_seconds": 5},
        {"action": "complete", "id": jobs[3]["id"], "token": "stale"},
        {"action": "release", "id": jobs[4]["id"], "workerId": "w"},
        {"action": "fail", "id": "unknown", "token": "x"},
        {"action": "discard", "id": "unknown", "workerId": "w"},
    ]
    results = client.ok("POST", "/v1/jobs/settle", {"settlements": ends})["results"]
    assert [one.get("applied") or one["error"]["code"] for one in results] == [
        "complete",
        "fail",
        "retry",
        "lease_mismatch",
        "release",
        "job_not_found",
        "job_not_found",
    ]
    states = [client.job(job["id"])["state"] for job in jobs]
    assert states == ["done", "dead", "scheduled", "inflight", "ready"]
    assert client.job(jobs[0]["id"])["result"] == {"n": 1}


def test_heartbeats_in_a_batch_stand_for_themselves(client: Client, clock: FakeClock) -> None:
    client.ok("POST", "/v1/jobs", {"jobs": [{"type": "t"}] * 3})
    jobs = client.claim(limit=3, worker="w", lease_seconds=10)
    clock.advance(5)
    beats = [
        {"id": jobs[0]["id"], "token": jobs[0]["token"]},
        {"id": jobs[1]["id"], "token": "stale"},
        {"id": jobs[2]["id"], "workerId": "w"},
        {"id": "unknown", "workerId": "w"},
    ]
    results = client.ok("POST", "/v1/jobs/heartbeat", {"jobs": beats, "lease_seconds": 10})["results"]
    assert ["token" in one or one["error"]["code"] for one in results] == [
        True,
        "lease_mismatch",
        True,
        "job_not_found",
    ]
    clock.advance(5)
    assert [job["id"] for job in client.claim(limit=3)] == [jobs[1]["id"]]


def test_every_refusal_has_its_code(client: Client, clock: FakeClock) -> None:
    job_id = client.submit()
    path = f"/v1/jobs/{job_id}"
    codes = [client.post(f"{path}/complete", {"token": "x"}), client.post(f"{path}/requeue")]
    (job,) = client.claim(lease_seconds=10)
    codes += [
        client.post(f"{path}/complete", {"token": "x"}),
        client.post(f"{path}/complete", {"worker": "x"}),
    ]
    clock.advance(10)
    codes += [client.post(f"{path}/heartbeat", {"token": job["token"]})]
    (job,) = client.claim()
    client.ok("POST", f"{path}/complete", {"token": job["token"]})
    codes += [
        client.post(f"{path}/cancel"),
        client.get("/v1/jobs/unknown"),
        client.post(f"{path}/complete", {}),
    ]
    assert [(one.status, one.body["code"]) for one in codes] == [
        (409, "job_not_inflight"),
        (409, "job_not_dead"),
        (409, "lease_mismatch"),
        (409, "lease_mismatch"),
        (409, "lease_expired"),
        (409, "job_finished"),
        (404, "job_not_found"),
        (422, "invalid_request"),
    ]
    for one in codes:
        assert one.headers["content-type"] == "application/problem+json"
        assert one.body["status"] == one.status


def test_jobs_are_listed_by_filter_and_page_by_page(client: Client) -> None:
    ids = [client.submit(type=f"t{n % 2}", queue=f"q{n % 3}", payload=n) for n in range(12)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = client.ok("GET", f"/v1/jobs?limit=5{cursor}")
        seen += [job["id"] for job in page["jobs"]]
        assert all("payload" not in job for job in page["jobs"])
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == ids[::-1]
    listed = client.ok("GET", "/v1/jobs?queue=q1&type=t0&type=t1&state=ready&state=done&payload=true")["jobs"]
    assert [job["payload"] for job in listed] == [10, 7, 4, 1]


def test_a_name_with_a_slash_in_it_is_one_name(client: Client) -> None:
    client.ok("PUT", "/v1/queues/a%2Fb%20%C3%A9", {"max_inflight": 3})
    assert client.ok("GET", "/v1/queues/a%2Fb%20%C3%A9")["queue"] == "a/b é"
    assert client.get("/v1/queues/a/b").status == 404
    assert client.get("/v1/queues/%ff").status == 422


def test_queue_settings_are_replaced_as_a_whole(client: Client) -> None:
    client.ok("PUT", "/v1/queues/q", {"paused": True, "max_inflight": 2, "keep_done_seconds": None})
    kept = client.ok("GET", "/v1/queues/q")
    assert (kept["paused"], kept["max_inflight"], kept["keep_done_seconds"]) == (True, 2, None)
    client.submit(queue="q")
    assert client.claim(queue="q") == []
    client.ok("PUT", "/v1/queues/q", {})
    assert len(client.claim(queue="q")) == 1
    assert client.ask("PUT", "/v1/queues/q", {"failure_queue": "q"}).status == 422
    assert client.ask("PUT", "/v1/queues/q", {"max_inflight": 0}).status == 422


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


def test_purge_removes_only_what_has_ended(client: Client) -> None:
    kept = client.submit()
    gone = client.submit()
    client.ok("POST", f"/v1/jobs/{gone}/cancel")
    assert client.ok("POST", "/v1/purge", {"states": ["cancelled", "ready"]}) == {"removed": 1}
    assert client.get(f"/v1/jobs/{gone}").status == 404
    assert client.job(kept)["state"] == "ready"


def test_many_jobs_are_cancelled_and_requeued_at_once(client: Client) -> None:
    job_id = client.submit(max_attempts=1)
    (job,) = client.claim()
    client.ok("POST", f"/v1/jobs/{job_id}/fail", {"token": job["token"]})
    results = client.ok("POST", "/v1/jobs/requeue", {"ids": [job_id, "unknown"]})["results"]
    assert [one.get("state") or one["error"]["code"] for one in results] == ["ready", "job_not_found"]
    results = client.ok("POST", "/v1/jobs/cancel", {"ids": [job_id, "unknown"]})["results"]
    assert [one.get("state") or one["error"]["code"] for one in results] == ["cancelled", "job_not_found"]


def test_the_brokers_time_is_the_stores(client: Client, clock: FakeClock) -> None:
    assert client.ok("GET", "/v1/time")["microseconds"] == clock.now()


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
        ({"type": "t", "payload": 1, "payload_base64": ""}, "payload"),
        ({"type": "t", "payload": 1, "codec": "msgpack"}, "base64"),
        ({"type": "t", "headers": {"a": "x" * 9000}}, "headers"),
        ({"jobs": []}, "jobs"),
        ({"jobs": [{"type": "t"}, {"type": 5}]}, "jobs[1]"),
        ([], "object"),
        ("x", "object"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_the_place(client: Client, body: Any, where: str) -> None:
    answer = client.post("/v1/jobs", body)
    assert (answer.status, answer.body["code"]) == (422, "invalid_request")
    assert where in answer.body["detail"] + answer.body.get("hint", "")
    assert client.ok("GET", "/v1/jobs")["jobs"] == []


def test_a_request_that_is_repeated_under_its_name_gets_the_same_answer(
    client: Client, clock: FakeClock
) -> None:
    """What an unclear end of a connection asks for: no job is stored twice, none is left with nobody."""
    job = {"type": "t", "payload": 1}
    answers = [client.post("/v1/jobs", job, TaskHarbor_Request="submit-1").body for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    client.post("/v1/jobs", job, TaskHarbor_Request="submit-2")
    assert len(client.ok("GET", "/v1/jobs")["jobs"]) == 2
    claims = [client.post("/v1/jobs/claim", {}, TaskHarbor_Request="claim-1").body["jobs"] for _ in range(2)]
    assert claims[0] == claims[1]
    assert claims[0][0]["id"] == answers[0]["id"]
    clock.advance(31)
    # That lease is over: the name leads to a new claim.
    (again,) = client.post("/v1/jobs/claim", {}, TaskHarbor_Request="claim-1").body["jobs"]
    assert (again["id"], again["fence"]) == (answers[0]["id"], 2)


def test_a_claim_that_found_nothing_is_made_anew_under_its_name(client: Client) -> None:
    assert client.post("/v1/jobs/claim", {}, TaskHarbor_Request="claim-1").body["jobs"] == []
    client.submit()
    assert len(client.post("/v1/jobs/claim", {}, TaskHarbor_Request="claim-1").body["jobs"]) == 1


def test_a_name_is_for_one_request(client: Client) -> None:
    client.post("/v1/jobs", {"type": "t"}, TaskHarbor_Request="name")
    for path, body in (("/v1/jobs", {"type": "u"}), ("/v1/jobs/claim", {})):
        answer = client.post(path, body, TaskHarbor_Request="name")
        assert (answer.status, answer.body["code"]) == (422, "invalid_request")
        assert "make a new one for every call" in answer.body["detail"]
    assert client.post("/v1/jobs", {"type": "t"}, TaskHarbor_Request="x" * 65).status == 422
    assert len(client.ok("GET", "/v1/jobs")["jobs"]) == 1


@on_a_loop
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
