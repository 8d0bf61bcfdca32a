"""A process that runs the pipeline over rows from a file and dies in the middle of a step: `lake_child.py LAKE ROWS STEP`."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import datetime
from pathlib import Path

from spark.lake_history import OBJECTIVES
from taskharbor.demo.analysis import SMALL
from taskharbor.spark.lake import Lake, run_pipeline
from taskharbor.spark.lake.tables import ATTEMPT_COLUMNS
from taskharbor.spark.session import local_session

NOTHING_TO_WRITE = ("commit", "done")


def die_writing(lake: Path) -> None:
    """Gone as soon as Spark has begun to write files of the step that has just begun. Those of earlier steps are complete."""
    while not any(path.is_file() for path in lake.glob("*/*/write=*/_temporary/**/*.parquet")):
        pass
    os._exit(9)


def main(folder: str, log: str, doomed: str) -> None:
    rows = json.loads(Path(log).read_text())
    for row in rows:
        for name, value in row.items():
            if name.endswith("_at") and value is not None:
                row[name] = datetime.fromisoformat(value)

    def die(step: str, number: int, steps: int) -> None:
        if step in NOTHING_TO_WRITE and step == doomed:
            os._exit(9)
        if step == doomed:
            threading.Thread(target=die_writing, args=(Path(folder),), daemon=True).start()

    spark = local_session("child", master="local[2,4]", settings=SMALL)
    log = spark.createDataFrame(rows, ATTEMPT_COLUMNS).coalesce(1)
    run_pipeline(spark, Lake(folder), log, name="log", objectives=OBJECTIVES, progress=die)


main(*sys.argv[1:])
