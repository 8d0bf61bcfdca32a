"""Sources of a run's rows: a store, from the place where the last run stopped, or a DataFrame of attempts."""

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
    """Rows of a source that the lake does not have yet."""

    attempts: DataFrame | None
    """None if nothing is new."""
    queues: DataFrame | None
    until: str | None
    """The cursor after these rows; None: it is the highest `seq` among them."""


_NAMING = ("schema", "prefix", "db", "endpoint", "base_url", "account_name")
"""Options that identify the store."""


def source_name(url: str) -> str:
    """Return a name of a store without its secrets, the same from every folder."""
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
    """Return the rows after the cursor, up to the place before which no row can appear any more."""
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
