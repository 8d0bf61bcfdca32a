"""Executors as workers: the ordinary worker inside Spark tasks, with one Spark job for each.

- `drain`: submits the workers and waits for them.
- `task`: the worker inside a Spark task.
- `stopping`: the mark in the store that asks all of them to stop.
"""

from taskharbor.spark.workers.drain import DrainSummary, ExecutorWorker, Progress, run_on_executors
from taskharbor.spark.workers.stopping import ask_to_stop

__all__ = ["DrainSummary", "ExecutorWorker", "Progress", "ask_to_stop", "run_on_executors"]
