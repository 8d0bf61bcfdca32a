"""What keeps calls flat however many jobs there are: each searches the index made for it, and reads no more than it needs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from drivers.postgres.pg_harness import DAY, NOW, Raw
from drivers.postgres.pg_reads import Reads, one_connection, reads_of
from needing import need
from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, Release, Retry
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState
from taskharbor.requests import new_id
from taskharbor_testkit.servers import PostgresAt, PostgresServer, drop_schema, with_fresh_schema

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


@dataclass
class Store:
    """A store with much of everything."""

    driver: PostgresDriver
    leased: list[JobRecord] = field(default_factory=list)

    async def claim(self, limit: int = 20, types: list[str] | None = None) -> list[JobRecord]:
        return await self.driver.reserve("q", limit=limit, lease_for=DAY, now=NOW, worker="w", types=types)


Call = Callable[[Store], Awaitable[Any]]


def _fill(url: str, server: PostgresAt | None = None) -> None:
    """With statistics of everything but the rare types where a server is given that makes them."""
    options = PostgresDriver.from_url(url).options
    asyncio.run(PostgresDriver.from_url(url).migrate())
    with Raw(psycopg.connect(options.conninfo, autocommit=True), options.schema) as raw:
        # Nobody makes statistics behind the tests' back.
        tables = raw(
            "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'",
            f'"{options.schema}"',
        )
        for (table,) in tables:
            raw(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        raw.connection.execute(_FILL.format(now=NOW, day=DAY))
        if server is not None:
            server.execute("VACUUM (ANALYZE)")
        raw.connection.execute(_RARE.format(now=NOW))


@pytest.fixture(scope="module")
def filled(postgres_server: PostgresAt) -> Iterator[str]:
    """The URL of a store that was filled a moment ago: the planner knows nothing of what is in it."""
    url = with_fresh_schema(postgres_server.url)
    _fill(url)
    yield url
    drop_schema(url)


@pytest.fixture(scope="module")
def analyzed(postgres_server: PostgresAt) -> Iterator[str]:
    """The URL of a store where autovacuum has done its work."""
    url = with_fresh_schema(postgres_server.url)
    _fill(url, postgres_server)
    yield url
    drop_schema(url)


@pytest.fixture(params=["filled", "analyzed"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def new_job(**fields: Any) -> JobRecord:
    return JobRecord(
        **({"id": new_id(), "type": "t", "queue": "q", "run_at_us": NOW, "created_at_us": NOW} | fields)
    )


async def _settle_others(store: Store) -> list[Any]:
    error = Failure("E", "no")
    ack, retry, fail, back = ((job.id, job.token or "") for job in await store.claim(4))
    # A second settlement of a job, so that none of them is the plain kind.
    batch = [Ack(*ack), Ack(*ack), Retry(*retry, NOW, 1, error), Fail(*fail, 1, error), Release(*back)]
    answers = await store.driver.settle(batch, now=NOW)
    assert answers == [None] * 5
    return answers


async def _claim_rare(store: Store, *types: str) -> None:
    assert len(await store.claim(20, list(types))) == 20


async def _ack(store: Store) -> None:
    jobs = await store.claim()
    assert await store.driver.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW) == [None] * 20


async def _extend(store: Store) -> None:
    leases = [Extension(job.id, job.token or "") for job in await store.claim()]
    await store.driver.extend_lease(leases, lease_for=DAY, now=NOW)


async def _prune(store: Store, *, now: int = NOW + 91 * DAY, removed: int = 20) -> None:
    # Whole days are another matter: see the tests of the history.
    store.driver._next_tending = math.inf
    assert await store.driver.prune(now=now, limit=20) == removed


_CASES: dict[str, tuple[Call, set[str]]] = {
    "claim": (lambda s: s.claim(), {"jobs_waiting"}),
    "claim by type": (lambda s: s.claim(20, ["t"]), {"jobs_waiting_type"}),
    "claim behind other types": (lambda s: _claim_rare(s, "rare1"), {"jobs_waiting_type"}),
    "claim by types behind others": (
        lambda s: _claim_rare(s, "rare2", "rare3", "none"),
        {"jobs_waiting_type"},
    ),
    "ack": (_ack, {"jobs_pkey"}),
    "settle": (_settle_others, {"jobs_pkey"}),
    "extend": (_extend, {"jobs_pkey"}),
    "enqueue": (lambda s: s.driver.enqueue([new_job() for _ in range(20)], now=NOW), set()),
    "enqueue onto a waiting key": (
        lambda s: s.driver.enqueue([new_job(key="w30")], now=NOW),
        {"jobs_key"},
    ),
    "enqueue onto a running key": (
        lambda s: s.driver.enqueue([new_job(key="l30")], now=NOW),
        {"jobs_key"},
    ),
    "enqueue with a known idempotency key": (
        lambda s: s.driver.enqueue([new_job(idempotency_key="i30")], now=NOW),
        {"idempotency_pkey"},
    ),
    "reclaim": (lambda s: s.driver.reclaim(now=NOW + DAY + 100, limit=20), {"jobs_due"}),
    "get": (
        lambda s: s.driver.get(["waiting-5", "finished-5", "dead-5", "nowhere"], now=NOW),
        {"jobs_pkey", "finished_id", "dead_id"},
    ),
    "cancel": (
        lambda s: s.driver.cancel([f"waiting-{n}" for n in range(30001, 30011)], now=NOW),
        {"jobs_pkey"},
    ),
    "requeue": (lambda s: s.driver.requeue([f"dead-{n}" for n in range(1, 11)], now=NOW), {"dead_id"}),
    "log": (lambda s: s.driver.read_attempts(limit=20), {"attempts_order"}),
    "log of a job": (lambda s: s.driver.job_attempts("finished-77"), {"attempts_job"}),
    "list the dead": (
        lambda s: s.driver.list_jobs(JobFilter(states=frozenset({JobState.DEAD})), now=NOW, limit=20),
        {"dead_pkey"},
    ),
    "purge": (
        lambda s: s.driver.purge(JobFilter(queue="q", states=frozenset({JobState.DEAD})), limit=20),
        set(),
    ),
    "prune": (_prune, set()),
    "prune nothing": (lambda s: _prune(s, now=NOW, removed=0), {"dead_ended"}),
    "stats": (lambda s: s.driver.stats(now=NOW), {"jobs_waiting", "jobs_due"}),
    "wait": (lambda s: s.driver.wait(["q", "other"], now=NOW, timeout=0), {"jobs_waiting", "jobs_due"}),
}
"""What is called, and the indexes it has to search."""

_FEW = 200
"""Entries of one index that a call on 20 jobs may read: some times 20, one or two for each of 3 priorities and 10 partitions,
and those of jobs that an earlier call has moved. There are 10,000 to 50,000 of everything."""


_SUMMARIES = {"jobs_places", "finished_places", "attempts_ended"}
"""Indexes that name ranges of pages: their entries are not counted one by one. Until a vacuum has made the summary they name
every page, so what rests on them is only looked at after one."""

_AFTER_A_VACUUM = {"log of a job"}


def check(reads: Reads, needed: set[str]) -> None:
    whole = {table: rows for table, rows in reads.rows.items() if table not in _SMALL and rows > _FEW}
    assert not whole, f"read from end to end: {whole}"
    too_much = {
        index: rows for index, rows in reads.entries.items() if rows > _FEW and index not in _SUMMARIES
    }
    assert not too_much, f"read too much: {too_much}"
    assert needed <= set(reads.entries), f"not searched: {needed - set(reads.entries)}, but {reads.entries}"


async def _reads(url: str, call: Call) -> Reads:
    async with one_connection(url) as driver:
        # Once before: what a connection reads to learn its way does not count.
        await driver.stats(now=NOW)
        return await reads_of(driver, lambda: call(Store(driver)))


@pytest.mark.parametrize("case", _CASES)
def test_a_call_reads_no_more_than_it_needs(
    request: pytest.FixtureRequest, url: str, raw_to: Callable[[str], Raw], case: str
) -> None:
    if case in _AFTER_A_VACUUM:
        url = request.getfixturevalue("analyzed")
    if case == "stats":
        # Stats read the moves that are not folded. The first call notes how far the second may go.
        for _ in range(2):
            raw_to(url)("SELECT fold(0)")
    call, needed = _CASES[case]
    check(asyncio.run(_reads(url, call)), needed)


def test_the_check_finds_a_missing_index(filled: str, raw_to: Callable[[str], Raw]) -> None:
    """Otherwise it would prove nothing. In the order of time: an index gone, another one that only looks like it."""
    call, needed = _CASES["claim"]
    raw = raw_to(filled)
    raw("BEGIN")
    raw("DROP INDEX jobs_waiting")
    raw("COMMIT")
    try:
        with pytest.raises(AssertionError, match=r"read from end to end|read too much|not searched"):
            check(asyncio.run(_reads(filled, call)), needed)
        raw("CREATE INDEX jobs_waiting ON jobs (queue_id, rank) WHERE state <= 1")
        with pytest.raises(AssertionError, match="read too much"):
            check(asyncio.run(_reads(filled, call)), needed)
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

    async def show(session: Any) -> None:
        await session.connection.execute("LOAD 'auto_explain'")
        for name, value in (
            ("log_min_duration", "0"),
            ("log_nested_statements", "on"),
            ("log_format", "json"),
            ("log_level", "notice"),
        ):
            await session.rows("SELECT set_config($1, $2, false)", [f"auto_explain.{name}", value])
        session.connection.add_notice_handler(hear)

    async with one_connection(url) as driver:
        await driver._query(show)
        found.clear()
        await call(Store(driver))
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


@pytest.mark.installed
@pytest.mark.parametrize(
    ("case", "scans"),
    [
        ("claim", {("jobs", "jobs_waiting")}),
        ("claim by types behind others", {("jobs", "jobs_waiting_type")}),
        ("ack", {("jobs", "jobs_pkey")}),
        ("reclaim", {("jobs", "jobs_due")}),
        ("enqueue onto a waiting key", {("jobs", "jobs_key")}),
        ("enqueue onto a running key", {("jobs", "jobs_key")}),
    ],
)
def test_a_plan_searches_its_index_and_does_not_sort(
    explaining: str, case: str, scans: set[tuple[str, str]]
) -> None:
    plans = asyncio.run(_plans(explaining, _CASES[case][0]))
    found = [scan for plan in plans for scan in _scans(plan["Plan"])]
    jobs = [scan for scan in found if scan[1] == "jobs"]
    assert scans <= {(table, index) for _, table, index, _ in jobs}, found
    # A bitmap has no order: it will do for jobs that are named, not for the first of many.
    first = [scan for scan in jobs if scan[2] in ("jobs_waiting", "jobs_due")]
    assert {kind for kind, _, _, _ in first} <= {"Index Scan", "Index Only Scan"}, found
    assert "Seq Scan" not in {kind for kind, _, _, _ in jobs}, found
    assert not [scan for scan in first if scan[3]], found


async def _prune_strays(store: Store) -> None:
    driver, later = store.driver, NOW + 1000 * DAY
    await driver.enqueue([new_job(queue="strays")], now=later)
    (job,) = await driver.reserve("strays", limit=1, lease_for=DAY, now=later, worker="w")
    await driver.ack(job.id, job.token or "", now=later)
    await _prune(store, now=later + 91 * DAY, removed=21)


_NOT_FLAT: dict[str, Call] = {
    "purge everything": lambda s: s.driver.purge(JobFilter(), limit=20),
    "prune strays": _prune_strays,
    "upkeep": lambda s: s.driver.prune(now=NOW, limit=20),
    "list": lambda s: s.driver.list_jobs(JobFilter(), now=NOW, limit=20),
    "list a queue": lambda s: s.driver.list_jobs(JobFilter(queue="q"), now=NOW, limit=20),
    "log of a removed job": lambda s: s.driver.job_attempts("gone"),
}
"""Calls that may read more than they answer."""


@pytest.mark.installed
@pytest.mark.parametrize("case", [*_CASES, *_NOT_FLAT])
def test_nothing_is_compiled(explaining: str, case: str) -> None:
    """A plan that has to use what it was told to avoid counts as so expensive that the server takes seconds to compile it."""
    plans = asyncio.run(_plans(explaining, _NOT_FLAT.get(case) or _CASES[case][0]))
    assert plans
    compiled = [plan["Query Text"] for plan in plans if "JIT" in plan]
    assert not compiled


# -- with an old snapshot held open, dead entries stay in the indexes -------------------------------------------


@pytest.fixture
def raw_to() -> Iterator[Callable[[str], Raw]]:
    opened: list[Raw] = []

    def connect(url: str) -> Raw:
        options = PostgresDriver.from_url(url).options
        opened.append(Raw(psycopg.connect(options.conninfo, autocommit=True), options.schema))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.connection.close()


async def _drain(
    url: str, jobs: int, *, one_handle: bool, ahead: int = 0, types: list[str] | None = None
) -> list[int]:
    """Entries and rows that each claim of 100 read, in one and the same handle or each in a new one."""
    read: list[int] = []

    async def claim(driver: PostgresDriver, now: int) -> None:
        claimed: list[JobRecord] = []

        async def reserve() -> None:
            claimed.extend(
                await driver.reserve("q", limit=100, lease_for=DAY, now=now, worker="w", types=types)
            )

        reads = await reads_of(driver, reserve)
        assert len(claimed) == 100
        read.append(sum(reads.entries.values()) + sum(reads.rows.values()))
        await driver.settle([Ack(job.id, job.token or "") for job in claimed], now=now)

    async with one_connection(url, notify="off") as driver:
        await driver.enqueue([new_job(type="another") for _ in range(ahead)], now=NOW)
        for start in range(0, jobs, 1000):
            await driver.enqueue([new_job(payload=b"%d" % n) for n in range(start, start + 1000)], now=NOW)
        with psycopg.connect(driver.options.conninfo) as holder:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute(f'SELECT count(*) FROM "{driver.options.schema}".queues')  # noqa: S608
            for now in range(NOW, NOW + jobs // 100 * SECOND, SECOND):
                if one_handle:
                    await claim(driver, now)
                else:
                    async with one_connection(url, notify="off") as fresh:
                        await claim(fresh, now)
    return read


def test_claims_stay_flat_while_an_old_snapshot_is_held(postgres_url: str) -> None:
    read = asyncio.run(_drain(postgres_url, 5000, one_handle=True))
    # The first one of a handle has nothing to remember, but nothing is dead yet either.
    assert max(read[-5:]) < 3 * max(read[:5]), read


def test_claims_by_type_stay_flat_too_behind_other_types(postgres_url: str) -> None:
    read = asyncio.run(_drain(postgres_url, 5000, one_handle=True, ahead=500, types=["t", "u"]))
    assert max(read[-5:]) < 3 * max(read[:5]), read


def test_without_a_memory_claims_read_what_is_dead_again_and_again(postgres_url: str) -> None:
    """What the test above guards against happens."""
    read = asyncio.run(_drain(postgres_url, 5000, one_handle=False))
    assert min(read[-5:]) > 5 * max(read[:5]), read


def test_a_claim_reads_only_the_moves_that_it_has_not_seen(postgres_url: str) -> None:
    async def use() -> dict[str, int]:
        async with one_connection(postgres_url, notify="off") as driver:
            for _ in range(300):
                await driver.enqueue([new_job()], now=NOW)
            # Often enough for the server to settle on a plan.
            for _ in range(10):
                await driver.reserve("q", limit=10, lease_for=DAY, now=NOW, worker="w")
            reads = await reads_of(
                driver, lambda: driver.reserve("q", limit=10, lease_for=DAY, now=NOW, worker="w")
            )
            return {"moves_order": 0, "moves": 0} | reads.entries | reads.rows

    reads = asyncio.run(use())
    assert reads["moves_order"] + reads["moves"] < 50, reads
