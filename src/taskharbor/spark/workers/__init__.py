"""Executors as workers: the ordinary worker inside Spark tasks, with one Spark job for each.

- `launcher`: submits the workers and waits for them; the worker inside a Spark task.
- `stop_mark`: the mark in the store that asks all of them to stop.
"""

from taskharbor.spark.workers.launcher import DrainSummary, ExecutorWorker, Progress, run_on_executors
from taskharbor.spark.workers.stop_mark import ask_to_stop

__all__ = ["DrainSummary", "ExecutorWorker", "Progress", "ask_to_stop", "run_on_executors"]
