"""Where a run gets its rows: a store, from where the last run stopped, or a DataFrame of attempts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.bulk.tables import Part, Selection
from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS, QUEUE_COLUMNS
from taskharbor.spark.session import require_shared_store


class News(NamedTuple):
    """What a source has that the lake has not."""

    attempts: DataFrame | None
    """None where nothing is new."""
    queues: DataFrame | None
    until: str | None
    """The cursor after these rows; None where it is the highest `seq` among them."""


_NAMING = ("schema", "prefix", "db", "endpoint", "base_url", "account_name")
"""Options that say which store it is."""


def source_name(url: str) -> str:
    """Names a store without its secrets, and alike from whichever folder it is looked at."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidRequest(f"{url!r} is not the URL of a store: use for example sqlite:///jobs.db")
    if scheme == "sqlite":
        return f"sqlite:///{Path(unquote(rest.removeprefix('/').partition('?')[0])).absolute()}"
    parts = urlsplit(url)
    # Only what says which store it is: the other options may hold a password too.
    kept = [(key, value.rpartition("@")[2]) for key, value in parse_qsl(parts.query) if key in _NAMING]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), urlencode(kept), ""))


def news_of_store(spark: SparkSession, url: str, after: str | None) -> News:
    """Rows after the cursor, up to where nothing can appear any more that comes before."""
    require_shared_store(url)
    parallelism = max(2, spark.sparkContext.defaultParallelism)
    with open_store(url) as store:
        begun = store.start() if after is None else after
        until = store.latest()
        parts = [] if until == begun else store.between(begun, until, parallelism=parallelism)
        seen = [
            row
            for part in store.parts("queues", Selection(), parallelism=1)
            for batch in store.read(part)
            for row in batch.to_pylist()
        ]
    attempts = _read_by_tasks(spark, url, parts) if parts else None
    queues = spark.createDataFrame(seen, QUEUE_COLUMNS)
    return News(attempts, queues, until)


def news_of_frame(attempts: DataFrame, queues: DataFrame | None, after: str | None) -> News:
    """A DataFrame stands for a log in the order of `seq`."""
    chosen = attempts.select(*ATTEMPT_COLUMNS.names)
    return News(chosen if after is None else chosen.where(F.col("seq") > int(after)), queues, None)


def _read_by_tasks(spark: SparkSession, url: str, parts: Sequence[Part]) -> DataFrame:
    """One task per part: what travels is the part, and the rows go straight from the store to the task."""
    shares = list(parts)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open_store(url) as store:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    yield from store.read(shares[index])

    return spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, ATTEMPT_COLUMNS)
