"""A Spark program: a write with a straggler that Spark runs twice at once, and a task that dies.

Run by its test on a cluster whose workers have different addresses: Spark puts a second copy of a task on another host only, and
makes none in local mode.

    python speculating_app.py MASTER MARKS ROWS URL...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from taskharbor.spark.session import local_session

STRAGGLES_FOR = 60.0
"""Seconds. Nobody waits for them: the second copy is done long before."""

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.executor.cores": "2",
}


def is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(master: str, marks: str, rows: int, urls: list[str]) -> None:
    spark = local_session("speculation", master=master, settings=SPECULATION)
    for number, url in enumerate(urls):
        folder = Path(marks) / str(number)
        folder.mkdir()

        def passed_on(batches: Iterator[pa.RecordBatch], folder: Path = folder) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            partition, attempt = context.partitionId(), context.attemptNumber()
            (folder / f"{partition}.{attempt}").touch()
            for place, batch in enumerate(batches):
                # Whichever copy comes first: Spark may start the second before the first has begun to work.
                if place == 2 and partition == 1 and is_first(folder / "straggler"):
                    time.sleep(STRAGGLES_FOR)
                if place == 2 and partition == 3 and is_first(folder / "victim"):
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        frame = spark.range(0, rows, 1, 6).selectExpr("id AS n").mapInArrow(passed_on, "n long")
        frame.write.format("taskharbor").option("url", url).option("type", "t").mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
