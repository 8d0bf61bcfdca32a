"""Spark programs that tests run in processes of their own: `programs.py NAME ARGUMENT...`. One JVM per process.

- `die_midway LAKE SEED CUT TABLE MOMENT` runs the pipeline over the first rows of a history, and is gone before or after it
  commits a table.
- `speculate MASTER MARKS ROWS URL...` writes with a straggler that Spark runs twice at once, and a task that dies.
- `terminate WORD...` runs a command that gets SIGTERM while a task runs.
- `drain MASTER URL FILE SETTINGS` runs workers on executors until all is done, and then until it interrupts itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "spark.executor.cores": "2",
}


def die_midway(place: str, seed: str, cut: str, doomed: str, moment: str) -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from spark.histories import OBJECTIVES, history, queues_frame
    from taskharbor.demo.analysis import SMALL
    from taskharbor.lake.delta import Table
    from taskharbor.spark.lake import Lake, run_pipeline
    from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS

    commit = Table.commit

    def fatal(self: Table, *given: Any) -> None:
        if self.name != doomed or moment == "after":
            commit(self, *given)
        if self.name == doomed:
            os._exit(9)

    Table.commit = fatal  # type: ignore[method-assign, assignment]
    spark = local_session("child", master="local[2,4]", settings=SMALL)
    log = spark.createDataFrame(history(int(seed))[: int(cut)], ATTEMPT_COLUMNS).coalesce(1)
    queues = queues_frame(spark)
    run_pipeline(spark, Lake(place), log, name="log", queues=queues, objectives=OBJECTIVES)


def speculate(master: str, marks: str, rows: str, settings: str, *urls: str) -> None:
    """Spark puts a second copy of a task on another host only, and makes none in local mode."""
    spark = local_session("speculation", master=master, settings=SPECULATION | json.loads(settings))

    def is_first(mark: Path) -> bool:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    for number, url in enumerate(urls):
        folder = Path(marks) / str(number)
        folder.mkdir()

        def passed_on(batches: Iterator[pa.RecordBatch], folder: Path = folder) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            partition = context.partitionId()
            (folder / f"{partition}.{context.attemptNumber()}").touch()
            for place, batch in enumerate(batches):
                # Whichever copy comes first: Spark may start the second before the first has begun to work.
                if place == 2 and partition == 1 and is_first(folder / "straggler"):
                    time.sleep(STRAGGLES_FOR)
                if place == 2 and partition == 3 and is_first(folder / "victim"):
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        frame = spark.range(0, int(rows), 1, 6).selectExpr("id AS n").mapInArrow(passed_on, "n long")
        frame.write.format("taskharbor").options(url=url, type="t", queue="q").mode("append").save()
    spark.stop()


def drain(master: str, url: str, file: str, settings: str) -> None:
    from taskharbor.spark.workers import Progress, run_on_executors

    spark = local_session(master=master, settings=json.loads(settings))
    spark.sparkContext.addPyFile(file)
    app = "worker_app:harbor"
    bounds: Any = {"until_empty": True, "lease": 2.0, "poll_interval": 0.2, "concurrency": 2}
    drained = run_on_executors(spark, app, url, workers=2, queues=["default"], **bounds)
    interrupted: list[int] = []

    def progress(now: Progress) -> None:
        if now.ended >= 10 and not interrupted:
            interrupted.append(now.ended)
            os.kill(os.getpid(), signal.SIGINT)

    one_by_one: Any = {"workers": 2, "concurrency": 1, "prefetch": 0}
    stopped = run_on_executors(spark, app, url, queues=["later"], progress=progress, **one_by_one)
    spark.stop()
    print(json.dumps([drained.ended, stopped.stopped, stopped.cancelled, stopped.done]))


def terminate(*words: str) -> None:
    """A command of the pipeline gets SIGTERM while a task runs."""
    from taskharbor.cli.root import root
    from taskharbor.spark import lake

    driver = os.getpid()

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        os.kill(driver, signal.SIGTERM)
        time.sleep(STRAGGLES_FOR)
        yield from batches

    def run(spark: Any, *_: Any, **__: Any) -> None:
        spark.range(0, 1, 1, 1).mapInArrow(task, "id long").collect()

    lake.run_pipeline = run  # type: ignore[assignment]
    root.main([*words])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
