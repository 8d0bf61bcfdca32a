"""Histories that look like production, made as a Spark job: any number of rows, the same ones for the same seed.

A clean history keeps every guarantee. Violations are planted on request, each known by kind and job, to show that the audit finds
them.

- `plan`: the queues, their slots, and the number of rows of each slot and day;
- `slot`: the jobs of one slot through one day;
- `planting`: puts violations into a clean history;
- `generation`: the Spark job that makes all of it.
"""

from __future__ import annotations

from taskharbor_testkit.histories.generation import (
    generate,
    generate_with_store,
    queue_limits,
    queues_table,
)

__all__ = ["generate", "generate_with_store", "queue_limits", "queues_table"]
