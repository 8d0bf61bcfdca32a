"""Gold backlog: how many jobs had been created and not ended, at the end of each minute in which anything happened.

A running sum, but never over a queue's whole history: each day starts from the sum of the days before it, which are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import date

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.spark.lake.tables import GOLD_BACKLOG, STATE_BACKLOG_DAYS, declared


def daily_changes(tallies: DataFrame) -> DataFrame:
    """By how much these tallies (or gold minutes) change the backlog of each queue on each date."""
    found = tallies.groupBy("source", "queue", "date").agg(_change().alias("change"))
    return declared(found, STATE_BACKLOG_DAYS)


def summed_days(before: DataFrame, new: DataFrame) -> DataFrame:
    """The days as they were, and what is new."""
    together = before.unionByName(new).groupBy("source", "queue", "date").agg(F.sum("change").alias("change"))
    return declared(together, STATE_BACKLOG_DAYS)


def gold_backlog(minutes: DataFrame, days: DataFrame) -> DataFrame:
    """From gold minutes of some dates, and all days."""
    within_queue = Window.partitionBy("source", "queue").orderBy("date")
    earlier = within_queue.rowsBetween(Window.unboundedPreceding, -1)
    carried = days.select(
        "source",
        "queue",
        "date",
        F.coalesce(F.sum("change").over(earlier), F.lit(0).cast("long")).alias("carried"),
    )
    changes = minutes.groupBy("source", "queue", "date", "minute").agg(_change().alias("change"))
    within_day = Window.partitionBy("source", "queue", "date").orderBy("minute")
    so_far = within_day.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    found = changes.join(F.broadcast(carried), ["source", "queue", "date"]).select(
        "source",
        "queue",
        "minute",
        (F.col("carried") + F.sum("change").over(so_far)).alias("waiting"),
        "date",
    )
    return declared(found, GOLD_BACKLOG)


def affected_dates(changes: Iterable[tuple[str, str, date, int]], known: Iterable[date]) -> set[date]:
    """The dates whose backlog is another now: those that changed, and those that start from another number than before.

    A job that is heard of days after it was created was waiting on all of them.
    """
    by_queue: dict[tuple[str, str], dict[date, int]] = defaultdict(dict)
    for source, queue, day, change in changes:
        by_queue[source, queue][day] = change
    all_dates = sorted({*known, *(day for days in by_queue.values() for day in days)})
    affected: set[date] = set()
    for days in by_queue.values():
        carried = 0
        for day in all_dates:
            if carried or day in days:
                affected.add(day)
            carried += days.get(day, 0)
    return affected


def _change() -> Column:
    return F.sum(F.col("arrivals") + F.col("requeues") - F.col("finished"))
