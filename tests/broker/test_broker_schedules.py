"""Schedules through the JSON API: what the Python client does, with the rights of the driver protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.broker_client import Answer, Client, Direct, contents
from needing import Entered
from taskharbor.broker.tokens import parse_token
from taskharbor.clock import FakeClock
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.records import JobFilter
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, to_datetime
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import LEASE
from taskharbor.schedules.ticking import tick
from taskharbor.testing.broker import running_broker

PATH = "/v1/schedules"
SECRETS = {
    "all": "produce", "reads": "read", "mail": "produce:mail.*", "both": f"admin:mail.*,{QUEUE}",
}  # fmt: skip
TOKENS = tuple(parse_token(f"{name}:{rest}:{name * 8}") for name, rest in SECRETS.items())


class Asked(Direct):
    """Requests of a caller by name, in JSON."""

    async def json(self, who: str, method: str, path: str = "", body: Any = None) -> Answer:
        data = b"" if body is None else wire.encode_json(body)
        kind = {"Content_Type": "application/json"} if data else {}
        return await self.ask(method, PATH + path, data, Authorization=f"Bearer {who * 8}", **kind)

    async def ok(self, method: str, path: str = "", body: Any = None) -> Any:
        answer = await self.json("both" if method == "DELETE" else "all", method, path, body)
        assert answer.status in (200, 201), answer
        return answer.body


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Entered:
    kind: str = request.param
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/jobs.db"}
    url = urls.get(kind) or request.getfixturevalue(f"{kind}_url")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Asked]:
        async with connect(url) as driver:
            yield Asked(driver, clock=FakeClock(), tokens=TOKENS, sweeps=False)

    return Entered(opened())


in_memory = pytest.mark.parametrize("asked", ["memory"], indirect=True)


def clock_of(asked: Asked) -> FakeClock:
    clock = asked.app.service.clock
    assert isinstance(clock, FakeClock)
    return clock


async def test_the_life_of_a_schedule(asked: Asked) -> None:
    clock = clock_of(asked)
    body = {"job": "poll", "every": 60, "payload": {"n": 1}, "queue": "mail.in", "timeout": 5}
    put = await asked.json("all", "PUT", "/tenant-7", body)
    assert (put.status, put.body["state"], put.body["schedule"]["every"]) == (201, "active", 60.0)
    assert len(put.body["next"]) == 5
    again = await asked.json("all", "PUT", "/tenant-7", {**put.body["schedule"], "every": "PT60S"})
    assert (again.status, again.body) == (200, put.body)
    assert (await asked.ok("GET"))["schedules"] == [put.body]
    clock.advance(60)
    await tick(asked.driver, clock.now(), "w")
    shown = await asked.ok("GET", "/tenant-7")
    assert (shown["last_state"], shown["missed"]) == ("ready", 0)
    paused = await asked.ok("POST", "/tenant-7/pause", {"note": "holidays"})
    assert (paused["state"], paused["note"], paused["next"]) == ("paused", "holidays", [])
    assert (await asked.ok("POST", "/tenant-7/pause", {}))["note"] == ""
    assert (await asked.ok("POST", "/tenant-7/resume"))["state"] == "active"
    job = await asked.ok("POST", "/tenant-7/trigger")
    (record,) = await asked.driver.get([job["id"]], now=clock.now())
    assert record is not None
    assert (record.payload, record.queue, record.timeout_us) == (b'{"n":1}', "mail.in", 5 * SECOND)
    start, end = (to_datetime(clock.now() - 600 * SECOND).isoformat(), to_datetime(clock.now()).isoformat())
    assert await asked.ok("POST", "/tenant-7/backfill", {"start": start, "end": end}) == {"enqueued": 10}
    assert (await asked.ok("DELETE", "/tenant-7"))["name"] == "tenant-7"
    assert await asked.ok("GET") == {"schedules": [], "cursor": None}


@in_memory
async def test_a_trigger_says_if_a_job_waits_already_and_may_be_repeated_under_a_name(asked: Asked) -> None:
    await asked.ok("PUT", "/s", {"job": "t", "every": 60, "overlap": "queue_one"})
    clock, headers = clock_of(asked), {"Authorization": f"Bearer {'all' * 8}", "TaskHarbor_Request": "mine"}
    first = await asked.ask("POST", f"{PATH}/s/trigger", **headers)
    clock.advance(1)
    assert (await asked.ask("POST", f"{PATH}/s/trigger", **headers)).body == first.body
    assert not first.body["existed"]
    assert await asked.ok("POST", "/s/trigger") == {**first.body, "existed": True}


@in_memory
async def test_pages(asked: Asked) -> None:
    for name in "abc":
        await asked.ok("PUT", f"/{name}", {"job": "t", "every": 60})
        clock_of(asked).advance(1)
    first = await asked.ok("GET", "?limit=2")
    rest = await asked.ok("GET", f"?limit=2&cursor={first['cursor']}")
    assert [one["name"] for one in first["schedules"] + rest["schedules"]] == ["c", "b", "a"]
    assert (await asked.json("all", "GET", "?limit=101")).status == 422


@in_memory
async def test_a_change_while_its_tick_is_made_shows_when_it_holds(asked: Asked) -> None:
    now = clock_of(asked).now()
    await asked.ok("PUT", "/s", {"job": "t", "every": 60})
    await asked.driver.reserve(QUEUE, limit=1, lease_for=LEASE, now=now, worker="w")
    assert (await asked.ok("PUT", "/s", {"job": "t", "every": 90}))["schedule"]["every"] == 90
    assert [one["schedule"]["every"] for one in (await asked.ok("GET"))["schedules"]] == [60]


@in_memory
@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"every": 60}, "missing required field `job`"),
        ({"job": "t"}, "give either cron or every"),
        ({"job": "t", "cron": "61 * * * *"}, "schedule 's': cron '61 * * * *': minute '61' is wrong"),
        ({"job": "t", "cron": "* * * * *" * 30}, "has 270 characters: at most 200"),
        ({"job": "t", "cron": ["* * * * *"] * 21}, "$.cron"),
        ({"job": "t", "cron": "0 3 * * *", "zone": "Mars"}, "zone 'Mars' is not known"),
        ({"job": "t", "every": 60, "name": "other"}, "name 'other': the path names 's'"),
        ({"job": "t", "every": 60, "overlap": "never"}, "$.overlap"),
        ({"job": "t", "every": True}, "$.every"),
        ({"job": "t", "every": 1e300}, "every 1e+300"),
        ({"job": "t", "every": 60, "start": "2026-01-01T00:00:00"}, "$.start"),
        ({"job": "t", "every": 60, "payload": [1]}, "payload [1]: give a mapping"),
        ({"job": "t", "every": 60, "queue": QUEUE}, "is for the schedules themselves"),
        ({"job": "t", "every": 60, "retries": 5}, "unknown field `retries`"),
    ],
)
async def test_wrong_values_name_their_field_and_change_nothing(
    asked: Asked, body: dict[str, Any], where: str
) -> None:
    before = await contents(asked.driver)
    answer = await asked.json("all", "PUT", "/s", body)
    assert answer.refusal == (422, "invalid_request")
    assert where in answer.body["detail"]
    assert await contents(asked.driver) == before


@in_memory
async def test_a_payload_has_the_bounds_of_a_jobs(asked: Asked) -> None:
    nest: Any = 1
    for _ in range(70):
        nest = {"a": nest}
    deep = await asked.json("all", "PUT", "/s", {"job": "t", "every": 60, "payload": nest})
    assert deep.refusal == (422, "too_deep")
    large = await asked.json("all", "PUT", "/s", {"job": "t", "every": 60, "payload": {"a": "x" * 1_048_576}})
    assert "payload of 1048584 bytes" in large.body["detail"]


@in_memory
async def test_what_is_not_there_is_404(asked: Asked) -> None:
    instants = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-02T00:00:00Z"}
    for method, path, body in (
        ("GET", "", None), ("DELETE", "", None), ("POST", "/pause", {}), ("POST", "/resume", None),
        ("POST", "/trigger", None), ("POST", "/backfill", instants),
    ):  # fmt: skip
        answer = await asked.json("both", method, f"/nothing{path}", body)
        assert answer.refusal == (404, "schedule_not_found"), (method, path, answer)
        assert "there is no schedule 'nothing'" in answer.body["detail"]


@in_memory
async def test_backfill_says_what_it_refuses(asked: Asked) -> None:
    await asked.ok("PUT", "/s", {"job": "t", "every": 1, "overlap": "skip"})
    span = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-02T00:00:00Z"}
    assert "overlap 'skip'" in (await asked.json("all", "POST", "/s/backfill", span)).body["detail"]
    await asked.ok("PUT", "/s", {"job": "t", "every": 1})
    assert "more than 10000 ticks" in (await asked.json("all", "POST", "/s/backfill", span)).body["detail"]
    assert (await asked.json("all", "POST", "/s/backfill", {"start": span["start"]})).status == 422


@in_memory
async def test_a_token_limited_to_queues_neither_puts_nor_reads_schedules(asked: Asked) -> None:
    """By both interfaces. The queue of the schedules is what counts, whatever the queue of their jobs."""
    body = {"job": "t", "every": 60, "queue": "mail.in"}
    await asked.ok("PUT", "/s", body)
    clock, stored = clock_of(asked), (await asked.driver.list_jobs(JobFilter(queue=QUEUE), now=0)).jobs
    before = await contents(asked.driver)
    for method, path, sent in (
        ("GET", "", None), ("GET", "/s", None), ("PUT", "/s", {**body, "every": 5}), ("PUT", "/mail.x", body),
        ("POST", "/s/pause", {}), ("POST", "/s/resume", None), ("POST", "/s/trigger", None),
        ("POST", "/s/backfill", {"start": "2020-01-01T00:00:00Z", "end": "2020-01-01T01:00:00Z"}),
    ):  # fmt: skip
        refused = await asked.json("mail", method, path, sent)
        assert refused.refusal == (403, "forbidden"), (method, path, refused)
    headers: dict[str, Any] = {"Authorization": f"Bearer {'mail' * 8}"}
    calls: list[op.Operation[Any]] = [
        op.Enqueue(stored, clock.now()),
        op.ListJobs(JobFilter(queue=QUEUE), clock.now()),
    ]
    for call in calls:
        assert (await asked.call(call.name, wire.encode(call), **headers)).refusal == (403, "forbidden")
    job = b'{"type": "taskharbor.schedule", "queue": "taskharbor.schedules", "key": "s"}'
    answer = await asked.ask("POST", "/v1/jobs", job, Content_Type="application/json", **headers)
    assert answer.refusal == (403, "forbidden")
    assert (await asked.ask("GET", f"/v1/jobs/{stored[0].id}", **headers)).status == 404
    assert await contents(asked.driver) == before


@in_memory
async def test_a_limited_token_with_the_queue_of_the_schedules_reaches_its_own_targets(asked: Asked) -> None:
    assert (
        await asked.json("both", "PUT", "/own", {"job": "t", "every": 60, "queue": "mail.in"})
    ).status == 201
    other = {"job": "t", "every": 60, "queue": "other"}
    assert (await asked.json("both", "PUT", "/other", other)).refusal == (403, "forbidden")
    await asked.ok("PUT", "/other", other)
    before = await contents(asked.driver)
    for method, path, sent in (
        ("GET", "", None), ("DELETE", "", None), ("PUT", "", {"job": "t", "every": 60, "queue": "mail.in"}),
        ("POST", "/pause", {}), ("POST", "/resume", None), ("POST", "/trigger", None),
        ("POST", "/backfill", {"start": "2020-01-01T00:00:00Z", "end": "2020-01-01T00:00:01Z"}),
    ):  # fmt: skip
        refused = await asked.json("both", method, f"/other{path}", sent)
        assert refused.refusal == (403, "forbidden"), (method, path, refused)
    assert await contents(asked.driver) == before
    listed = await asked.json("both", "GET")
    assert (listed.status, [one["name"] for one in listed.body["schedules"]]) == (200, ["own"])
    assert (await asked.json("both", "POST", "/own/trigger")).status == 200


@in_memory
async def test_scopes(asked: Asked) -> None:
    await asked.ok("PUT", "/s", {"job": "t", "every": 60})
    assert (await asked.json("reads", "GET", "/s")).status == 200
    for who, method, path in (
        ("reads", "PUT", "/s"),
        ("reads", "POST", "/s/trigger"),
        ("all", "DELETE", "/s"),
    ):
        assert (await asked.json(who, method, path, {} if method == "PUT" else None)).refusal == (
            403,
            "forbidden",
        )


def test_a_broker_makes_the_ticks_of_a_schedule_that_came_by_http() -> None:
    with running_broker("memory://") as url, Client(url) as client:
        client.ok("PUT", f"{PATH}/s", {"job": "t", "every": 1, "limit": 1})
        (job,) = client.claim(wait_seconds=20)
        assert job["headers"]["taskharbor.schedule"] == "s"
        client.act(job, "complete")
        shown = client.ok("GET", f"{PATH}/s")
        assert (shown["state"], shown["last_state"]) == ("ended", "done")
