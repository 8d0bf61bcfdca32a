"""The lake: what the attempt log says, as Parquet tables that grow by each run and never hold half of one.

run         one run, from a store or a DataFrame through all tables
silver      the rows of the log, each once with its wait and its run, and one row per job
gold        counts by minute and hour, concurrency, backlog, workers and errors
objectives  the rate at which a queue uses up the failures that its objective allows
tables      the columns of every table
layout      the folders of tables, and a change to several that takes effect as one
manifests   the lists of files that make it so
compaction  few files instead of many
vacuum      removes files that nobody needs
"""

from __future__ import annotations

from taskharbor.spark.lake.compaction import CompactSummary, compact
from taskharbor.spark.lake.layout import Lake
from taskharbor.spark.lake.objectives import Objective, load_objectives
from taskharbor.spark.lake.run import RunSummary, run_pipeline
from taskharbor.spark.lake.vacuum import VacuumSummary, vacuum

__all__ = [
    "CompactSummary",
    "Lake",
    "Objective",
    "RunSummary",
    "VacuumSummary",
    "compact",
    "load_objectives",
    "run_pipeline",
    "vacuum",
]
