"""A process that runs the pipeline over rows from a file and dies at a step: `lake_child.py LAKE ROWS STEP`."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path

from lake_history import OBJECTIVES

from taskharbor.spark.lake import Lake, run_pipeline
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS
from taskharbor.spark.session import local_session


def main(folder: str, log: str, doomed: str) -> None:
    rows = json.loads(Path(log).read_text())
    for row in rows:
        for name, value in row.items():
            if name.endswith("_at") and value is not None:
                row[name] = datetime.fromisoformat(value)

    def die(step: str, number: int, steps: int) -> None:
        if step == doomed:
            os._exit(9)

    spark = local_session("child", master="local[2,4]", settings={"spark.sql.shuffle.partitions": "2"})
    log = spark.createDataFrame(rows, ATTEMPT_COLUMNS).coalesce(1)
    run_pipeline(spark, Lake(folder), log, name="log", objectives=OBJECTIVES, progress=die)


main(*sys.argv[1:])
