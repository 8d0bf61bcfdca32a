"""History by the day: days come, rows find theirs, days go when nobody keeps them; and a log that skips nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest
from psycopg import sql

from drivers.postgres.pg_harness import DAY, NOW, Raw, fold
from taskharbor.drivers.contract import Ack, Fail, JobFilter, QueueSettings, QueueStats
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.options import NOTIFYING
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState
from taskharbor_testkit.waits import waits_of

MakeRecord = Callable[..., JobRecord]

TODAY = NOW // DAY * DAY
"""2023-11-14, midnight."""
NOON = TODAY + DAY // 2


def days(raw: Raw, table: str) -> list[str]:
    """The days that have a partition, but for those around the server's own today."""
    found = raw("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", table)
    names = sorted(name.removeprefix(f"{table}_") for (name,) in found)
    assert names[-1] == "rest"
    return [name for name in names if name.startswith("2023")]


def places(raw: Raw, table: str) -> list[str]:
    """Where the rows are, in the order they were written."""
    query = sql.SQL("SELECT tableoid::regclass::text FROM {} ORDER BY seq").format(sql.Identifier(table))
    return [name for (name,) in raw(query)]


async def done(driver: PostgresDriver, record: JobRecord, now: int) -> None:
    await driver.enqueue([record], now=now)
    (job,) = await driver.reserve(record.queue, limit=1, lease_for=SECOND, now=now, worker="w")
    assert job.id == record.id
    await driver.ack(job.id, job.token or "", now=now)


def run(driver: PostgresDriver, use: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def opened() -> None:
        async with driver:
            await use()

    asyncio.run(opened())


# -- days come ------------------------------------------------------------------------------------------------


def test_the_days_around_an_instant_are_made_once(driver: PostgresDriver, raw: Raw) -> None:
    asyncio.run(driver.migrate())
    assert raw.one("SELECT add_days(%s)", NOW) == 18
    expected = [f"202311{day}" for day in range(13, 22)]
    assert days(raw, "finished") == days(raw, "attempts") == expected
    assert raw.one("SELECT add_days(%s)", NOW) == 0
    assert raw.one("SELECT add_days(%s)", NOW + DAY) == 2
    assert days(raw, "finished") == [*expected, "20231122"]


def test_a_store_has_days_from_the_beginning(driver: PostgresDriver, raw: Raw) -> None:
    asyncio.run(driver.migrate())
    today = raw.one("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    for table in ("finished", "attempts"):
        for ahead in range(7):
            day = today + timedelta(days=ahead)
            assert raw.one("SELECT to_regclass(%s) IS NOT NULL", f"{table}_{day:%Y%m%d}"), (table, day)


def test_a_row_lies_in_the_day_it_ended(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        raw("SELECT add_days(%s)", NOW)
        for now in (TODAY, TODAY + DAY - 1, TODAY + DAY, TODAY + 30 * DAY, TODAY - 30 * DAY):
            await done(driver, record(run_at_us=now), now)

    run(driver, use)
    days = ["20231114", "20231114", "20231115", "rest"]
    assert places(raw, "finished")[:4] == [f"finished_{day}" for day in days]
    assert places(raw, "attempts")[:4] == [f"attempts_{day}" for day in days]


def test_a_day_that_has_strays_is_left_out(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await done(driver, record(run_at_us=NOON), NOON)
        assert places(raw, "finished") == ["finished_rest"]
        assert raw.one("SELECT add_days(%s)", NOW) == 16
        assert "20231114" not in days(raw, "finished")
        assert "20231115" in days(raw, "finished")
        await done(driver, record(run_at_us=NOON + 1), NOON + 1)
        assert places(raw, "finished") == ["finished_rest"] * 2
        assert len((await driver.list_jobs(JobFilter(), now=NOON)).jobs) == 2

    run(driver, use)


def test_who_reads_the_history_does_not_keep_upkeep_from_working(driver: PostgresDriver, raw: Raw) -> None:
    """A dump reads every table for hours. A new day cannot be attached meanwhile; everything else goes on."""

    async def use() -> None:
        raw("ALTER FUNCTION add_days(bigint) SET lock_timeout = '20ms'")
        last = raw.one("SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'attempts'::regclass "
                       "AND inhrelid::regclass::text <> 'attempts_rest'")  # fmt: skip
        raw(f"DROP TABLE {last}")
        with raw.another() as reader:
            reader("BEGIN")
            reader("SELECT FROM attempts")
            reader("SELECT FROM finished")
            await driver.prune(now=NOW)
            assert raw.one("SELECT to_regclass(%s) IS NULL", last)
        async with driver.clone() as later:
            await later.prune(now=NOW)
        assert raw.one("SELECT to_regclass(%s) IS NOT NULL", last)

    run(driver, use)


# -- days go --------------------------------------------------------------------------------------------------


async def stats_of(driver: PostgresDriver, queue: str) -> tuple[int, int, int, int]:
    (stats,) = await driver.stats(now=NOW, queue=queue)
    return _numbers(stats)


def _numbers(stats: QueueStats) -> tuple[int, int, int, int]:
    return (
        stats.counts[JobState.DONE],
        stats.counts[JobState.CANCELLED],
        stats.done_total,
        stats.cancelled_total,
    )


async def fill(driver: PostgresDriver, raw: Raw, record: MakeRecord, *queues: str) -> None:
    """Two jobs done and one cancelled per queue, today at noon."""
    raw("SELECT add_days(%s)", NOW)
    for queue in queues:
        for n in range(2):
            await done(driver, record(queue=queue, run_at_us=NOON, idempotency_key=f"{queue}{n}"), NOON)
        cancelled = record(queue=queue, run_at_us=NOON)
        await driver.enqueue([cancelled], now=NOON)
        assert await driver.cancel([cancelled.id], now=NOON) == [JobState.CANCELLED]


def drop_days(raw: Raw, now: int) -> int:
    return int(raw.one("SELECT drop_days(%s)", now))


def test_a_day_goes_when_its_last_instant_is_old_enough(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "q")
        await driver.configure("q", QueueSettings(keep_done_us=2 * DAY, keep_attempts_us=None), now=NOW)
        assert drop_days(raw, TODAY + 3 * DAY - 1) == 0
        assert "20231114" in days(raw, "finished")
        assert await stats_of(driver, "q") == (2, 1, 2, 1)
        assert drop_days(raw, TODAY + 3 * DAY) == 3
        assert "20231114" not in days(raw, "finished")
        assert "20231114" in days(raw, "attempts")
        assert await stats_of(driver, "q") == (0, 0, 2, 1)
        assert len((await driver.read_attempts()).attempts) == 3
        fold(raw)
        assert await stats_of(driver, "q") == (0, 0, 2, 1)

    run(driver, use)


def test_the_log_goes_by_its_own_time(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "q")
        await driver.configure("q", QueueSettings(keep_done_us=None, keep_attempts_us=DAY), now=NOW)
        assert drop_days(raw, TODAY + 2 * DAY) == 3
        assert "20231114" not in days(raw, "attempts")
        assert (await driver.read_attempts()).attempts == []
        assert await stats_of(driver, "q") == (2, 1, 2, 1)
        assert len((await driver.list_jobs(JobFilter(), now=NOW)).jobs) == 3

    run(driver, use)


def test_an_empty_day_that_is_over_goes(driver: PostgresDriver, raw: Raw) -> None:
    async def use() -> None:
        raw("SELECT add_days(%s)", NOW)
        assert drop_days(raw, NOON) == 0
        assert days(raw, "finished")[0] == "20231114"
        # Today and what comes is needed.
        assert len(days(raw, "finished")) == 8

    run(driver, use)


def test_a_queue_that_keeps_longer_keeps_only_its_own(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "short", "long", "forever")
        for queue, keep in (("short", DAY), ("long", 5 * DAY), ("forever", None)):
            await driver.configure(queue, QueueSettings(keep_done_us=keep, keep_attempts_us=None), now=NOW)
        assert drop_days(raw, TODAY + 2 * DAY) == 3
        assert await stats_of(driver, "short") == (0, 0, 2, 1)
        assert await stats_of(driver, "long") == await stats_of(driver, "forever") == (2, 1, 2, 1)
        # Once.
        assert drop_days(raw, TODAY + 2 * DAY) == 0
        assert drop_days(raw, TODAY + 6 * DAY) == 3
        assert await stats_of(driver, "long") == (0, 0, 2, 1)
        assert drop_days(raw, TODAY + 1000 * DAY) == 0
        assert "20231114" in days(raw, "finished")
        await driver.configure("forever", QueueSettings(keep_done_us=DAY, keep_attempts_us=None), now=NOW)
        assert drop_days(raw, TODAY + 1000 * DAY) == 3
        assert await stats_of(driver, "forever") == (0, 0, 2, 1)
        assert [
            job for job in (await driver.list_jobs(JobFilter(), now=NOW)).jobs if job.state.is_terminal
        ] == []

    run(driver, use)


def test_idempotency_keys_go_with_their_jobs(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "short", "long")
        await driver.configure("short", QueueSettings(keep_done_us=DAY), now=NOW)

        async def is_known(queue: str) -> bool:
            (answer,) = await driver.enqueue([record(queue=queue, idempotency_key=f"{queue}0")], now=NOW)
            return answer.existed

        assert await is_known("short")
        drop_days(raw, TODAY + 2 * DAY)
        assert await is_known("long")
        assert not await is_known("short")
        assert await is_known("short")

    run(driver, use)
    assert raw.one("SELECT count(*) FROM idempotency") == 3


@pytest.mark.parametrize("how", ["days", "purge", "remove"])
def test_keys_of_requests_that_changed_a_waiting_job_go_with_it(
    driver: PostgresDriver, raw: Raw, record: MakeRecord, how: str
) -> None:
    async def use() -> None:
        await driver.configure("q", QueueSettings(keep_done_us=DAY), now=NOW)
        raw("SELECT add_days(%s)", NOW)
        first = record(run_at_us=NOON, key="k", idempotency_key="own")
        await driver.enqueue([first], now=NOON)
        (changed,) = await driver.enqueue([record(key="k", idempotency_key="led")], now=NOON)
        assert changed.id == first.id
        await driver.enqueue([record(queue="other", idempotency_key="stays")], now=NOON)
        await driver.cancel([first.id], now=NOON)
        assert raw.one("SELECT count(*) FROM idempotency") == 3
        if how == "days":
            drop_days(raw, TODAY + 3 * DAY)
        elif how == "purge":
            assert await driver.purge(JobFilter(queue="q")) == 1
        else:
            assert await driver.remove([first.id]) == [JobState.CANCELLED]

    run(driver, use)
    assert raw.one("SELECT string_agg(idempotency_key, ' ') FROM idempotency") == "stays"


def test_a_reader_of_the_day_is_not_waited_for(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "q")
        await driver.configure("q", QueueSettings(keep_done_us=DAY, keep_attempts_us=None), now=NOW)
        with raw.another() as reader:
            reader("BEGIN")
            reader("SELECT FROM finished_20231114 LIMIT 1")
            assert drop_days(raw, TODAY + 2 * DAY) == 0
            assert await stats_of(driver, "q") == (2, 1, 2, 1)
            (answer,) = await driver.enqueue([record(idempotency_key="q0")], now=NOW)
            assert answer.existed
            # Nobody has to stand behind the lock that was asked for.
            await done(driver, record(run_at_us=NOON), NOON)
            reader("COMMIT")
        assert drop_days(raw, TODAY + 2 * DAY) == 4
        assert await stats_of(driver, "q") == (0, 0, 3, 1)

    run(driver, use)


def test_two_who_drop_at_once_count_once(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "q", "other")
        async with driver.clone() as second, driver.clone() as third:
            removed = await asyncio.gather(
                *(one.prune(now=NOW + 31 * DAY) for one in (driver, second, third))
            )
        # Two tables.
        assert sum(removed) + drop_days(raw, NOW + 31 * DAY) == 12
        assert await stats_of(driver, "q") == await stats_of(driver, "other") == (0, 0, 2, 1)

    run(driver, use)


def test_upkeep_of_a_handle_drops_days(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await fill(driver, raw, record, "q")
        assert await driver.prune(now=NOON) == 0
        async with driver.clone() as other:
            assert await other.prune(now=TODAY + 8 * DAY) == 3
        assert "20231114" not in days(raw, "finished")

    run(driver, use)


# -- what lies in no day goes row by row -----------------------------------------------------------------------


def test_strays_go_one_by_one(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        for n in range(6):
            await done(driver, record(run_at_us=NOW + n, idempotency_key=f"{n}"), NOW + n)
        assert set(places(raw, "finished")) == {"finished_rest"}
        assert await driver.prune(now=NOW + 7 * DAY - 1) == 0
        assert await driver.prune(now=NOW + 7 * DAY + 1) == 2
        assert await stats_of(driver, "q") == (4, 0, 6, 0)
        assert await driver.prune(now=NOW + 8 * DAY, limit=3) == 3
        assert await driver.prune(now=NOW + 8 * DAY, limit=3) == 1
        assert await driver.prune(now=NOW + 30 * DAY + 1, limit=10) == 2
        assert await driver.prune(now=NOW + 31 * DAY, limit=3) == 3
        assert await driver.prune(now=NOW + 31 * DAY, limit=3) == 1
        assert (await driver.read_attempts()).attempts == []

    run(driver, use)
    assert raw.one("SELECT count(*) FROM idempotency") == 0


def test_what_is_kept_for_ever_stays(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        keep = QueueSettings(keep_done_us=None, keep_dead_us=None, keep_attempts_us=None)
        await driver.configure("q", keep, now=NOW)
        await fill(driver, raw, record, "q")
        await done(driver, record(run_at_us=NOW - 100 * DAY), NOW - 100 * DAY)
        await _fail(driver, record(run_at_us=NOW))
        assert await driver.prune(now=NOW + 10_000 * DAY) == 0
        (stats,) = await driver.stats(now=NOW)
        assert (stats.counts[JobState.DONE], stats.counts[JobState.DEAD]) == (3, 1)
        assert len((await driver.read_attempts()).attempts) == 5

    run(driver, use)


def test_the_dead_go_one_by_one(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        raw("SELECT add_days(%s)", NOW)
        await driver.configure("q", QueueSettings(keep_attempts_us=None), now=NOW)
        for _ in range(3):
            await _fail(driver, record())
        assert await driver.prune(now=NOW + 90 * DAY - 1) == 0
        assert await driver.prune(now=NOW + 90 * DAY, limit=2) == 2
        assert await driver.prune(now=NOW + 90 * DAY, limit=2) == 1
        (stats,) = await driver.stats(now=NOW)
        assert (stats.counts[JobState.DEAD], stats.dead_total) == (0, 3)

    run(driver, use)


async def _fail(driver: PostgresDriver, record: JobRecord) -> None:
    await driver.enqueue([record], now=NOW)
    (job,) = await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")
    assert await driver.settle([Fail(job.id, job.token or "", 1, Failure("E", "no"))], now=NOW) == [None]


# -- the log --------------------------------------------------------------------------------------------------


async def follow(driver: PostgresDriver, after: str | None, limit: int = 1000) -> tuple[list[str], str]:
    page = await driver.read_attempts(after=after, limit=limit)
    return [attempt.job_id for attempt in page.attempts], page.cursor


def cancel_on(raw: Raw, record: JobRecord) -> None:
    raw("SELECT cancel(%s, %s::bigint, %s)", [record.id], NOW, NOTIFYING)


def test_rows_of_a_transaction_that_commits_late_are_not_skipped(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async def use() -> None:
        first, late, later, last = (record(id=name) for name in ("first", "late", "later", "last"))
        await done(driver, first, NOW)
        read, cursor = await follow(driver, None)
        assert read == ["first"]
        await driver.enqueue([late], now=NOW)
        with raw.another() as slow, raw.another() as slower:
            slow("BEGIN")
            cancel_on(slow, late)
            await done(driver, later, NOW)
            read, cursor = await follow(driver, cursor)
            assert read == []
            slower("BEGIN")
            slower("SELECT pg_current_xact_id()")
            slow("COMMIT")
            await done(driver, last, NOW)
            read, cursor = await follow(driver, cursor)
            assert read == ["late", "later"]
            slower("ROLLBACK")
        assert (await follow(driver, cursor))[0] == ["last"]
        assert (await follow(driver, None))[0] == ["first", "late", "later", "last"]

    run(driver, use)


def test_pages_of_any_size_give_every_row_once(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    """Across days, and several rows of one transaction."""

    async def use() -> None:
        raw("SELECT add_days(%s)", NOW)
        for day in range(-3, 4):
            now = NOW + day * DAY
            await driver.enqueue([record(run_at_us=now, id=f"{day}.{n}") for n in range(4)], now=now)
            jobs = await driver.reserve("q", limit=4, lease_for=SECOND, now=now, worker="w")
            await driver.settle([Ack(job.id, job.token or "") for job in jobs], now=now)
        every, _ = await follow(driver, None)
        assert every == [f"{day}.{n}" for day in range(-3, 4) for n in range(4)]
        for limit in (1, 3, 5, 28):
            read: list[str] = []
            cursor: str | None = None
            while len(read) < 28:
                more, cursor = await follow(driver, cursor, limit)
                assert 0 < len(more) <= limit
                read += more
            assert read == every
            assert (await follow(driver, cursor))[0] == []

    run(driver, use)


@pytest.mark.parametrize(
    "cursor", ["", "1", "1.2", "1.2.3.4", "a.b.c", "1.-2.3", f"1.{'9' * 30}.1", "1.2.3 ", "²..1", "1.²3.1"]
)
def test_what_is_no_cursor_is_refused(driver: PostgresDriver, cursor: str) -> None:
    async def use() -> None:
        with pytest.raises(InvalidRequest):
            await driver.read_attempts(after=cursor)

    run(driver, use)


# -- in another cluster, where the numbers of transactions begin anew ---------------------------------------------

_SHIFT = 10**12


def restore_elsewhere(raw: Raw) -> None:
    """What a restored dump looks like: it comes from a cluster with another name, which was far ahead."""
    fold(raw)
    raw("SELECT begin_epoch()")
    raw("UPDATE epochs SET system_id = system_id - 1")
    raw("UPDATE attempts SET xid = xid + %s", _SHIFT)
    for table, column in (("moves", "xid"), ("moves", "folded"), ("upkeep", "horizon")):
        shift = "UPDATE {} SET {column} = ({column}::text::bigint + %s)::text::xid8"
        raw(sql.SQL(shift).format(sql.Identifier(table), column=sql.Identifier(column)), _SHIFT)


def shifted(cursor: str) -> str:
    epoch, xid, seq = cursor.split(".")
    return f"{epoch}.{int(xid) + _SHIFT}.{seq}"


async def test_a_cursor_goes_on_in_the_new_cluster(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async with driver.clone() as old:
        for name in ("a", "b", "c"):
            await done(old, record(id=name), NOW)
        _, after_a = await follow(old, None, 1)
        _, after_c = await follow(old, None)
    restore_elsewhere(raw)
    async with driver:
        assert (await follow(driver, shifted(after_a), 1))[0] == ["b"]
        for name in ("d", "e"):
            await done(driver, record(id=name), NOW)
        for cursor, expected in ((None, "abcde"), (shifted(after_a), "bcde"), (shifted(after_c), "de")):
            read: list[str] = []
            more, last = await follow(driver, cursor, 2)
            while more:
                read += more
                more, last = await follow(driver, last, 2)
            assert "".join(read) == expected
            assert last.startswith("2.")


async def test_the_first_row_of_a_log_that_was_empty_when_it_moved(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    await driver.migrate()
    restore_elsewhere(raw)
    async with driver:
        _, cursor = await follow(driver, None)
        await done(driver, record(id="a"), NOW)
        assert (await follow(driver, cursor))[0] == ["a"]
        assert (await follow(driver, None))[0] == ["a"]


def test_a_cursor_of_a_later_epoch_is_refused(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        await done(driver, record(), NOW)
        _, cursor = await follow(driver, None)
        with pytest.raises(InvalidRequest, match="another store"):
            await driver.read_attempts(after="2" + cursor[1:])

    run(driver, use)


def test_an_epoch_begins_once(driver: PostgresDriver, raw: Raw) -> None:
    async def use() -> None:
        await driver.migrate()
        restore_elsewhere(raw)
        handles = [driver.clone() for _ in range(5)]
        await asyncio.gather(*(handle.open() for handle in handles))
        await asyncio.gather(*(handle.close() for handle in handles))

    asyncio.run(use())
    assert raw("SELECT epoch FROM epochs ORDER BY epoch") == [(1,), (2,)]
    assert raw.one("SELECT begin_epoch()") == 2


async def test_claims_counters_and_waits_go_on_in_the_new_cluster(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async with driver.clone() as old:
        await old.enqueue([record(id=f"{n}", run_at_us=NOW + n) for n in range(5)], now=NOW + 10)
        await done(old, record(id="x", priority=1), NOW + 10)
        fold(raw)
        await old.enqueue([record(id="5", run_at_us=NOW + 5)], now=NOW + 10)
        before = await old.stats(now=NOW + 10)
    restore_elsewhere(raw)
    async with driver, driver.clone() as other:
        assert await driver.stats(now=NOW + 10) == before

        async def claim() -> list[str]:
            found = await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW + 10, worker="w")
            return [job.id for job in found]

        assert [*await claim(), *await claim()] == ["0", "1"]
        await other.enqueue([record(id="first", priority=1)], now=NOW + 10)
        assert [*await claim(), *await claim()] == ["first", "2"]
        fold(raw)
        await other.enqueue([record(id="again", priority=1)], now=NOW + 10)
        assert [*await claim(), *await claim(), *await claim()] == ["again", "3", "4"]
        assert [*await claim(), *await claim()] == ["5"]
        await waits_of(driver)(["q"], now=NOW + 10, timeout=0)
        assert await waits_of(driver)(["q"], now=NOW + 10, timeout=0) is False
        await other.enqueue([record(id="woken")], now=NOW + 10)
        assert await waits_of(driver)(["q"], now=NOW + 10, timeout=30) is True
