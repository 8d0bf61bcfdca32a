"""The lake: what the attempt log says, as Parquet tables that grow by each run and never hold half of one.

tables      the columns of every table
layout      where tables lie, how a change to several takes effect as one; `manifests` are what makes it so
run         one run, from a store or a DataFrame through all tables
silver, gold, objectives
            the transformations, each from rows to rows
compaction, vacuum
            few files instead of many, and none that nobody needs
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
