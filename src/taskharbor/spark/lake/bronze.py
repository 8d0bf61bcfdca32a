"""Bronze: rows as the store gave them, and when and whence they came."""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.tables import BRONZE_ATTEMPTS, BRONZE_QUEUES, declared


def bronze_attempts(attempts: DataFrame, *, source: str, run: int, ingested_at: datetime) -> DataFrame:
    """Rows of the attempt log, by the date on which the lease (or the wait) ended."""
    return declared(
        attempts.withColumns(
            {
                "source": F.lit(source),
                "run": F.lit(run).cast("long"),
                "ingested_at": F.lit(ingested_at),
                "date": F.to_date("ended_at"),
            }
        ),
        BRONZE_ATTEMPTS,
    )


def bronze_queues(queues: DataFrame, *, source: str, run: int, observed_at: datetime) -> DataFrame:
    """The queues' settings and counts as this run saw them."""
    return declared(
        queues.withColumns(
            {
                "source": F.lit(source),
                "run": F.lit(run).cast("long"),
                "observed_at": F.lit(observed_at),
                "date": F.to_date(F.lit(observed_at)),
            }
        ),
        BRONZE_QUEUES,
    )
