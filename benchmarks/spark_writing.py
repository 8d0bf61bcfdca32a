"""DataFrame -> jobs on PostgreSQL, beside one COPY of the same payloads into a plain indexed table by one connection.

Spark runs on this machine with all its cores, as does the server: they share them. Its start-up and the first write, which
starts the Python workers and warms the JVM up, are stated apart. A write with idempotency keys is measured against one without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from pyspark.sql import SparkSession

from benchmarks import raw_postgres
from benchmarks.measure import Figure, alternate
from benchmarks.postgres_server import fresh_database, settle_down
from taskharbor.client import portal
from taskharbor.drivers.registry import connect
from taskharbor.spark.session import local_session


def _make_tables(url: str) -> None:
    async def opened() -> None:
        async with connect(url):
            pass

    portal().call(opened())


_KEY = "concat('order-', id) AS idempotency_key"


def _write(spark: SparkSession, url: str, count: int, *more: str) -> float:
    """Jobs per second, from `save()` to the commit that publishes them."""
    rows = spark.range(count).selectExpr("id AS n", *more)
    began = time.perf_counter()
    rows.write.format("taskharbor").option("url", url).option("type", "noop").mode("append").save()
    return count / (time.perf_counter() - began)


def _copy(url: str, count: int) -> float:
    """Rows per second of one COPY, payloads encoded on the way."""
    with raw_postgres.connect(url) as connection:
        raw_postgres.create(connection)
        began = time.perf_counter()
        with connection.cursor().copy("copy q (payload) from stdin") as copy:
            for n in range(count):
                copy.write_row((json.dumps({"n": n}),))
        return count / (time.perf_counter() - began)


def dataframe_to_jobs(count: int, rounds: int) -> Figure:
    began = time.perf_counter()
    spark = local_session("benchmarks")
    started = time.perf_counter() - began
    with fresh_database() as url:
        _make_tables(url)
        first = 10_000 / _write(spark, url, 10_000)

    def ours() -> float:
        with fresh_database() as url:
            _make_tables(url)
            settle_down()
            return _write(spark, url, count)

    def raw() -> float:
        with fresh_database() as url:
            return _copy(url, count)

    mine, limit = alternate(rounds, ("df.write", ours), ("one COPY", raw), "jobs/s")
    spark.stop()
    return Figure(
        name="DataFrame to jobs on PostgreSQL",
        ours=mine,
        limit=limit,
        goal=0.5,
        note=f"{count:,} rows in one write",
        facts={"Spark's start": f"{started:.1f} s", "first write, of 10,000 rows": f"{first:.1f} s"},
    )


def idempotency_keys(count: int, rounds: int) -> Figure:
    spark = local_session("benchmarks")

    def write(count: int, *more: str) -> float:
        with fresh_database() as url:
            _make_tables(url)
            settle_down()
            return _write(spark, url, count, *more)

    write(10_000, _KEY)
    sides = ("with keys", lambda: write(count, _KEY)), ("without", lambda: write(count))
    mine, limit = alternate(rounds, *sides, "jobs/s")
    spark.stop()
    name, note = "DataFrame with idempotency keys to jobs", f"{count:,} rows in one write"
    return Figure(name=name, ours=mine, limit=limit, goal=0.4, note=note)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 2 if quick else 3
    return [
        lambda: dataframe_to_jobs(200_000 if quick else 1_000_000, rounds),
        lambda: idempotency_keys(200_000, rounds),
    ]
