"""Blocking claims: what ends them, what time they claim by, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from drivers.redis.redis_stage import PATIENCE, soon, until
from taskharbor import Harbor
from taskharbor.drivers.contract import Driver, QueueSettings
from taskharbor.drivers.redis.driver import RedisDriver
from taskharbor.drivers.redis.store import keys_of
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.servers import RedisAt, RedisServer

LEASE = 60 * SECOND
NOW = 1_700_000_000 * SECOND
"""Far from the server's clock: a claim that judged by that one would find nothing, or everything."""


@contextlib.asynccontextmanager
async def handle(url: str) -> AsyncIterator[RedisDriver]:
    async with RedisDriver.from_url(url) as driver:
        yield driver


def job(name: str, **fields: object) -> JobRecord:
    given = {"type": "t", "queue": "q", "run_at_us": NOW, "created_at_us": NOW, **fields}
    return JobRecord(id=name, payload=b"{}", **given)  # type: ignore[arg-type]


async def reserve(driver: Driver, *, limit: int = 10, now: int = NOW, worker: str = "w") -> list[JobRecord]:
    return await driver.reserve("q", limit=limit, lease_for=LEASE, now=now, worker=worker)


async def blocking_claim(
    driver: Driver, *, limit: int = 10, worker: str = "w", timeout: float = PATIENCE
) -> list[JobRecord] | None:
    return await driver.reserve_next(
        "q", limit=limit, lease_for=LEASE, now=NOW, worker=worker, timeout=timeout
    )


async def blocked(
    driver: Driver, server: RedisAt, *, count: int = 1, worker: str = "w"
) -> asyncio.Task[list[JobRecord] | None]:
    """A claim that the server holds."""
    assert await reserve(driver, worker=worker) == []
    claim = asyncio.create_task(blocking_claim(driver, worker=worker))
    await until(lambda: int(server.info("clients")["blocked_clients"]) >= count, "a claim blocks")
    return claim


def on(url: str, story: Callable[[RedisDriver, RedisDriver], Awaitable[None]]) -> None:
    async def main() -> None:
        async with handle(url) as one, handle(url) as other:
            await story(one, other)

    asyncio.run(main())


@pytest.fixture
def server() -> RedisServer:
    """Of the test's own: it looks at who is blocked there."""
    with RedisServer.start() as started:
        yield started


def test_a_job_wakes_it_and_comes_with_the_answer(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        await other.enqueue([job("a")], now=NOW)
        found = await soon(claim)
        assert [record.id for record in found or []] == ["a"]
        record = found[0]
        assert record.state is JobState.INFLIGHT
        assert NOW <= record.reserved_at_us < NOW + 3600 * SECOND, "the caller's clock, and not the server's"
        assert record.expires_at_us == record.reserved_at_us + LEASE
        await one.ack("a", record.token, now=record.reserved_at_us)

    on(server.url, story)


def test_room_wakes_it(server: RedisServer) -> None:
    """Every change that notifies adds to the stream, in the same function; so one more cause stands for all of the kit's."""

    async def story(one: RedisDriver, other: RedisDriver) -> None:
        await other.configure("q", QueueSettings(max_inflight=1), now=NOW)
        await other.enqueue([job("a"), job("b")], now=NOW)
        (held,) = await reserve(other, worker="x")
        claim = await blocked(one, server)
        await other.ack("a", held.token, now=held.reserved_at_us)
        assert [record.id for record in await soon(claim) or []] == ["b"]

    on(server.url, story)


def test_time_alone_wakes_it(redis_url: str) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        await other.enqueue([job("a", run_at_us=NOW + SECOND // 10)], now=NOW)
        assert await reserve(one) == []
        found = await soon(blocking_claim(one))
        assert [record.id for record in found or []] == ["a"]
        assert found[0].reserved_at_us >= NOW + SECOND // 10

    on(redis_url, story)


def test_it_ends_with_nothing_when_time_is_up(redis_url: str) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        assert await reserve(one) == []
        assert await blocking_claim(one, timeout=0.01) == []

    on(redis_url, story)


def test_it_is_only_for_who_has_seen_that_nothing_is_left(redis_url: str) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        assert await blocking_claim(one) is None
        await other.enqueue([job("a"), job("b")], now=NOW)
        assert len(await reserve(one, limit=1)) == 1
        assert await blocking_claim(one, limit=1) is None

    on(redis_url, story)


@pytest.mark.parametrize("option", ["notify=off", "wait_replicas=1&wait_timeout=0.01"])
def test_it_is_not_offered_where_the_handle_cannot(redis_url: str, option: str) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        with contextlib.suppress(Exception):
            await reserve(one)
        assert await blocking_claim(one) is None

    on(f"{redis_url}&{option}", story)


def test_one_job_goes_to_one_blocking_claim(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claims = [await blocked(one, server), await blocked(other, server, count=2, worker="x")]
        async with handle(server.url) as producer:
            await producer.enqueue([job("a")], now=NOW)
        found = await asyncio.gather(*map(soon, claims))
        assert sorted(map(len, found)) == [0, 1]

    on(server.url, story)


def test_limits_hold_for_blocking_claims(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        await other.configure("q", QueueSettings(max_inflight=1), now=NOW)
        claim = await blocked(one, server)
        await other.enqueue([job("a"), job("b")], now=NOW)
        assert len(await soon(claim) or []) == 1

    on(server.url, story)


def test_what_a_cancelled_one_has_leased_goes_back(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        # From another thread, so that our loop has no chance to read the answer.
        enqueued = threading.Thread(target=asyncio.run, args=(_enqueue(server.url),))
        enqueued.start()
        enqueued.join()
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        await asyncio.gather(*one._claims._giving_back)
        assert [record.id for record in await reserve(other)] == ["a"]

    on(server.url, story)


async def _enqueue(url: str) -> None:
    async with handle(url) as producer:
        await producer.enqueue([job("a")], now=NOW)


def test_one_that_is_cancelled_claims_nothing(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        await asyncio.gather(*one._claims._giving_back)
        await other.enqueue([job("a")], now=NOW)
        assert [record.id for record in await reserve(other)] == ["a"]

    on(server.url, story)


def test_a_connection_that_breaks_meanwhile_loses_nothing(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await soon(claim) is None
        await other.enqueue([job("a")], now=NOW)
        assert [record.id for record in await reserve(one)] == ["a"]

    on(server.url, story)


def test_jobs_of_an_answer_that_was_lost_are_found_again(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        enqueued = threading.Thread(target=asyncio.run, args=(_enqueue(server.url),))
        enqueued.start()
        enqueued.join()
        # The answer waits in the socket: it is lost with it.
        for line in one._store._server._connections:  # type: ignore[union-attr]
            line.abort("cut")
        assert await soon(claim) is None
        assert [record.id for record in await reserve(one)] == ["a"], (
            "leased by the claim whose answer was lost"
        )

    on(server.url, story)


def test_a_server_that_forgot_the_functions_is_asked_by_other_means(server: RedisServer) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        claim = await blocked(one, server)
        server.execute("FUNCTION", "FLUSH")
        server.execute("XADD", keys_of("", "q")["notify"], "99-0", "m", "")
        assert await soon(claim) is None
        await other.enqueue([job("a")], now=NOW)
        assert [record.id for record in await reserve(one)] == ["a"]

    on(server.url, story)


def test_a_user_who_may_not_block_is_told_once_and_works(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.execute("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-xread")
    url = server.url.replace("redis://", "redis://narrow:secret@")

    async def story(one: RedisDriver, other: RedisDriver) -> None:
        assert await reserve(one) == []
        with caplog.at_level(logging.WARNING, "taskharbor.redis"):
            await blocking_claim(one)
        assert "may not use XREAD" in caplog.text
        assert await reserve(one) == []
        assert await blocking_claim(one) is None, "it is not tried again and again"
        await other.enqueue([job("a")], now=NOW)
        assert [record.id for record in await reserve(one)] == ["a"]

    on(url, story)


def test_a_counter_that_went_back_only_costs_a_time_out(server: RedisServer) -> None:
    """Somebody took the counters away and left the stream: the entry is refused, and the jobs are there all the same."""

    async def story(one: RedisDriver, other: RedisDriver) -> None:
        await other.enqueue([job("a"), job("b")], now=NOW)
        await other.enqueue([job("c")], now=NOW)
        server.execute("HDEL", keys_of("", "q")["meta"], "moves")
        await other.enqueue([job("d")], now=NOW)
        assert len(await reserve(one)) == 4

    on(server.url, story)


def test_what_many_workers_have_seen_is_not_kept_for_ever(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskharbor.drivers.redis.leases._VIEWS", 3)

    async def story(one: RedisDriver, other: RedisDriver) -> None:
        for n in range(10):
            assert await reserve(one, worker=f"w{n}") == []
        assert len(one._claims._views) <= 3

    on(redis_url, story)


def test_a_call_that_was_repeated_is_forgotten_in_time(redis_url: str) -> None:
    async def story(one: RedisDriver, other: RedisDriver) -> None:
        meta = keys_of(one.options.prefix, "q")["meta"]
        await other.enqueue([job("a")], now=NOW)
        claim = asyncio.create_task(reserve(one))
        await asyncio.sleep(0)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        await asyncio.gather(*one._claims._giving_back)
        assert await one._store.command("HGET", meta, "has_repeated") == b"1"
        await one.prune(now=NOW + 3601 * SECOND)
        assert await one._store.command("HGET", meta, "has_repeated") is None

    on(redis_url, story)


def test_an_idle_worker_makes_blocking_claims(server: RedisServer) -> None:
    harbor = Harbor(server.url)
    ran = threading.Event()

    @harbor.job
    async def hello() -> None:
        ran.set()

    worker = harbor.worker()
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        for _ in range(3):
            asyncio.run(
                until(lambda: int(server.info("clients")["blocked_clients"]) > 0, "the worker blocks")
            )
            ran.clear()
            hello.enqueue()
            assert ran.wait(PATIENCE)
    finally:
        worker.stop()
        running.join()
        harbor.close()
    assert "cmdstat_xread" in server.info("commandstats")
