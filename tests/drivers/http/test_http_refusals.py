"""A broker that refuses: the caller is told what to do, once, and nobody asks again and again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.broker_client import Unwell
from drivers.http.http_line import LEASE, NOW, Line, line, records
from taskharbor import JobRequest, JobState
from taskharbor.broker.error_responses import CODES
from taskharbor.broker.tokens import Caller, Token, find_caller, parse_token
from taskharbor.bulk.publish_staged import publish
from taskharbor.bulk.stage import TaskStaging
from taskharbor.client import AsyncClient
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers.contract import Ack, Capabilities, Extension, JobFilter
from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.http.broker_connections import NoAnswer, refusal
from taskharbor.drivers.operations import Stats
from taskharbor.drivers.records import Greeting
from taskharbor.errors import (
    BackendUnavailable,
    Forbidden,
    InvalidRequest,
    JobDamaged,
    JobFinished,
    LeaseMismatch,
    SchemaMismatch,
)
from taskharbor.jobs import SECOND
from taskharbor.testing.broker import running_broker
from worker.stage import finish, stage

PRODUCER = "a-secret-for-producers"
WORKER = "a-secret-for-workers"
TOKENS = (parse_token(f"shop:produce:{PRODUCER}"), parse_token(f"fleet:work:{WORKER}"))


def with_token(url: str, token: str) -> str:
    return url.replace("://", f"://{token}@")


async def test_a_wrong_or_missing_token_is_told_at_once_not_tried_again_and_ends_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[bytes | None] = []

    def noting(tokens: Sequence[Token], authorization: bytes | None) -> Caller | None:
        shown.append(authorization)
        return find_caller(tokens, authorization)

    monkeypatch.setattr("taskharbor.broker.admission.find_caller", noting)

    with running_broker("memory://", tokens=TOKENS) as url:
        wrong = with_token(url, "a-wrong-secret-canary")
        for address, says in ((url, "wants a token and got none"), (wrong, "not one of its own")):
            with pytest.raises(InvalidRequest, match=f"{says}: .* TASKHARBOR_TOKEN") as told:
                await HttpDriver.from_url(address).open()
            assert "canary" not in str(told.value)
        assert shown == [None, b"Bearer a-wrong-secret-canary"]
        async with stage(HttpDriver.from_url(address)) as theirs:
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
                    await fleet.client.cancel(job.id)
                assert await fleet.client.driver.prune(now=await fleet.client.now()) == 0
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


async def test_a_bulk_write_is_published_in_as_many_calls_as_the_broker_wants() -> None:
    async with line(max_batch=10) as here:
        tasks = [f"0.{number}" for number in range(25)]
        for task in tasks:
            staging = TaskStaging(here.near, "once:w:", task)
            await staging.put(records(1))
            await staging.complete()
        names = [f"staging/w/a/{number}" for number in range(11)]
        with pytest.raises(InvalidRequest, match="11 in one call: at most 10"):
            await here.near.publish_blobs(names, series="s", number=1, portion=1, now=NOW)
        assert await publish(here.near, "once:w:", tasks, NOW) == 25
        assert await here.counts() == {JobState.READY: 25}


async def test_bodies_of_several_megabytes_pass(here: Line) -> None:
    jobs = records(3, payload=b"\x00x" * 500_000)
    await here.near.enqueue(jobs, now=NOW)
    assert [job.payload for job in await here.claim(3)] == [job.payload for job in jobs]


async def test_a_call_is_repeated_after_the_pause_that_a_broker_asks_for() -> None:
    with running_broker("memory://", rate=50.0, burst=2.0) as url:
        async with HttpDriver.from_url(url) as driver:
            assert all([await driver.time() for _ in range(2)])


async def test_a_broker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hello(*args: object) -> bytes:
        return wire.encode(
            Greeting(version=7, capabilities=Capabilities(), max_batch=1, max_body=1, max_wait=1.0)
        )

    driver = HttpDriver.from_url("http://127.0.0.1:1")
    monkeypatch.setattr(driver._brokers, "_somewhere", hello)
    with pytest.raises(SchemaMismatch, match=r"version 7.*same version"):
        await driver.open()


NOT_OF_DRIVER_CALLS = {"job_not_found", "method_not_allowed", "queue_not_found", "schedule_not_found"}


@pytest.mark.parametrize("code", sorted(CODES.keys() - NOT_OF_DRIVER_CALLS))
def test_every_refusal_of_a_broker_has_a_meaning(code: str) -> None:
    status, _ = CODES[code]
    body = b'{"code":"%b","detail":"so it is","extra":[1]}' % code.encode()
    found = refusal("http://b", status, {"Retry-After": "0.5"}, body)
    is_repeated = code == "not_leader" or status in (429, 500, 503)
    other = NoAnswer if is_repeated else Forbidden if status == 403 else InvalidRequest
    named = {"schema_mismatch": SchemaMismatch, "job_damaged": JobDamaged}
    assert type(found) is named.get(code, other)
    assert getattr(found, "pause", None) == (0.5 if status == 429 else None)
    # A message of a driver about bad input or a damaged job arrives unchanged.
    assert (str(found) == "so it is") == (code in {"invalid_request", "job_damaged"})


def test_something_else_that_speaks_http_is_recognised() -> None:
    assert "is no broker, or one of another version" in str(refusal("http://b", 404, {}, b"hello"))
    assert isinstance(refusal("http://b", 502, {}, b"<html>"), NoAnswer)


async def test_a_store_that_is_away_is_unavailable_here_too() -> None:
    with running_broker(Unwell(BackendUnavailable("the store of the broker is away"), Stats)) as url:
        async with HttpDriver.from_url(url) as driver:
            with pytest.raises(BackendUnavailable, match="no broker answers"):
                await driver.stats(now=NOW)
