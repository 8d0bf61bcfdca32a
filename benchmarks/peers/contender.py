"""Who takes part: what has to be installed, how many jobs to give it, and how to ask its tables whether all is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    program: str
    """The file beside this one without its suffix."""
    settings: str
    """For the report: what it ran with."""
    jobs: int
    """How many a drain gives it. Slow ones get fewer, so that a round ends; a short backlog is rather in their favour."""
    unfinished: str
    """SQL for how many of %(count)s jobs are not yet acknowledged in the backend."""
    python: tuple[str, ...] = ()
    """What pip installs into an environment of its own; nothing for those that run in this one."""
    node: tuple[str, ...] = ()
    """What npm installs, for those whose program is a .cjs file."""


RAW = Contender(
    name="raw lease + delete",
    program="raw",
    settings="batches of 500, two commits each",
    jobs=100_000,
    unfinished="select count(*) from q",
)

OURS = Contender(
    name="TaskHarbor",
    program="ours",
    settings="defaults",
    jobs=100_000,
    unfinished="select count(*) from taskharbor.jobs",
)

PEERS = (
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
