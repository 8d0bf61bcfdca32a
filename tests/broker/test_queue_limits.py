"""Tokens that are limited to some queues: no call of either API reaches another queue, or learns of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.broker_client import Direct, contents
from needing import Entered
from records import make_record
from taskharbor.broker.tokens import Caller, parse_token
from taskharbor.clock import FakeClock
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.records import Ack, Extension, JobFilter, QueueSettings
from taskharbor.errors import Forbidden, InvalidRequest, JobNotFound
from taskharbor.harbor import Harbor
from taskharbor.jobs import SECOND, JobState
from taskharbor.testing.broker import running_broker

SECRET = "limited-secret-0123456789"
NOW = FakeClock().now()
HEADERS: dict[str, Any] = {"Authorization": f"Bearer {SECRET}"}


class Limited(Direct):
    """A caller with all scopes, limited to `mail` and `mail.*`. Another queue has an ended, a waiting and a held job."""

    async def fill(self) -> None:
        for queue in ("other", "mail.out"):
            records = [make_record(f"{queue}-{n}", queue=queue, key=f"k{n}", now=NOW) for n in range(3)]
            await self.driver.enqueue(records, now=NOW)
            ended, held = await self.driver.reserve(queue, limit=2, lease_for=SECOND, now=NOW, worker="w")
            await self.driver.settle([Ack(ended.id, ended.token or "")], now=NOW)
            self.__dict__[queue] = held.token

    def calls(self, queue: str) -> list[tuple[op.Operation[Any], Any]]:
        """A call of every operation for jobs of a queue, with its answer if it is refused per job."""
        ended, held, ready = (f"{queue}-{n}" for n in range(3))
        token = self.__dict__.get(queue, "")
        missing = JobNotFound("")
        return [
            (op.Enqueue([make_record(queue=queue, now=NOW)], NOW), None),
            (op.Reserve(queue, 0, SECOND, NOW, "w"), None),
            (op.ExtendLease([Extension(held, token)], SECOND, NOW), missing),
            (op.Settle([Ack(ended, ""), Ack(held, token)], NOW), missing),
            (op.Reclaim(NOW, queue), None),
            (op.CancelJobs([ready], NOW), missing),
            (op.CancelKeys(["k2"], queue, NOW), None),
            (op.Requeue([ended], NOW), missing),
            (op.Remove([ended]), missing),
            (op.Purge(JobFilter(queue=queue)), None),
            (op.Configure(queue, QueueSettings(paused=False), NOW), None),
            (op.Settings(queue), None),
            (op.Get([held, ready], NOW), missing),
            (op.ListJobs(JobFilter(queue=queue), NOW), None),
            (op.Stats(NOW, queue), None),
            (op.JobAttempts(ended), missing),
            (op.SplitJobs(queue, 2), None),
            (op.CheckRoom(queue, 1), None),
            (op.Wait([queue], NOW, 0.0), None),
        ]


@pytest.fixture
def limited() -> Entered:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Limited]:
        async with MemoryDriver() as driver:
            tokens = (parse_token(f"post:admin:mail,mail.*:{SECRET}"),)
            direct = Limited(driver, clock=FakeClock(), tokens=tokens)
            await direct.fill()
            yield direct
            await direct.app.service.long_polls.close()

    return Entered(opened())


FREE = {"hello", "time", "prune"}
"""Operations that say nothing about a queue, or do nothing for a limited token."""
OF_ALL_QUEUES: list[op.Operation[Any]] = [
    op.ListJobs(JobFilter(), NOW), op.Purge(JobFilter()), op.SplitJobs(None, 2), op.ReadAttempts(), op.LogStreams(),
    op.ReadLog("0:other", 0, 10), op.SplitLog("0:other", 0, 10, 5), op.PutBlob("writes", b"x"), op.ListBlobs("staging"),
    op.ReadBlobs(["writes"]), op.DropBlobs(["writes"]), op.PublishBlobs("s", 1, 1, ["staging/a/b"], NOW),
    op.Configure("mail", QueueSettings(failure_queue="other"), NOW),
    op.Enqueue([make_record(queue="mail", now=NOW), make_record(queue="other", now=NOW)], NOW),
    op.Wait(["mail", "other"], NOW, 0.0),
]  # fmt: skip


async def test_every_call_for_another_queue_is_refused_or_finds_no_job(limited: Limited) -> None:
    calls = limited.calls("other")
    named = {call.name for call, _ in calls} | {call.name for call in OF_ALL_QUEUES} | FREE
    assert named == op.OPERATIONS.keys(), "a new operation needs a row here"
    before = await contents(limited.driver)
    for call, answer in [*calls, *((call, None) for call in OF_ALL_QUEUES)]:
        got = await limited.call(call.name, wire.encode(call), **HEADERS)
        if answer is None:
            assert got.refusal == (403, "forbidden"), (call, got)
        else:
            told = wire.read_answer(call, got.body)
            assert all(one is None or isinstance(one, JobNotFound) for one in told), (call, told)
    assert await contents(limited.driver) == before
    # A sweep of all queues is left to the broker.
    for sweep in (op.Reclaim(NOW), op.Prune(NOW)):
        assert await limited.run(sweep, **HEADERS) == 0
    (own,) = await limited.run(op.Stats(NOW), **HEADERS)
    assert own.queue == "mail.out"


async def test_every_call_for_a_queue_of_its_own_is_carried_out(limited: Limited) -> None:
    # Each answer is in its place.
    ids = ["other-2", "mail.out-2", "nobody", "mail.out-1"]
    own = [job and job.id for job in await limited.run(op.Get(ids, NOW), **HEADERS)]
    assert own == [None, "mail.out-2", None, "mail.out-1"]
    for call, _ in limited.calls("mail.out"):
        got = await limited.call(call.name, wire.encode(call), **HEADERS)
        assert got.status == 200, (call, got)
        assert not isinstance(wire.read_answer(call, got.body), JobNotFound)
    (stats,) = await limited.driver.stats(now=NOW, queue="other")
    assert stats.counts[JobState.INFLIGHT] == stats.counts[JobState.READY] == stats.done_total == 1


async def test_the_json_api_has_the_same_limit(limited: Limited) -> None:
    before = await contents(limited.driver)
    token = limited.__dict__["other"]
    refused = [
        ("GET", "/v1/jobs?queue=other", b""),
        ("GET", "/v1/jobs", b""),
        ("GET", "/v1/attempts", b""),
        ("GET", "/v1/stats?queue=other", b""),
        ("GET", "/v1/queues/other", b""),
        ("GET", "/v1/schedules", b""),
        ("GET", "/v1/schedules/s", b""),
        ("PUT", "/v1/schedules/s", b'{"job":"t","every":60,"queue":"mail"}'),
        ("POST", "/v1/schedules/s/trigger", b""),
        ("POST", "/v1/jobs", b'{"type":"t","queue":"other"}'),
        ("POST", "/v1/jobs", b'{"type":"t"}'),
        ("POST", "/v1/jobs/claim", b'{"queue":"other","wait_seconds":9}'),
        ("POST", "/v1/jobs/claim", b'{"workerId":"w"}'),
        ("POST", "/v1/queues/other/cancel", b'{"keys":["k2"]}'),
        ("POST", "/v1/purge", b"{}"),
        ("PATCH", "/v1/queues/other", b'{"paused":true}'),
        ("PATCH", "/v1/queues/mail", b'{"failure_queue":"other","create":true}'),
    ]
    unknown = [("GET", "/v1/jobs/other-1", b"")] + [
        ("POST", f"/v1/jobs/other-1/{action}", f'{{"token":"{token}"}}'.encode())
        for action in ("heartbeat", "complete", "fail", "retry", "release", "discard")
    ]
    unknown += [
        ("POST", f"/v1/jobs/other-{n}/{action}", b"{}") for n in (0, 2) for action in ("cancel", "requeue")
    ]
    for cases, status in ((refused, 403), (unknown, 404)):
        for method, path, body in cases:
            answer = await limited.ask(method, path, body, Content_Type="application/json", **HEADERS)
            assert answer.status == status, (method, path, answer)
    assert (await limited.ask("GET", "/v1/jobs/other-0/attempts", **HEADERS)).body == {"attempts": []}
    shown = await limited.ask("GET", "/v1/stats", **HEADERS)
    assert [one["queue"] for one in shown.body["queues"]] == ["mail.out"]
    assert not limited.app.service.long_polls._watchers
    assert await contents(limited.driver) == before
    body = b'{"type":"t","queue":"mail"}'
    assert (
        await limited.ask("POST", "/v1/jobs", body, Content_Type="application/json", **HEADERS)
    ).status == 201


def test_a_worker_with_a_limited_token_does_its_work(caplog: pytest.LogCaptureFixture) -> None:
    token = parse_token(f"crew:work,produce:mail:{SECRET}")
    with (
        running_broker("memory://", tokens=(token,)) as url,
        caplog.at_level("WARNING"),
        Harbor(url.replace("://", f"://{SECRET}@")) as harbor,
    ):

        @harbor.job(queue="mail")
        def double(n: int) -> int:
            return 2 * n

        jobs = double.enqueue_many([{"n": n} for n in range(3)])
        harbor.worker(until_empty=True, queues=["mail"]).run()
        assert [job.result() for job in jobs] == [0, 2, 4]
        with pytest.raises(Forbidden, match="reaches the queues mail only"):
            harbor.client.stats("other")
    assert not caplog.records


def test_a_pattern_is_literal_but_for_its_stars() -> None:
    def reached(patterns: str, *queues: str) -> list[str]:
        caller = parse_token(f"a:work:{patterns}:{'x' * 16}").caller
        assert not caller.reaches(None)
        return [queue for queue in queues if caller.reaches(queue)]

    assert reached("mail.*", "mail.", "mail.a.b", "mail.a\nb", "mail", "mailx", "xmail.a") == [
        "mail.",
        "mail.a.b",
        "mail.a\nb",
    ]
    assert reached("a+b, [x]", "a+b", "aab", "[x]", "x") == ["a+b", "[x]"]
    assert reached("a:b*", "a:b:c", "a") == ["a:b:c"]
    assert Caller("a", frozenset()).reaches(None)
    for wrong in ("a:work::", "a:work:x,,y:", "a:bulk:x:"):
        with pytest.raises(InvalidRequest, match="line 1"):
            parse_token(wrong + "x" * 16, where="line 1")
