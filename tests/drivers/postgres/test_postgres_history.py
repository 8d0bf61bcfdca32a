"""History by the day: days come, rows find theirs, days go when nobody keeps them; and a log that skips nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from psycopg import sql

from drivers.postgres.harness import DAY, NOW, SECOND, Raw, ack, claim, fold, ids, make_record
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.log import parse_cursor
from taskharbor.drivers.postgres.options import NOTIFYING
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, JobState
from taskharbor_testkit.waits import waits_of

TODAY = NOW // DAY * DAY
"""2023-11-14, midnight."""
NOON = TODAY + DAY // 2


@pytest.fixture
def url(postgres_url: str) -> str:
    """A schema of the test's own: it adds and drops days."""
    return postgres_url


def add_days(raw: Raw, now: int = NOW) -> int:
    return int(raw.one("SELECT add_days(%s)", now))


def drop_days(raw: Raw, now: int) -> int:
    return int(raw.one("SELECT drop_days(%s)", now))


def days(raw: Raw, table: str = "finished") -> list[str]:
    """The days that have a partition, but for those around the server's own today."""
    found = raw("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", table)
    names = sorted(name.removeprefix(f"{table}_") for (name,) in found)
    assert names[-1] == "rest"
    return [name for name in names if name.startswith("2023")]


def places(raw: Raw, table: str) -> list[str]:
    """The days in which the rows are, in the order they were written."""
    query = sql.SQL("SELECT tableoid::regclass::text FROM {} ORDER BY seq").format(sql.Identifier(table))
    return [name.removeprefix(f"{table}_") for (name,) in raw(query)]


async def run_job(driver: PostgresDriver, now: int, record: JobRecord | None = None) -> None:
    job = record or make_record(now=now)
    await driver.enqueue([job], now=now)
    (leased,) = await claim(driver, queue=job.queue, now=now)
    assert leased.id == job.id
    await ack(driver, [leased], now)


async def follow(driver: PostgresDriver, after: str | None, limit: int = 1000) -> tuple[list[str], str]:
    page = await driver.read_attempts(after=after, limit=limit)
    return [attempt.job_id for attempt in page.attempts], page.cursor


# -- days come ------------------------------------------------------------------------------------------------


async def test_a_store_has_days_and_more_are_made_once(store: PostgresDriver, raw: Raw) -> None:
    today = raw.one("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    for table in ("finished", "attempts"):
        names = [f"{table}_{today + timedelta(days=ahead):%Y%m%d}" for ahead in range(7)]
        assert [raw.one("SELECT to_regclass(%s)::text", name) for name in names] == names
    assert add_days(raw) == 18
    expected = [f"202311{day}" for day in range(13, 22)]
    assert days(raw) == days(raw, "attempts") == expected
    assert add_days(raw) == 0
    assert add_days(raw, NOW + DAY) == 2
    assert days(raw) == [*expected, "20231122"]
    # A row lies in the day it ended.
    instants = (TODAY, TODAY + DAY - 1, TODAY + DAY, TODAY + 30 * DAY, TODAY - 30 * DAY)
    records = [make_record(now=now) for now in instants]
    for now, record in zip(instants, records, strict=True):
        await run_job(store, now, record)
    expected = ["20231114", "20231114", "20231115", "rest", "rest"]
    assert places(raw, "finished") == places(raw, "attempts") == expected
    read, cursor = await follow(store, None, 3)
    assert read + (await follow(store, cursor))[0] == ids(records)


async def test_a_day_that_has_strays_is_left_out(store: PostgresDriver, raw: Raw) -> None:
    await run_job(store, NOON)
    assert add_days(raw) == 16
    assert days(raw)[:2] == ["20231113", "20231115"]
    await run_job(store, NOON + 1)
    assert places(raw, "finished") == ["rest"] * 2


async def test_readers_do_not_stop_upkeep(store: PostgresDriver, other: PostgresDriver, raw: Raw) -> None:
    """A dump reads every table for hours. A new day cannot be attached meanwhile; everything else goes on."""
    raw("ALTER FUNCTION add_days(bigint) SET lock_timeout = '20ms'")
    last = raw.one("SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'attempts'::regclass "
                   "AND inhrelid::regclass::text <> 'attempts_rest'")  # fmt: skip
    raw(f"DROP TABLE {last}")
    with raw.another("SELECT FROM attempts", "SELECT FROM finished"):
        await store.prune(now=NOW)
        assert raw.one("SELECT to_regclass(%s) IS NULL", last)
    await other.prune(now=NOW)
    assert raw.one("SELECT to_regclass(%s) IS NOT NULL", last)


# -- days go --------------------------------------------------------------------------------------------------

FULL, GONE = (2, 1, 2, 1), (0, 0, 2, 1)
"""Jobs done and cancelled, now and in all, in a queue that was filled, and when they are removed."""


async def numbers(driver: PostgresDriver, queue: str = "q") -> tuple[int, int, int, int]:
    (stats,) = await driver.stats(now=NOW, queue=queue)
    now = stats.counts
    return now[JobState.DONE], now[JobState.CANCELLED], stats.done_total, stats.cancelled_total


async def fill(driver: PostgresDriver, raw: Raw, **keep: int | None) -> None:
    """Per queue, which keeps so many days: two jobs done and one cancelled, today at noon."""
    add_days(raw)
    for queue, kept in keep.items():
        settings = QueueSettings(keep_done_us=kept and kept * DAY, keep_attempts_us=None)
        await driver.configure(queue, settings, now=NOW)
        for n in range(2):
            await run_job(driver, NOON, make_record(queue=queue, now=NOON, idempotency_key=f"{queue}{n}"))
        cancelled = make_record(queue=queue, now=NOON)
        await driver.enqueue([cancelled], now=NOON)
        assert await driver.cancel([cancelled.id], now=NOON) == [JobState.CANCELLED]


async def test_a_day_goes_when_its_last_instant_is_old_enough(store: PostgresDriver, raw: Raw) -> None:
    await fill(store, raw, q=2)
    assert drop_days(raw, TODAY + 3 * DAY - 1) == 0
    # Days without rows that are over are gone. Today is kept, and days to come are needed.
    assert days(raw) == ["20231114", *(f"202311{day}" for day in range(16, 22))]
    assert await numbers(store) == FULL
    assert drop_days(raw, TODAY + 3 * DAY) == 3
    assert "20231114" not in days(raw)
    assert await numbers(store) == GONE
    fold(raw)
    assert await numbers(store) == GONE
    # The log goes by its own time.
    assert len((await store.read_attempts()).attempts) == 3
    await store.configure("q", QueueSettings(keep_attempts_us=3 * DAY), now=NOW)
    assert drop_days(raw, TODAY + 4 * DAY - 1) == 0
    assert drop_days(raw, TODAY + 4 * DAY) == 3
    assert "20231114" not in days(raw, "attempts")
    assert (await store.read_attempts()).attempts == []


async def test_a_queue_that_keeps_longer_keeps_only_its_own(store: PostgresDriver, raw: Raw) -> None:
    await fill(store, raw, short=1, long=5, forever=None)
    assert drop_days(raw, TODAY + 2 * DAY) == 3
    assert await numbers(store, "short") == GONE
    assert await numbers(store, "long") == await numbers(store, "forever") == FULL
    # Once.
    assert drop_days(raw, TODAY + 2 * DAY) == 0
    assert drop_days(raw, TODAY + 6 * DAY) == 3
    assert await numbers(store, "long") == GONE
    assert drop_days(raw, TODAY + 1000 * DAY) == 0
    assert "20231114" in days(raw)
    await store.configure("forever", QueueSettings(keep_done_us=DAY, keep_attempts_us=None), now=NOW)
    assert drop_days(raw, TODAY + 1000 * DAY) == 3
    assert await numbers(store, "forever") == GONE
    assert (await store.list_jobs(JobFilter(), now=NOW)).jobs == []


@pytest.mark.parametrize("how", ["days", "purge", "remove"])
async def test_idempotency_keys_go_with_their_jobs(store: PostgresDriver, raw: Raw, how: str) -> None:
    """The job's own, and that of a request which changed the job while it waited."""
    await fill(store, raw, q=1, other=None)
    first = make_record(now=NOON, key="k", idempotency_key="own")
    await store.enqueue([first], now=NOON)
    changed = await store.enqueue([make_record(key="k", idempotency_key="led")], now=NOON)
    assert ids(changed) == [first.id]
    await store.cancel([first.id], now=NOON)
    assert raw.one("SELECT count(*) FROM idempotency") == 6
    if how == "days":
        assert drop_days(raw, TODAY + 3 * DAY) == 4
    elif how == "purge":
        assert await store.purge(JobFilter(queue="q")) == 4
    else:
        ended = ids((await store.list_jobs(JobFilter(queue="q"), now=NOW)).jobs)
        assert all(isinstance(state, JobState) for state in await store.remove(ended))
    known = raw.one("SELECT string_agg(idempotency_key, ' ' ORDER BY idempotency_key) FROM idempotency")
    assert known == "other0 other1"
    (answer,) = await store.enqueue([make_record(idempotency_key="q0")], now=NOW)
    assert not answer.existed


async def test_a_reader_of_the_day_is_not_waited_for(store: PostgresDriver, raw: Raw) -> None:
    await fill(store, raw, q=1)
    with raw.another("SELECT FROM finished_20231114 LIMIT 1"):
        assert drop_days(raw, TODAY + 2 * DAY) == 0
        assert await numbers(store) == FULL
        (answer,) = await store.enqueue([make_record(idempotency_key="q0")], now=NOW)
        assert answer.existed
        # Nobody has to stand behind the lock that was asked for.
        await run_job(store, NOON)
    assert drop_days(raw, TODAY + 2 * DAY) == 4
    assert await numbers(store) == (0, 0, 3, 1)


async def test_who_drop_at_once_count_once(store: PostgresDriver, other: PostgresDriver, raw: Raw) -> None:
    await fill(store, raw, q=7, r=7)
    assert await store.prune(now=NOON) == 0
    async with store.clone() as third, store.clone() as fourth:
        removed = await asyncio.gather(*(one.prune(now=NOW + 31 * DAY) for one in (other, third, fourth)))
    assert sum(removed) + drop_days(raw, NOW + 31 * DAY) == 6
    assert await numbers(store, "q") == await numbers(store, "r") == GONE
    assert "20231114" not in days(raw)


# -- the log --------------------------------------------------------------------------------------------------


async def test_rows_that_commit_late_are_not_skipped(store: PostgresDriver, raw: Raw) -> None:
    await run_job(store, NOW, make_record("first"))
    read, cursor = await follow(store, None)
    assert read == ["first"]
    await store.enqueue([make_record("late")], now=NOW)
    with raw.another() as slow, raw.another() as slower:
        slow("SELECT cancel_jobs(%s, %s::bigint, false, %s)", ["late"], NOW, NOTIFYING)
        await run_job(store, NOW, make_record("later"))
        read, cursor = await follow(store, cursor)
        assert read == []
        slower("SELECT pg_current_xact_id()")
        slow("COMMIT")
        await run_job(store, NOW, make_record("last"))
        read, cursor = await follow(store, cursor)
        assert read == ["late", "later"]
    assert (await follow(store, cursor))[0] == ["last"]
    assert (await follow(store, None))[0] == ["first", "late", "later", "last"]


NO_CURSORS = ["", "1", "1.2", "1.2.3.4", "a.b.c", "1.-2.3", f"1.{'9' * 30}.1", "1.2.3 ", "²..1", "1.²3.1"]


@pytest.mark.parametrize("cursor", NO_CURSORS)
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_cursor(cursor)


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


async def test_a_cursor_goes_on_in_the_new_cluster(driver: PostgresDriver, raw: Raw) -> None:
    async with driver.clone() as old:
        for name in ("a", "b", "c"):
            await run_job(old, NOW, make_record(name))
        _, after_a = await follow(old, None, 1)
        _, after_c = await follow(old, None)
        with pytest.raises(InvalidRequest, match="another store"):
            await old.read_attempts(after="2" + after_a[1:])
    restore_elsewhere(raw)
    async with driver:
        assert (await follow(driver, shifted(after_a), 1))[0] == ["b"]
        for name in ("d", "e"):
            await run_job(driver, NOW, make_record(name))
        for cursor, expected in ((None, "abcde"), (shifted(after_a), "bcde"), (shifted(after_c), "de")):
            read: list[str] = []
            more, last = await follow(driver, cursor, 2)
            while more:
                read += more
                more, last = await follow(driver, last, 2)
            assert "".join(read) == expected
            assert last.startswith("2.")


async def test_an_epoch_begins_once_also_where_the_log_was_empty(driver: PostgresDriver, raw: Raw) -> None:
    await driver.migrate()
    restore_elsewhere(raw)
    handles = [driver.clone() for _ in range(5)]
    await asyncio.gather(*(handle.open() for handle in handles))
    await asyncio.gather(*(handle.close() for handle in handles))
    assert raw("SELECT epoch FROM epochs ORDER BY epoch") == [(1,), (2,)]
    assert raw.one("SELECT begin_epoch()") == 2
    async with driver:
        _, cursor = await follow(driver, None)
        await run_job(driver, NOW, make_record("a"))
        assert (await follow(driver, cursor))[0] == (await follow(driver, None))[0] == ["a"]


async def test_claims_counters_and_waits_go_on_in_the_new_cluster(driver: PostgresDriver, raw: Raw) -> None:
    later = NOW + 10
    async with driver.clone() as old:
        await old.enqueue([make_record(f"{n}", run_at_us=NOW + n) for n in range(5)], now=later)
        await run_job(old, later, make_record("x", priority=1))
        fold(raw)
        await old.enqueue([make_record("5", run_at_us=NOW + 5)], now=later)
        before = await old.stats(now=later)
    restore_elsewhere(raw)
    async with driver, driver.clone() as other:
        assert await driver.stats(now=later) == before

        async def next_ids(count: int) -> list[str]:
            return [job.id for _ in range(count) for job in await claim(driver, now=later, lease=SECOND)]

        assert await next_ids(2) == ["0", "1"]
        await other.enqueue([make_record("first", priority=1)], now=later)
        assert await next_ids(2) == ["first", "2"]
        fold(raw)
        await other.enqueue([make_record("again", priority=1)], now=later)
        assert await next_ids(5) == ["again", "3", "4", "5"]
        await waits_of(driver)(["q"], now=later, timeout=0)
        assert await waits_of(driver)(["q"], now=later, timeout=0) is False
        await other.enqueue([make_record("woken")], now=later)
        assert await waits_of(driver)(["q"], now=later, timeout=30) is True
