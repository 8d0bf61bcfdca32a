"""What keeps calls flat however many jobs there are: each searches the index made for it, and reads no more than it needs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from drivers.postgres.harness import DAY, NOW, SECOND, Raw, ack, claim, fold, held, make_record, make_records
from needing import need
from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, Release, RetryAt
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.connections import Session
from taskharbor.jobs import Failure, JobRecord, JobState
from taskharbor_testkit.servers import PostgresAt, PostgresServer, drop_schema, with_fresh_schema

# The stores are filled once.
pytestmark = pytest.mark.xdist_group("postgres plans")

# -- what a call read, by the server's own counters -------------------------------------------------------------
# The hot statements live in functions, where EXPLAIN does not reach. What a plan is good for can be counted instead: which
# indexes were searched, how many entries they gave, and how many rows were read without one.

_COUNTERS = """
SELECT coalesce(p.relname, c.relname)::text,
       sum(pg_stat_get_numscans(c.oid))::bigint, sum(pg_stat_get_tuples_returned(c.oid))::bigint
FROM pg_class AS c LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid LEFT JOIN pg_class AS p ON p.oid = i.inhparent
WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'i')
GROUP BY 1
"""


Reads = dict[str, int]
"""Entries that searches of an index gave, dead ones too, and rows of a table read from end to end. Partitions as one."""


def one_connection(url: str) -> PostgresDriver:
    """A handle whose calls all run on one connection."""
    return PostgresDriver.from_url(f"{url}&pool_size=1&notify=off")


async def reads_of(driver: PostgresDriver, call: Callable[[], Awaitable[Any]]) -> Reads:
    """The driver has one connection, and nobody else uses the schema."""
    before = await _counters(driver)
    await call()
    return {
        name: rows - before.get(name, (0, 0))[1]
        for name, (scans, rows) in (await _counters(driver)).items()
        if scans > before.get(name, (0, 0))[0]
    }


async def _counters(driver: PostgresDriver) -> dict[str, tuple[int, int]]:
    async def read(session: Session) -> list[tuple[Any, ...]]:
        if session.connection.info.server_version < 150_000:
            pytest.skip("PostgreSQL 14 cannot be made to tell its counters at once")
        await session.rows("SELECT pg_stat_force_next_flush()::text")
        return await session.rows(_COUNTERS, [f'"{driver.options.schema}"'])

    return {name: (scans, rows) for name, scans, rows in await driver._query(read)}


# -- a store with much of everything ----------------------------------------------------------------------------

_SMALL = {"queues", "epochs", "migrations"}
"""Tables that may be read whole: they have a row per queue, or fewer."""

# Three queues, three priorities. Of 1 in 10 waiting jobs and leases the key is known.
_FILL = """
INSERT INTO queues (name, keep_done_us, keep_dead_us, keep_attempts_us)
    SELECT n, 7 * {day}, 90 * {day}, 30 * {day} FROM unnest('{{q,other,third}}'::text[]) AS n;
SELECT add_days({now});
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload, key)
    SELECT 'waiting-' || n, 1 + n % 3, 't', {now} - n % 10000, {now}, n % 3 * 10, 5, 1, '\\x7b7d',
           CASE WHEN n % 10 = 0 THEN 'w' || n END
    FROM generate_series(1, 50000) AS n;
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    SELECT 'scheduled-' || n, 1 + n % 3, 't', {now} + {day} + n, {now}, n % 3 * 10, 5, 0, '\\x7b7d'
    FROM generate_series(1, 50000) AS n;
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload, key,
                  token, worker, reserved_at, expires_at)
    SELECT 'leased-' || n, 1 + n % 3, 't', {now} - 20000 - n, {now}, n % 3 * 10, 5, 3, '\\x7b7d',
           CASE WHEN n % 10 = 0 THEN 'l' || n END, 'secret', 'w', {now}, {now} + {day} + n
    FROM generate_series(1, 20000) AS n;
INSERT INTO finished (seq, id, queue_id, type, run_at, created_at, finished_at, fence, rank, max_attempts, attempts, stalls,
                      state, payload, idempotency_key)
    SELECT nextval('job_seq'), 'finished-' || n, 1 + n % 3, 't', {now}, {now}, {now} - n * 1000, 1, 0, 5, 0, 0,
           4 + n % 2 * 2, '\\x7b7d', 'i' || n
    FROM generate_series(1, 30000) AS n;
INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
    SELECT queue_id, idempotency_key, seq, id FROM finished;
INSERT INTO dead (seq, id, queue_id, type, run_at, created_at, finished_at, fence, rank, max_attempts, attempts, stalls,
                  state, payload)
    SELECT nextval('job_seq'), 'dead-' || n, 1 + n % 3, 't', {now}, {now}, {now} - n * 1000, 1, 0, 5, 5, 0, 5, '\\x7b7d'
    FROM generate_series(1, 10000) AS n;
INSERT INTO attempts (job_id, queue_id, type, rank, fence, created_at, run_at, ended_at, outcome, state, payload_size)
    SELECT 'finished-' || n, 1 + n % 3, 't', 0, 1, {now}, {now}, {now} - n * 1000 - retried, retried, 4, 2
    FROM generate_series(1, 30000) AS n, generate_series(0, 1) AS retried;
INSERT INTO moves (queue_id, scheduled, ready, inflight, ranks, low_run_at)
    SELECT queue_id, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),
           count(*) FILTER (WHERE state = 3), array_agg(DISTINCT rank), min(run_at)
    FROM jobs GROUP BY queue_id;
"""

_RARE = """
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    SELECT 'rare-' || n, 1, 'rare' || n % 9, {now}, {now}, 20, 5, 1, '\\x7b7d' FROM generate_series(1, 270) AS n;
"""
"""A few jobs of other types behind all those, after the statistics are made: the planner knows of one type only."""


Call = Callable[[PostgresDriver], Awaitable[Any]]


def raw_to(url: str) -> Raw:
    return Raw(PostgresDriver.from_url(url).options)


def _fill(url: str) -> None:
    asyncio.run(PostgresDriver.from_url(url).migrate())
    with raw_to(url) as raw:
        # Nobody makes statistics behind the tests' back.
        tables = "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
        for (table,) in raw(tables):
            raw(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        # An autovacuum worker would read the tables for these even so.
        ranges = """SELECT c.relname FROM pg_class AS c JOIN pg_am AS a ON a.oid = c.relam
            WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'i' AND a.amname = 'brin'"""
        for (index,) in raw(ranges):
            raw(f"ALTER INDEX {index} SET (autosummarize = off)")
        raw(_FILL.format(now=NOW, day=DAY))
        raw(_RARE.format(now=NOW))


@pytest.fixture(scope="module")
def filled(postgres_server: PostgresAt) -> Iterator[str]:
    """The URL of a store that was filled a moment ago: the planner knows nothing of what is in it."""
    url = with_fresh_schema(postgres_server.url)
    _fill(url)
    yield url
    drop_schema(url)


@pytest.fixture(scope="module")
def analyzed(filled: str) -> str:
    """The same store, where autovacuum has done its work."""
    with raw_to(filled) as raw:
        raw("DELETE FROM jobs WHERE starts_with(type, 'rare')")
        raw("VACUUM (ANALYZE)")
        raw(_RARE.format(now=NOW))
    return filled


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


async def _claim(driver: PostgresDriver, *types: str) -> list[JobRecord]:
    jobs = await claim(driver, 20, lease=DAY, types=list(types) or None)
    assert len(jobs) == 20
    return jobs


async def _settle_others(driver: PostgresDriver) -> None:
    error = Failure("E", "no")
    first, retry, fail, back = map(held, await claim(driver, 4, lease=DAY))
    # A second settlement of a job, so that none of them is the plain kind.
    first_twice = (Ack(*first), Ack(*first))
    batch = (*first_twice, RetryAt(*retry, NOW, 1, error), Fail(*fail, 1, error), Release(*back))
    assert await driver.settle(batch, now=NOW) == [None] * 5


async def _ack(driver: PostgresDriver) -> None:
    await ack(driver, await _claim(driver))


async def _extend(driver: PostgresDriver) -> None:
    leases = [Extension(*held(job)) for job in await _claim(driver)]
    await driver.extend_lease(leases, lease_for=DAY, now=NOW)


def _enqueue(**fields: Any) -> Call:
    return lambda driver: driver.enqueue([make_record(**fields)], now=NOW)


async def _prune(driver: PostgresDriver, *, now: int = NOW + 91 * DAY, removed: int = 20) -> None:
    # Whole days are another matter: see the tests of the history.
    driver._next_tending = math.inf
    assert await driver.prune(now=now, limit=20) == removed


_EVERYWHERE = ["waiting-5", "finished-5", "dead-5", "nowhere"]
_KEYS = ["w30030", "w30060", "l1050", "l1080", "none"]
_DEAD = frozenset({JobState.DEAD})
_CASES: dict[str, tuple[Call, set[str]]] = {
    "claim": (_claim, {"jobs_waiting"}),
    "claim by type": (lambda d: _claim(d, "t"), {"jobs_waiting_type"}),
    "claim behind other types": (lambda d: _claim(d, "rare1"), {"jobs_waiting_type"}),
    "claim by types behind others": (lambda d: _claim(d, "rare2", "rare3", "none"), {"jobs_waiting_type"}),
    "ack": (_ack, {"jobs_pkey"}),
    "settle": (_settle_others, {"jobs_pkey"}),
    "extend": (_extend, {"jobs_pkey"}),
    "enqueue": (lambda d: d.enqueue(make_records(20), now=NOW), set()),
    "enqueue onto a waiting key": (_enqueue(key="w30"), {"jobs_key"}),
    "enqueue onto a running key": (_enqueue(key="l30"), {"jobs_key"}),
    "enqueue with a known idempotency key": (_enqueue(idempotency_key="i30"), {"idempotency_pkey"}),
    "reclaim": (lambda d: d.reclaim(now=NOW + DAY + 100, limit=20), {"jobs_due"}),
    "get": (lambda d: d.get(_EVERYWHERE, now=NOW), {"jobs_pkey", "finished_id", "dead_id"}),
    "cancel": (lambda d: d.cancel([f"waiting-{n}" for n in range(30001, 30011)], now=NOW), {"jobs_pkey"}),
    "cancel by key": (lambda d: d.cancel_keys(_KEYS, queue="q", now=NOW), {"jobs_key"}),
    "requeue": (lambda d: d.requeue([f"dead-{n}" for n in range(1, 11)], now=NOW), {"dead_id"}),
    "log": (lambda d: d.read_attempts(limit=20), {"attempts_order"}),
    "log of a job": (lambda d: d.job_attempts("finished-77"), {"attempts_job"}),
    "list the dead": (lambda d: d.list_jobs(JobFilter(states=_DEAD), now=NOW, limit=20), {"dead_pkey"}),
    "purge": (lambda d: d.purge(JobFilter(queue="q", states=_DEAD), limit=20), set()),
    "prune": (_prune, set()),
    "prune nothing": (lambda d: _prune(d, now=NOW, removed=0), {"dead_ended"}),
    "stats": (lambda d: d.stats(now=NOW), {"jobs_waiting", "jobs_due"}),
    "wait": (lambda d: d.wait(["q", "other"], now=NOW, timeout=0), {"jobs_waiting", "jobs_due"}),
}
"""What is called, and the indexes it has to search."""

_FEW = 200
"""Entries of one index that a call on 20 jobs may read: some times 20, one or two for each of 3 priorities and 10 partitions,
and those of jobs that an earlier call has moved. There are 10,000 to 50,000 of everything."""


_SUMMARIES = {"jobs_places", "finished_places", "attempts_ended"}
"""Indexes that name ranges of pages: their entries are not counted one by one. Until a vacuum has made the summary they name
every page, so what rests on them is only looked at after one."""


def check(reads: Reads, needed: set[str]) -> None:
    too_much = {name: rows for name, rows in reads.items() if rows > _FEW and name not in _SMALL | _SUMMARIES}
    assert not too_much, f"read too much: {too_much}"
    assert needed <= set(reads), f"not searched: {needed - set(reads)}, but {reads}"


async def _reads(url: str, call: Call) -> Reads:
    async with one_connection(url) as driver:
        # Once before: what a connection reads to learn its way does not count.
        await driver.stats(now=NOW)
        return await reads_of(driver, lambda: call(driver))


_FILLED = [("filled", case) for case in _CASES if case != "log of a job"]
_ANALYZED = [("analyzed", case) for case in _CASES]


@pytest.mark.parametrize(("url", "case"), _FILLED + _ANALYZED, indirect=["url"])
async def test_a_call_reads_no_more_than_it_needs(url: str, case: str) -> None:
    if case == "stats":
        # Stats read the moves that are not folded.
        with raw_to(url) as raw:
            fold(raw)
    call, needed = _CASES[case]
    check(await _reads(url, call), needed)


async def test_the_check_finds_a_missing_index(filled: str) -> None:
    """Otherwise it would prove nothing. In the order of time: an index gone, another one that only looks like it."""
    call, needed = _CASES["claim"]
    with raw_to(filled) as raw:
        raw("DROP INDEX jobs_waiting")
        try:
            reads = await _reads(filled, call)
            with pytest.raises(AssertionError, match=r"read too much|not searched"):
                check(reads, needed)
            raw("CREATE INDEX jobs_waiting ON jobs (queue_id, rank) WHERE state <= 1")
            reads = await _reads(filled, call)
            with pytest.raises(AssertionError, match="read too much"):
                check(reads, needed)
        finally:
            raw("DROP INDEX IF EXISTS jobs_waiting")
            raw("CREATE INDEX jobs_waiting ON jobs (queue_id, rank, run_at, seq) WHERE state <= 1")


# -- the plans themselves, where the server has the module that shows them ------------------------------------


async def _plans(url: str, call: Call) -> list[Any]:
    """Of every statement that a call makes, those within functions too."""
    found: list[Any] = []

    def hear(diagnostic: psycopg.errors.Diagnostic) -> None:
        _, is_plan, text = (diagnostic.message_primary or "").partition("plan:\n")
        if is_plan:
            found.append(json.loads(text))

    async def show(session: Session) -> None:
        await session.connection.execute(
            "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_format = json; "
            "SET auto_explain.log_nested_statements = on; SET auto_explain.log_level = notice"
        )
        session.connection.add_notice_handler(hear)

    async with one_connection(url) as driver:
        await driver._query(show)
        found.clear()
        await call(driver)
    return found


def _scans(plan: Any, is_sorted: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """(kind, table, index, whether what it gives is sorted afterwards) of every scan in a plan."""
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        # A bitmap's index is named one step below.
        below = [part.get("Index Name", "") for part in plan.get("Plans", ())]
        yield plan["Node Type"], plan["Relation Name"], plan.get("Index Name") or "".join(below), is_sorted
    for part in plan.get("Plans", ()):
        yield from _scans(part, is_sorted or "Sort" in plan["Node Type"])


@pytest.fixture(scope="module")
def explaining(oldest_postgres_server: PostgresServer, postgres_server: PostgresAt) -> Iterator[str]:
    """The URL of a filled store on a server that has auto_explain."""
    for server in (postgres_server, oldest_postgres_server):
        try:
            server.execute("LOAD 'auto_explain'")
        except psycopg.errors.UndefinedFile:
            continue
        url = with_fresh_schema(server.url)
        _fill(url)
        yield url
        drop_schema(url)
        return
    need("a PostgreSQL with auto_explain, one of its contrib modules")


async def _prune_strays(driver: PostgresDriver) -> None:
    later = NOW + 1000 * DAY
    await driver.enqueue([make_record(queue="strays")], now=later)
    await ack(driver, await claim(driver, queue="strays", now=later), later)
    await _prune(driver, now=later + 91 * DAY, removed=21)


_NOT_FLAT: dict[str, Call] = {
    "purge everything": lambda d: d.purge(JobFilter(), limit=20),
    "prune strays": _prune_strays,
    "upkeep": lambda d: d.prune(now=NOW, limit=20),
    "list": lambda d: d.list_jobs(JobFilter(), now=NOW, limit=20),
    "list a queue": lambda d: d.list_jobs(JobFilter(queue="q"), now=NOW, limit=20),
    "log of a removed job": lambda d: d.job_attempts("gone"),
}
"""Calls that may read more than they answer."""
_FIRST_OF_MANY = {"jobs_waiting", "jobs_due"}


@pytest.mark.installed
@pytest.mark.parametrize("case", [*_CASES, *_NOT_FLAT])
async def test_a_plan_searches_its_index(explaining: str, case: str) -> None:
    """A plan that has to use what it was told to avoid counts as so expensive that the server takes seconds to compile it."""
    call, needed = _CASES.get(case) or (_NOT_FLAT[case], set())
    plans = await _plans(explaining, call)
    assert plans
    assert not [plan["Query Text"] for plan in plans if "JIT" in plan]
    if case in _NOT_FLAT:
        return
    found = [scan for plan in plans for scan in _scans(plan["Plan"])]
    jobs = [scan for scan in found if scan[1] == "jobs"]
    assert {name for name in needed if name.startswith("jobs_")} <= {index for _, _, index, _ in jobs}, found
    assert "Seq Scan" not in {kind for kind, _, _, _ in jobs}, found
    # A bitmap has no order: it will do for jobs that are named, not for the first of many.
    first = [scan for scan in jobs if scan[2] in _FIRST_OF_MANY]
    assert {kind for kind, _, _, _ in first} <= {"Index Scan", "Index Only Scan"}, found
    assert case == "stats" or not [scan for scan in first if scan[3]], found


# -- with an old snapshot held open, dead entries stay in the indexes -------------------------------------------


async def _drain(url: str, *, remembers: bool, types: list[str] | None = None) -> list[int]:
    """Entries and rows that each claim of 100 read, by a handle with or without its hints."""
    read: list[int] = []
    claimed: list[JobRecord] = []

    async def reserve(now: int) -> None:
        claimed[:] = await claim(driver, 100, lease=DAY, now=now, types=types)

    async with one_connection(url) as driver:
        if types:
            await driver.enqueue(make_records(500, type="another"), now=NOW)
        for _ in range(5):
            await driver.enqueue(make_records(1000, type="t"), now=NOW)
        snapshot = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "TABLE queues")
        with Raw(driver.options) as raw, raw.another(*snapshot):
            for now in range(NOW, NOW + 50 * SECOND, SECOND):
                if not remembers:
                    driver._claimer._hints.clear()
                read.append(sum((await reads_of(driver, partial(reserve, now))).values()))
                assert len(claimed) == 100
                await ack(driver, claimed, now)
    return read


@pytest.mark.parametrize("types", [None, ["t", "u"]])
async def test_claims_stay_flat_under_an_old_snapshot(postgres_url: str, types: list[str] | None) -> None:
    """Also by type, behind other types."""
    read = await _drain(postgres_url, remembers=True, types=types)
    # The first one of a handle has nothing to remember, but nothing is dead yet either.
    assert max(read[-5:]) < 3 * max(read[:5]), read


async def test_without_a_memory_claims_read_what_is_dead_again_and_again(postgres_url: str) -> None:
    """What the test above guards against happens."""
    read = await _drain(postgres_url, remembers=False)
    assert min(read[-5:]) > 5 * max(read[:5]), read


async def test_a_claim_reads_only_the_moves_that_it_has_not_seen(postgres_url: str) -> None:
    async with one_connection(postgres_url) as driver:
        for _ in range(150):
            await driver.enqueue([make_record()], now=NOW)
        # Often enough for the server to settle on a plan.
        for _ in range(10):
            await claim(driver, 10)
        reads = await reads_of(driver, lambda: claim(driver, 10))
    assert reads.get("moves_order", 0) + reads.get("moves", 0) < 50, reads
