"""Spark: the attempt log out of PostgreSQL, beside what ADBC alone reads in the same run.

Spark's own start is not part of it: the session is there, and its Python workers have read once.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from adbc_driver_postgresql import dbapi

from benchmarks.measure import Figure, alternate
from benchmarks.postgres_server import fresh_database, settle_down
from taskharbor.drivers.registry import connect
from taskharbor.jobs import JobRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS_PER_TRANSACTION = 50_000
_FILL = (Path(__file__).parent / "sql" / "attempt_log.sql").read_text("utf-8")


@functools.cache
def _spark() -> tuple[SparkSession, float]:
    from taskharbor.spark.session import local_session

    began = time.perf_counter()
    # The JVM as it comes: a session for a short command saves on its compiler, which a long read would pay for.
    session = local_session("benchmarks", settings={"spark.driver.extraJavaOptions": "-XX:+UseParallelGC"})
    return session, time.perf_counter() - began


async def _make_store(url: str) -> None:
    async with connect(url) as driver:
        now = await driver.time()
        # So that there is a queue.
        await driver.enqueue([JobRecord(id="one", type="t", run_at_us=now, created_at_us=now)], now=now)


def _fill(url: str, rows: int) -> None:
    asyncio.run(_make_store(url))
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(1, rows + 1, _ROWS_PER_TRANSACTION):
            last = min(first + _ROWS_PER_TRANSACTION - 1, rows)
            connection.execute(_FILL, {"first": first, "last": last})
        connection.execute("VACUUM ANALYZE taskharbor.attempts")
    settle_down()


def _through_spark(url: str, rows: int, parallelism: int) -> float:
    spark, _ = _spark()
    began = time.perf_counter()
    source = spark.read.format("taskharbor").option("url", url).option("parallelism", str(parallelism))
    # Every column is read, decoded and handed to a sink that drops it.
    source.option("table", "attempts").load().write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - began)


def _by_adbc(url: str, rows: int) -> float:
    began = time.perf_counter()
    with closing(dbapi.connect(url)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT * FROM taskharbor.attempts")
        found = sum(batch.num_rows for batch in cursor.fetch_record_batch())
    assert found == rows
    return rows / (time.perf_counter() - began)


def read_log(rows: int, rounds: int, parallelism: int) -> Figure:
    with fresh_database() as url:
        _fill(url, rows)
        _, start_up = _spark()
        began = time.perf_counter()
        _through_spark(url, rows, parallelism)
        first = time.perf_counter() - began
        mine, limit = alternate(
            rounds,
            ("spark.read, all columns", lambda: _through_spark(url, rows, parallelism)),
            ("ADBC alone, SELECT *", lambda: _by_adbc(url, rows)),
            "rows/s",
        )
    return Figure(
        name=f"attempt log of {rows:,} rows from PostgreSQL",
        ours=mine,
        limit=limit,
        goal=0.6,
        note=f"{parallelism} parts",
        facts={"start of Spark": f"{start_up:.1f} s", "first read, not counted": f"{first:.1f} s"},
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    return [lambda: read_log(100_000 if quick else 1_000_000, 1 if quick else 5, 2)]
