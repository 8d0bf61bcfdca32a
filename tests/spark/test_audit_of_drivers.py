"""What real drivers write is clean: random lives of several clients on every driver, and simulated fleets."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark.random_histories import LIMIT, Life, all_jobs, as_tuple, whole_log
from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.drivers.registry import connect
from taskharbor.jobs import Attempt, JobRecord, to_datetime
from taskharbor_testkit.simulation.scenario import write_scenario
from taskharbor_testkit.simulation.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from taskharbor.spark.audit import AuditResult

Told = tuple[list[Attempt], list[JobRecord]]


@asynccontextmanager
async def begun(url: str, seed: int, clients: int) -> AsyncIterator[Life]:
    print(f"seed {seed} on {url.partition(':')[0]}")
    first = connect(url)
    handles = [first, *(first.clone() for _ in range(clients - 1))]
    for handle in handles:
        await handle.open()
    try:
        yield Life(handles, seed, await first.time())
    finally:
        for handle in handles:
            await handle.close()


async def live(url: str, seed: int, *, clients: int, steps: int) -> Told:
    async with begun(url, seed, clients) as life:
        await life.live(steps)
        return await whole_log(life.clients[0]), await all_jobs(life.clients[0], life.now)


def simulated(seed: int) -> Told:
    evidence = World(write_scenario(seed)).run()
    return list(evidence.ledger.rows), list(evidence.jobs)


def frames(spark: SparkSession, told: dict[str, Told]) -> tuple[DataFrame, DataFrame]:
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StringType

    rows: list[Any] = [
        as_tuple(attempt, ATTEMPTS.names) + (source,)
        for source, (attempts, _) in told.items()
        for attempt in attempts
    ]
    jobs = [
        (source, job.id, str(job.state), job.fence, to_datetime(job.created_at_us))
        for source, (_, listed) in told.items()
        for job in listed
    ]
    return (
        spark.createDataFrame(rows, from_arrow_schema(ATTEMPTS).add("source", StringType())),
        spark.createDataFrame(
            jobs, "source string, id string, state string, fence long, created_at timestamp"
        ),
    )


def test_the_histories_of_all_drivers_are_clean(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    from taskharbor.spark.audit import audit, summarise

    first = random.randrange(2**31)
    told: dict[str, Told] = {}
    for number in range(40):
        told[f"memory {number}"] = asyncio.run(
            live(f"memory://audit{first + number}", first + number, clients=3, steps=120)
        )
    for number in range(4):
        url = f"sqlite:///{tmp_path}/{number}.db"
        told[f"sqlite {number}"] = asyncio.run(live(url, first + number, clients=3, steps=120))
    told["postgres"] = asyncio.run(live(postgres_url, first, clients=4, steps=250))
    limited = spark.createDataFrame(
        [(source, "limited", LIMIT, to_datetime(0)) for source in told],
        "source string, queue string, max_inflight int, observed_at timestamp",
    )
    # Their operators change the limits while they run, and the log does not tell when.
    for number in range(60):
        told[f"simulation {number}"] = simulated(first + number)

    outcomes = {(row.outcome, row.state) for attempts, _ in told.values() for row in attempts}
    assert len(outcomes) >= 12, outcomes
    attempts, jobs = frames(spark, told)
    result = summarise(audit(attempts, live_jobs=jobs, limits=limited), attempts)
    print(f"{result.rows} rows of {result.jobs} jobs")
    assert result.is_clean, "\n".join(f"{one.source}: {one.text}" for one in result.examples)
    assert result.rows > 5000


def test_a_store_is_audited_without_a_lake_and_a_job_that_vanished_is_missed(
    spark: SparkSession, tmp_path: Path
) -> None:
    from taskharbor.spark.audit import Kind, audit_store

    url = f"sqlite:///{tmp_path}/jobs.db"
    attempts, jobs = asyncio.run(live(url, random.randrange(2**31), clients=2, steps=150))
    last = {row.job_id: row for row in attempts}
    waiting = [job.id for job in jobs if not job.state.is_terminal and job.id in last]
    assert waiting
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as database, database:
        database.execute("DELETE FROM jobs WHERE id = ?", (waiting[0],))

    result = audit_store(spark, url)
    assert (result.rows, result.jobs) == (len(attempts), len(last))
    assert result.kinds == {Kind.LOST_JOB: 1}
    assert [example.job_id for example in result.examples] == waiting[:1]


def test_postgres_is_audited_while_clients_go_on(spark: SparkSession, postgres_url: str) -> None:
    from taskharbor.spark.audit import audit_store

    async def both() -> AuditResult:
        async with begun(postgres_url, random.randrange(2**31), 2) as life:
            await life.live(60)
            audited = asyncio.create_task(asyncio.to_thread(audit_store, spark, postgres_url))
            while not audited.done():
                await life.live(5)
            return await audited

    result = asyncio.run(both())
    assert result.is_clean, result.examples
    assert result.rows > 0
