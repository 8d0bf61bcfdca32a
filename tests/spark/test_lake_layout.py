"""The lake's promises about directories and manifests, without a pipeline: only what is listed is there."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake import Lake, compact, vacuum
from taskharbor.spark.lake.manifests import LakeChanged, LakeUnreadable, Manifest, commit, numbers, path_of

TABLE = "state.backlog_days"
OTHER = "gold.backlog"
FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)
NOW = timedelta(0)


def days(spark: SparkSession, **changes: int) -> DataFrame:
    """Rows of queues on the first date, and of those whose name begins with `later` on the second."""
    rows = [("s", name, n, SECOND if name.startswith("later") else FIRST) for name, n in changes.items()]
    return spark.createDataFrame(rows, "source string, queue string, change long, date date").coalesce(1)


def seen(spark: SparkSession, lake: Lake, dates: list[date] | None = None) -> dict[str, int]:
    return {row.queue: row.change for row in lake.read(spark, TABLE, dates).collect()}


def test_a_change_is_seen_as_a_whole_once_it_is_committed_and_not_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "lake")
    assert seen(spark, lake) == {}
    first = lake.begin("run")
    first.append(TABLE, days(spark, a=1, later=2))
    assert seen(spark, lake) == {}
    first.commit()
    assert seen(spark, lake) == {"a": 1, "later": 2}
    assert seen(spark, lake, [SECOND]) == {"later": 2}
    assert lake.dates(TABLE) == [FIRST, SECOND]

    # A crash: what was written is in no manifest.
    lake.begin("run").append(TABLE, days(spark, crashed=3))
    # Two at once: both start from the same state, one takes effect.
    winner, loser = lake.begin("run"), lake.begin("run")
    winner.replace(TABLE, days(spark, b=5), [FIRST])
    winner.commit()
    loser.append(TABLE, days(spark, c=6))
    with pytest.raises(LakeChanged, match="run it again"):
        loser.commit()
    assert seen(spark, lake) == {"b": 5, "later": 2}

    # What is young may be a run that is not finished; what is not needed goes when it is old enough.
    assert vacuum(lake, keep_manifests=1).directories == 1, "the replaced date of a finished run"
    assert seen(spark, lake) == {"b": 5, "later": 2}
    assert vacuum(lake, keep_manifests=1, unlisted_for=NOW).directories == 2, "the crashed and the losing run"
    assert numbers(lake.path) == [2]
    assert seen(spark, lake) == {"b": 5, "later": 2}
    left = sorted(str(path.relative_to(lake.path)) for path in lake.path.glob("*/*/*/date=*"))
    assert left == sorted(lake.manifest().directories())


def test_compaction_keeps_the_rows_and_makes_few_files(compiled_spark: SparkSession, tmp_path: Path) -> None:
    spark, lake = compiled_spark, Lake(tmp_path)
    for name in ("a", "b", "c"):
        change = lake.begin("run")
        change.append(TABLE, days(spark, **{name: 1}))
        change.commit()
    summary = compact(spark, lake)
    assert (summary.files_before, summary.files_after, summary.tables) == (3, 1, {TABLE: 1})
    assert seen(spark, lake) == {"a": 1, "b": 1, "c": 1}
    assert lake.manifest().run == 3, "a compaction is not a run"
    assert compact(spark, lake).tables == {}
    assert vacuum(lake, keep_manifests=1, unlisted_for=NOW).directories == 3
    assert seen(spark, lake) == {"a": 1, "b": 1, "c": 1}


def test_retention_drops_dates_and_their_files_once_no_state_needs_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path)
    rows = spark.createDataFrame(
        [("s", "q", None, 1, FIRST), ("s", "q", None, 2, SECOND)],
        "source string, queue string, minute timestamp, waiting long, date date",
    )
    change = lake.begin("run")
    change.append(OTHER, rows)
    change.append(TABLE, days(spark, a=1, later=2))
    change.commit()
    summary = vacuum(lake, keep_manifests=2, unlisted_for=NOW, before=SECOND)
    assert (summary.dates, summary.directories) == (1, 0), "the state before still has the date"
    assert lake.dates(OTHER) == [SECOND]
    assert lake.dates(TABLE) == [FIRST, SECOND], "a backlog goes on from days that are gone"
    assert vacuum(lake, keep_manifests=1, unlisted_for=NOW).directories == 1
    with pytest.raises(InvalidRequest, match="at least 1"):
        vacuum(lake, keep_manifests=0)


def test_a_manifest_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    commit(tmp_path, Manifest(number=1))
    path_of(tmp_path, 1).write_text("{")
    with pytest.raises(LakeUnreadable, match="restore it"):
        Lake(tmp_path).manifest()


def test_an_unknown_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no table 'gold\.days': it has bronze\.attempts"):
        Lake(tmp_path).read(spark, "gold.days")
