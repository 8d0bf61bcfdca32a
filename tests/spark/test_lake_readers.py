"""A lake that is read and kept in order while it grows, and what other engines need of its files."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from deltalake.fs import DeltaStorageHandler
from pyspark.sql import SparkSession

from taskharbor.errors import InvalidRequest
from taskharbor.lake import files
from taskharbor.lake.delta import Lake, LakeChanged, LakeUnreadable
from taskharbor.lake.files import File, write_files, write_table
from taskharbor.lake.query import sql, write_result
from taskharbor.lake.tables import TABLES
from taskharbor.lake.upkeep import compact, vacuum
from taskharbor.spark.failures import PipelineFailed, plain_failures
from taskharbor.spark.lake import read
from taskharbor.spark.lake.run import _Change, _Steps
from taskharbor_testkit.servers.s3 import fresh_s3_url

TABLE = "gold.workers"
ROWS = 3
"""The rows of one commit. A reader that sees a part of a commit sees another multiple."""


@pytest.fixture(params=["folder", "object store"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake(tmp_path if request.param == "folder" else fresh_s3_url())


def files_of(lake: Lake, run: int) -> list[File]:
    day = date(2026, 3, 1 + run % 2)
    rows = [{"source": "s", "worker": f"w{n}", "executions": run, "date": day} for n in range(ROWS)]
    return write_table(pa.Table.from_pylist(rows), lake.place, TABLE)


def add(lake: Lake, run: int) -> None:
    """Commit a run, as often as an upkeep is in the way."""
    while True:
        table = lake.table(TABLE)
        if table.run >= run:
            return
        try:
            table.commit(run, files_of(lake, run))
        except LakeChanged:
            continue


def keep(lake: Lake) -> None:
    """Compact, then remove what no version of the last days needs."""
    try:
        compact(lake)
    except LakeChanged:
        return
    vacuum(lake)


def test_readers_see_whole_commits_while_runs_compaction_and_vacuum_go_on(
    spark: SparkSession, lake: Lake
) -> None:
    runs, over = 12, threading.Event()
    add(lake, 1)

    def by_duckdb() -> tuple[int, int]:
        (row,) = sql(lake, f"SELECT count(*) AS n, max(executions) AS last FROM {TABLE}").to_pylist()  # noqa: S608
        return row["n"], row["last"]

    def by_spark() -> tuple[int, int]:
        rows = read(spark, lake.table(TABLE)).selectExpr("count(*)", "max(executions)").collect()
        return tuple(rows[0])

    def look(reader: Callable[[], tuple[int, int]]) -> int:
        last, looks = 0, 0
        while not over.is_set() or looks == 0:
            rows, run = reader()
            assert rows == ROWS * run
            assert run >= last
            last, looks = run, looks + 1
        return looks

    def keep_on() -> None:
        while not over.is_set():
            keep(lake)

    with ThreadPoolExecutor(3) as pool:
        others: list[Future[Any]] = [
            pool.submit(look, by_duckdb),
            pool.submit(look, by_spark),
            pool.submit(keep_on),
        ]
        try:
            for run in range(2, runs + 1):
                add(lake, run)
        finally:
            over.set()
        for one in others:
            one.result()
    keep(lake)
    assert by_duckdb() == by_spark() == (ROWS * runs, runs)
    assert len(lake.table(TABLE).files()) == 2


def test_a_query_is_over_when_it_has_answered(lake: Lake) -> None:
    """A thread of Arrow that still calls Python when Python ends crashes the process, or hangs it."""
    for run in range(1, 13):
        add(lake, run)

    def reading() -> list[object]:
        # Not isinstance: it would ask other libraries' lazy objects.
        return [one for one in gc.get_objects() if issubclass(type(one), DeltaStorageHandler)]

    query = f"SELECT executions FROM {TABLE} LIMIT 1"  # noqa: S608
    assert (sql(lake, query).num_rows, reading()) == (1, [])
    with pytest.raises(InvalidRequest, match="'w"):
        sql(lake, query.replace("executions", "worker::int"))
    assert reading() == []
    options = "?" + urlencode(lake.place.options).replace("=true", "=on") if lake.place.options else ""
    command = ["lake", "sql", "--lake", lake.place.root + options, "-f", "csv", query]
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-m", "taskharbor", *command], capture_output=True, check=False, timeout=60
        )
        assert (ended.returncode, ended.stdout[:13], ended.stderr) == (0, b'"executions"\n', b"")


METADATA = """Generic S3 error
   \x1b[31m\u21b3\x1b[0m Error performing PUT http://169.254.169.254/latest/api/token in 2 ms
    \x1b[31m\u21b3\x1b[0m 403 Forbidden
     \x1b[31m\u21b3\x1b[0m <?xml version="1.0"?>
<Error><Code>No</Code></Error>"""


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (METADATA, "the object store is reached without credentials: give them in the environment of every"),
        (METADATA.replace("169.254.169.254", "here"), "Generic S3 error: Error performing PUT http://here/"),
    ],
)
def test_what_an_object_store_tells_a_task_is_one_sentence(
    spark: SparkSession, said: str, sentence: str
) -> None:
    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise OSError(said)

    with pytest.raises(PipelineFailed) as failed, plain_failures():
        spark.range(1).mapInArrow(fail, "id long").collect()
    assert str(failed.value).startswith(sentence)
    assert str(failed.value).isprintable()


def test_a_bucket_that_is_not_there_is_one_sentence() -> None:
    place = urlsplit(fresh_s3_url())._replace(netloc="no-such-bucket").geturl()
    with pytest.raises(LakeUnreadable, match=r"cannot be read: The specified bucket does not exist$"):
        Lake(place).tables()


def test_every_result_can_be_written(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    add(lake, 1)
    columns = "'\\x00\\xff'::blob AS bytes, [1, 2] AS list, NULL AS none, 1 AS one, 2 AS one, 3 AS \"ONE\""
    at = "TIMESTAMPTZ '2026-03-01 01:02:03.5Z' AS at"
    rows = sql(lake, f"SELECT {columns}, {at}, worker FROM {TABLE} ORDER BY worker DESC")  # noqa: S608
    names = ["bytes", "list", "none", "one", "one_1", "ONE_2", "at", "worker"]

    def written(kind: str) -> io.BytesIO:
        write_result(rows, kind, sink := io.BytesIO())
        return io.BytesIO(sink.getvalue())

    first, second, *_ = written("csv").read().decode().splitlines()
    assert (first, second) == (
        ",".join(f'"{name}"' for name in names),
        r'"\x00\xFF","[1, 2]",,1,2,3,2026-03-01 01:02:03.500000Z,"w2"',
    )
    values = ["AP8=", [1, 2], None, 1, 2, 3, "2026-03-01T01:02:03.500000Z", "w2"]
    assert json.load(written("json"))[0] == dict(zip(names, values, strict=True))
    assert parquet.read_table(written("parquet")).column_names == names
    with pytest.raises(InvalidRequest, match="there is no query"):
        sql(lake, " -- nothing")


def test_a_reader_goes_on_with_the_version_that_it_opened(spark: SparkSession, lake: Lake) -> None:
    """Compaction and vacuum leave what it needs, as long as it is younger than vacuum keeps."""
    for run in (1, 2, 3, 4):
        add(lake, run)
    delta, lazy = lake.table(TABLE).delta, read(spark, lake.table(TABLE))
    assert delta is not None
    keep(lake)
    add(lake, 5)
    assert delta.to_pyarrow_dataset().count_rows() == lazy.count() == 4 * ROWS
    vacuum(lake, keep_for=timedelta(0))
    assert read(spark, lake.table(TABLE)).count() == 5 * ROWS


def test_a_table_that_is_compacted_during_a_run_is_computed_again(spark: SparkSession, lake: Lake) -> None:
    """It is loaded again, and looked at again: another process may have committed the run meanwhile."""
    for run in (1, 2, 3, 4):
        add(lake, run)
    computed: list[int | None] = []

    def compute(run: int, between: Callable[[Lake], object], table: object) -> _Change:
        files = files_of(lake, run)
        delta = lake.table(TABLE).delta
        computed.append(None if delta is None else delta.version())
        if len(computed) == 1:
            between(lake)
        return _Change(files)

    steps = _Steps(spark, lake, None)
    steps.commit(TABLE, 5, partial(compute, 5, compact))
    assert len(computed) == 2, "once more, from the compacted files"
    assert (lake.table(TABLE).run, lake.table(TABLE).rows) == (5, 5 * ROWS)
    computed.clear()
    steps.commit(TABLE, 6, partial(compute, 6, partial(add, run=6)))
    assert len(computed) == 1, "another process was first"
    assert (lake.table(TABLE).run, lake.table(TABLE).rows) == (6, 6 * ROWS)


def test_instants_are_microseconds_in_every_file(tmp_path: Path) -> None:
    """Also after a compaction. Delta knows nothing finer, and INT96 is what some writers make of instants."""
    lake, instant = Lake(tmp_path), datetime(2026, 3, 1, 1, 2, 3, 456789, tzinfo=UTC)
    for name, schema in TABLES.items():
        instants = [one.name for one in schema if pa.types.is_timestamp(one.type)]
        rows = pa.Table.from_pylist([{"date": instant.date(), **dict.fromkeys(instants, instant)}], schema)
        for run in (1, 2):
            lake.table(name).commit(run, write_table(rows, lake.place, name))
    compact(lake)
    for name, schema in TABLES.items():
        written = [parquet.ParquetFile(file) for file in Path(lake.place.uri(name)).rglob("*.parquet")]
        assert len(written) == 3
        found = {
            (column.physical_type, str(column.logical_type))
            for file in written
            for column in (file.schema.column(n) for n in range(len(file.schema)))
            if column.name in schema.names and pa.types.is_timestamp(schema.field(column.name).type)
        }
        assert {physical for physical, _ in found} <= {"INT64"}
        assert all(
            "timeUnit=microseconds" in logical and "isAdjustedToUTC=true" in logical for _, logical in found
        )
        assert bool(found) == any(pa.types.is_timestamp(one.type) for one in schema)


def test_a_task_holds_no_more_the_more_rows_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow counts what it has given out: what is held for the files, the batch that has just come, and nothing before that."""
    monkeypatch.setattr(files, "_HELD_BYTES", 2**20)
    monkeypatch.setattr(files, "_GROUP_ROWS", 1_000)
    place, held, size = Lake(tmp_path).place, [], 0
    before = pa.total_allocated_bytes()

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal size
        for n in range(200):
            held.append(pa.total_allocated_bytes() - before)
            days = pa.array([n % 3, (n + 1) % 3] * 250, pa.int32()).cast(pa.date32())
            workers = pa.array([f"{n} {row:0200}" for row in range(500)])
            batch = pa.RecordBatch.from_pydict({"worker": workers, "date": days})
            size += batch.nbytes
            yield batch

    (facts,) = write_files(batches(), place, TABLE)
    assert size > 20 * 2**20
    assert max(held) < 1.5 * 2**20, held
    for path in facts["path"].to_pylist():
        metadata = parquet.read_metadata(f"{place.uri(TABLE)}/{path}")
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        assert max(groups) <= 1_000 < sum(groups), groups
