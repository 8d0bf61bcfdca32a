"""Histories that look like production, made as a Spark job: any number of rows, the same ones for the same seed.

A clean one keeps every guarantee. Violations are planted on request, each known by kind and job, so that the audit can be shown
to find them.
"""

from __future__ import annotations

from taskharbor_testkit.histories.generation import generate, queue_limits, queues_table

__all__ = ["generate", "queue_limits", "queues_table"]
