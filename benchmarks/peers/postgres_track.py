"""The race on PostgreSQL: who takes part, each in a database of its own, and how its tables are asked what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg

from benchmarks.peers.contender import OURS, RAW, Contender
from benchmarks.peers.track import Ask
from benchmarks.postgres_server import fresh_database, settle_down

_RAW = Contender(
    name=RAW,
    program="raw",
    settings="batches of 500, two commits each",
    jobs=100_000,
    unfinished="select count(*) from q",
)

_OURS = Contender(
    name=OURS,
    program="ours",
    settings="defaults",
    jobs=100_000,
    unfinished="select count(*) from taskharbor.jobs",
)

CONTENDERS = (
    _RAW,
    _OURS,
    Contender(
        name="procrastinate",
        program="procrastinate",
        settings="concurrency 20, jobs deleted",
        jobs=3_000,
        unfinished="select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
        python=("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.8", "uvloop==0.23.0"),
    ),
    Contender(
        name="PgQueuer",
        program="pgqueuer",
        settings="batches of 500, asyncpg",
        jobs=20_000,
        unfinished="select count(*) from pgqueuer",
        python=("pgqueuer[asyncpg]==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
    ),
    Contender(
        name="Chancy",
        program="chancy",
        settings="asyncio executor, concurrency 500, eager polling",
        jobs=10_000,
        unfinished="select count(*) from chancy_jobs where state in ('pending', 'running', 'retrying')",
        python=("chancy==0.26.0", "psycopg[binary,pool]==3.3.8", "uvloop==0.23.0"),
    ),
    Contender(
        name="Awa",
        program="awa",
        settings="queue storage, 512 workers",
        jobs=20_000,
        # Completions are receipts; the rows of the jobs stay where they are.
        unfinished=(
            "select %(count)s - (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)"
            " - (select count(*) from awa.done_entries where state = 'completed')"
        ),
        python=("awa-pg==0.6.9", "uvloop==0.23.0"),
    ),
    Contender(
        name="Graphile Worker",
        program="graphile_worker",
        settings="local queue of 500, batched completion, concurrency 24",
        jobs=20_000,
        unfinished="select count(*) from graphile_worker._private_jobs",
        node=("graphile-worker@0.17.3",),
    ),
)


class PostgresTrack:
    contenders = CONTENDERS
    failures = (psycopg.Error,)

    def admit(self, contender: Contender) -> None:
        """Everybody: the server is new enough."""

    def fresh(self) -> AbstractContextManager[str]:
        return fresh_database()

    def settle_down(self) -> None:
        settle_down()

    @contextmanager
    def asking(self, url: str) -> Iterator[Ask]:
        with psycopg.connect(url, autocommit=True) as connection:

            def ask(contender: Contender, count: int) -> int:
                row = connection.execute(contender.unfinished.encode(), {"count": count}).fetchone()
                assert row is not None
                return int(row[0])

            yield ask
