"""A broker that refuses: the caller is told what to do, once, and nobody asks again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from drivers.http.http_line import LEASE, NOW, Line, line, records
from taskharbor import JobRequest, JobState
from taskharbor.broker.tokens import Caller, Token, find_caller, parse_token
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Ack, Capabilities, Extension, JobFilter
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.http.broker_connections import NoAnswer, refusal
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.records import Greeting
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobFinished, LeaseMismatch, SchemaMismatch
from taskharbor.jobs import SECOND
from taskharbor.testing.broker import running_broker
from worker.stage import finish, stage

PRODUCER = "a-secret-for-producers"
WORKER = "a-secret-for-workers"
TOKENS = (parse_token(f"shop:produce:{PRODUCER}"), parse_token(f"fleet:work:{WORKER}"))


def with_token(url: str, token: str) -> str:
    return url.replace("://", f"://{token}@")


async def test_a_wrong_or_missing_token_is_told_at_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[bytes | None] = []

    def noting(tokens: Sequence[Token], authorization: bytes | None) -> Caller | None:
        shown.append(authorization)
        return find_caller(tokens, authorization)

    monkeypatch.setattr("taskharbor.broker.admission.find_caller", noting)

    with running_broker("memory://", tokens=TOKENS) as url:
        for address in (url, with_token(url, "a-wrong-secret-canary")):
            with pytest.raises(InvalidRequest, match="TASKHARBOR_TOKEN") as told:
                await HttpDriver.from_url(address).open()
            assert "canary" not in str(told.value)
    assert shown == [None, b"Bearer a-wrong-secret-canary"]


async def test_a_worker_with_a_wrong_token_ends_with_what_is_wrong() -> None:
    with running_broker("memory://", tokens=TOKENS) as url:
        here = stage(HttpDriver.from_url(with_token(url, "a-wrong-secret")))
        async with here as theirs:
            with pytest.raises(InvalidRequest, match="refuses the token"):
                await finish(theirs.worker(lambda job: None).run_async())


async def test_scopes_are_enough_for_what_they_are_for_and_for_nothing_else() -> None:
    with running_broker("memory://", tokens=TOKENS) as url:
        async with AsyncClient(with_token(url, PRODUCER)) as shop:
            job = await shop.enqueue(JobRequest(type="work"))
            with pytest.raises(InvalidRequest, match="scope"):
                await shop.driver.reserve(
                    "default", limit=1, lease_for=SECOND, now=await shop.now(), worker="w"
                )
            done: list[str] = []
            async with stage(HttpDriver.from_url(with_token(url, WORKER))) as fleet:
                await fleet.drain(lambda job: done.append(job.id))
                with pytest.raises(InvalidRequest, match="scope"):
                    await fleet.enqueue()
                with pytest.raises(InvalidRequest, match="scope"):
                    await fleet.client.cancel(job.id)
                now = await fleet.client.now()
                assert await fleet.client.driver.prune(now=now) == 0
            assert done == [job.id]


async def test_a_batch_that_is_too_large_changes_nothing_and_says_what_to_do() -> None:
    async with line(max_body_bytes=20_000, max_batch=10) as here:
        with pytest.raises(InvalidRequest, match="enqueue fewer jobs per call"):
            await here.near.enqueue(records(3, payload=b"x" * 10_000), now=NOW)
        with pytest.raises(InvalidRequest, match="at most 10"):
            await here.near.enqueue(records(11), now=NOW)
        assert await here.counts() == {}
        assert len(await here.near.enqueue(records(10), now=NOW)) == 10


async def test_what_is_read_comes_in_as_many_pages_as_the_broker_wants() -> None:
    async with line(max_batch=10) as here:
        ids = await here.store(35)
        # A broker answers an id once in a call.
        found = await here.near.get([*ids, "unknown", ids[0], ids[0]], now=NOW)
        assert [job and job.id for job in found] == [*ids, None, ids[0], ids[0]]
        page = await here.near.list_jobs(JobFilter(), now=NOW, limit=33)
        assert [job.id for job in page.jobs] == ids[:1:-1]
        rest = await here.near.list_jobs(JobFilter(), now=NOW, cursor=page.cursor)
        assert [job.id for job in rest.jobs] == ids[1::-1]
        assert rest.cursor is None
        await here.near.cancel(ids[:25], now=NOW)
        log = await here.near.read_attempts(limit=22)
        assert [row.job_id for row in log.attempts] == ids[:22]
        log = await here.near.read_attempts(after=log.cursor, limit=22)
        assert [row.job_id for row in log.attempts] == ids[22:25]
        assert (await here.near.read_attempts(after=log.cursor)).attempts == []
        assert len(await here.claim(100)) == 10


async def test_what_is_judged_one_by_one_is_sent_in_as_many_calls_as_the_broker_wants() -> None:
    """A worker with many large results knows nothing of limits."""

    async with line(max_body_bytes=20_000, max_batch=10) as here:
        ids = await here.store(35)
        held = [job for _ in range(4) for job in await here.claim(35)]
        assert [job.id for job in held] == ids
        beats = [Extension(job.id, job.token or "", b"p" * 3_000) for job in held]
        beats[7] = Extension(held[7].id, "wrong")
        leases = await here.near.extend_lease(beats, lease_for=LEASE, now=NOW)
        assert [n for n, lease in enumerate(leases) if isinstance(lease, LeaseMismatch)] == [7]
        ends = [Ack(job.id, job.token or "", b"r" * 7_000) for job in held]
        ends[23] = Ack(held[23].id, "wrong")
        answers = await here.near.settle(ends, now=NOW)
        assert [n for n, answer in enumerate(answers) if answer is not None] == [23]
        assert isinstance(answers[23], LeaseMismatch)
        assert await here.counts() == {JobState.DONE: 34, JobState.INFLIGHT: 1}
        states = await here.near.cancel(ids, now=NOW)
        assert states[23] is JobState.INFLIGHT
        assert sum(isinstance(state, JobFinished) for state in states) == 34


async def test_what_cannot_be_told_to_a_broker_is_refused_before_it_is_sent(here: Line) -> None:
    refused: list[dict[str, Any]] = [{"key": "\ud800"}, {"priority": 2**70}, {"headers": {"x": object()}}]
    for fields in refused:
        with pytest.raises(InvalidRequest):
            await here.near.enqueue(records(1, **fields), now=NOW)
    with pytest.raises(InvalidRequest):
        await here.near.get(["\ud800"], now=NOW)
    assert await here.counts() == {}


async def test_bodies_of_several_megabytes_pass(here: Line) -> None:
    jobs = records(3, payload=b"\x00x" * 500_000)
    await here.near.enqueue(jobs, now=NOW)
    assert [job.payload for job in await here.claim(3)] == [job.payload for job in jobs]


async def test_a_call_is_repeated_after_the_pause_that_a_broker_asks_for() -> None:
    with running_broker("memory://", rate=50.0, burst=2.0) as url:
        async with HttpDriver.from_url(url) as driver:
            assert all([await driver.time() for _ in range(2)])


async def test_a_clock_that_is_wrong_is_refused_unless_it_is_trusted() -> None:
    with running_broker(MemoryDriver()) as url:
        async with HttpDriver.from_url(url) as driver:
            now = await driver.time()
            await driver.enqueue(records(1, now=now), now=now + 30 * SECOND)
            for wrong in (now + 90 * SECOND, now - 90 * SECOND):
                with pytest.raises(InvalidRequest, match="take the time from this broker"):
                    await driver.reserve("q", limit=1, lease_for=SECOND, now=wrong, worker="w")
                with pytest.raises(InvalidRequest, match="take the time from this broker"):
                    await driver.reclaim(now=wrong)
            # The last of many jobs is sent long after the first was stamped.
            await driver.enqueue(records(1, now=now), now=now - 9000 * SECOND)
            with pytest.raises(InvalidRequest, match="take the time from this broker"):
                await driver.enqueue(records(1, now=now), now=now + 90 * SECOND)


async def test_errors_of_a_driver_arrive_as_they_were_said(here: Line) -> None:
    told: list[str] = []
    for driver in (here.far, here.near):
        with pytest.raises(InvalidRequest) as refusal:
            await driver.list_jobs(JobFilter(), now=NOW, cursor="nonsense")
        told.append(str(refusal.value))
    assert told[0] == told[1]


async def test_something_else_that_speaks_http_is_recognised() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(InvalidRequest, match="no broker, or one of another version"):
            await HttpDriver.from_url(f"http://127.0.0.1:{port}").open()


async def test_a_broker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hello(*args: object) -> bytes:
        return wire.encode(
            Greeting(version=7, capabilities=Capabilities(), max_batch=1, max_body=1, max_wait=1.0)
        )

    driver = HttpDriver.from_url("http://127.0.0.1:1")
    monkeypatch.setattr(driver._brokers, "_somewhere", hello)
    with pytest.raises(SchemaMismatch, match=r"version 7.*same version"):
        await driver.open()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad_json", InvalidRequest),
        (401, "unauthenticated", InvalidRequest),
        (403, "forbidden", InvalidRequest),
        (413, "too_large", InvalidRequest),
        (421, "not_leader", NoAnswer),
        (421, "unknown_host", InvalidRequest),
        (422, "invalid_request", InvalidRequest),
        (429, "rate_limited", NoAnswer),
        (500, "internal", NoAnswer),
        (502, "", NoAnswer),
        (503, "backend_unavailable", NoAnswer),
        (503, "schema_mismatch", SchemaMismatch),
    ],
)
def test_every_refusal_has_a_meaning(status: int, code: str, kind: Callable[..., Exception]) -> None:
    body = b'{"code":"%b","detail":"so it is","extra":[1]}' % code.encode()
    found = refusal("http://b", status, {"Retry-After": "0.5"}, body)
    assert type(found) is kind
    assert getattr(found, "pause", None) == (0.5 if status == 429 else None)
    assert isinstance(refusal("http://b", status, {}, b"<html>"), Exception)


async def test_a_store_that_is_away_is_unavailable_here_too() -> None:
    class Away(MemoryDriver):
        async def run(self, call: object) -> object:  # type: ignore[override]
            raise BackendUnavailable("the store of the broker is away")

    with running_broker(Away()) as url:
        async with HttpDriver.from_url(url) as driver:
            with pytest.raises(BackendUnavailable, match="no broker answers"):
                await driver.stats(now=NOW)
