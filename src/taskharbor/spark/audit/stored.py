"""The log beside the store: jobs that were lost, that ended too early or ran too often, those that nobody claims, and ticks that
were left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Micros, Outcome, to_datetime
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import read
from taskharbor.schedules.tick_ids import generation_of, tick_id
from taskharbor.spark.audit.checks import check
from taskharbor.spark.audit.violations import Kind

_ROW = "source job_id created_at queue seq fence reserved_at ended_at outcome state"
_JOB = "source id queue key state fence created_at run_at finished_at attempts stalls max_attempts max_stalls"


class Stored(NamedTuple):
    """A store after the log that it is compared with had been read: tables with `source`.

    `later` is the log, read once more after the jobs: a job may have ended between the two. `read_at` is an instant before the
    jobs were read. `waiting_limit` is how long a job may be due without being claimed; None: for ever.
    """

    jobs: DataFrame
    queues: DataFrame
    later: DataFrame
    read_at: datetime
    waiting_limit: timedelta | None = None

    @property
    def unchecked(self) -> tuple[Kind, ...]:
        return (Kind.LEFT_WAITING,) if self.waiting_limit is None else ()


@contextmanager
def read_store(
    spark: SparkSession, url: str, source: str, waiting_limit: timedelta | None
) -> Iterator[Stored]:
    """Read the jobs now, and the log after them."""
    with open_store(url) as store:
        read_at = to_datetime(store.time())
    payload = F.when(F.col("queue") == QUEUE, F.col("payload")).alias("payload")
    jobs = read_table(spark, url, "jobs", source).select(*_JOB.split(), payload)
    jobs = jobs.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        jobs.count()
        queues, later = (read_table(spark, url, name, source) for name in ("queues", "attempts"))
        yield Stored(jobs, queues, later, read_at, waiting_limit)
    finally:
        jobs.unpersist()


def read_table(spark: SparkSession, url: str, table: str, source: str) -> DataFrame:
    reader = spark.read.format("taskharbor").option("url", url).option("table", table)
    return reader.load().withColumn("source", F.lit(source))


def check_store(attempts: DataFrame, stored: Stored) -> DataFrame:
    """Compare the log with the jobs that the store has."""
    before = None if stored.waiting_limit is None else stored.read_at - stored.waiting_limit
    both = {"attempts": attempts.select(*_ROW.split()), "later": stored.later.select(*_ROW.split())}
    found = check("stored", before=before, **both, jobs=stored.jobs, queues=stored.queues)
    schedules = stored.jobs.where(F.col("queue") == QUEUE)
    if schedules.isEmpty():
        return found
    due = _due_ticks(attempts, schedules)
    return found.unionByName(check("due", attempts, later=stored.later, jobs=stored.jobs, due=due))


def _due_ticks(attempts: DataFrame, schedules: DataFrame) -> DataFrame:
    """A row for each tick that was due when its schedule was worked on, by the schedule as it is in the store."""
    in_order = Window.partitionBy("source", "job_id").orderBy("seq")
    known = schedules.select(
        "source", F.col("id").alias("job_id"), "payload", F.col("run_at").alias("cursor")
    )
    steps = attempts.where(F.col("queue") == QUEUE).withColumn("following", F.lead("run_at").over(in_order))
    times = map(F.unix_micros, (F.col("run_at"), F.col("reserved_at"), F.coalesce("following", "cursor")))
    # PySpark takes the hints of a named function for those of another kind of function.
    ticks = F.udf(lambda *step: _ticks_of(*step), "map<string, string>")("job_id", "payload", *times)
    own = (F.col("job_id").alias("own_id"), F.col("fence").alias("own_fence"))
    released = steps.where(F.col("outcome") == Outcome.RELEASED.value).join(known, ["source", "job_id"])
    due = F.explode(ticks).alias("job_id", "queue")
    return released.select("source", *own, "reserved_at", "ended_at", due, F.lit(0).alias("fence"))


def _ticks_of(own_id: str, payload: bytes, run_at: Micros, now: Micros, following: Micros) -> dict[str, str]:
    """Return id and queue of the jobs that a step should have made. Nothing where the schedule may leave ticks out, or was
    changed since, or cannot be read."""
    try:
        reading = read(bytes(payload))
    except InvalidRequest:
        return {}
    stored, spec, generation = reading.stored, reading.spec, generation_of(own_id)
    policy = (spec.overlap, spec.catch_up_mode, spec.key, spec.pause_on_failure, stored.paused)
    if policy != ("allow", "each", None, False, None) or stored.since > run_at:
        return {}
    # A lease may begin in the log later than by the clock of the step. So ticks of the next step are left to it.
    due = (to_datetime(one) for one in reading.due(run_at, now) if one < following)
    return {tick_id("tick", spec.name, generation, one): spec.queue or "" for one in due}
