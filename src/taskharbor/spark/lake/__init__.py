"""The pipeline over the lake: what the attempt log says, as Delta tables that grow by numbered runs.

run         one run, from a store or a DataFrame through all tables
silver      the rows of the log, each once with its wait and its run, and one row per job
quality     checks of single rows: what goes into quarantine
reprocess   some dates again, from bronze
continuous  runs at intervals
gold        counts by minute and hour, concurrency, backlog, workers, errors and ticks
objectives  the rate at which a queue uses up the failures that its objective allows
frames      tables as DataFrames, and DataFrames as files

The tables themselves, their commits and their upkeep: `taskharbor.lake`.
"""

from __future__ import annotations

from taskharbor.lake.delta import Lake
from taskharbor.spark.lake.continuous import run_at_intervals
from taskharbor.spark.lake.frames import read
from taskharbor.spark.lake.objectives import Objective, load_objectives
from taskharbor.spark.lake.run import RunSummary, reprocess, run_pipeline

__all__ = [
    "Lake",
    "Objective",
    "RunSummary",
    "load_objectives",
    "read",
    "reprocess",
    "run_at_intervals",
    "run_pipeline",
]
