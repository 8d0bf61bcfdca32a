"""Executors as workers: the ordinary worker inside Spark tasks, one Spark job for each."""

from taskharbor.spark.workers.drain import DrainSummary, ExecutorWorker, Progress, run_on_executors
from taskharbor.spark.workers.stopping import ask_to_stop

__all__ = ["DrainSummary", "ExecutorWorker", "Progress", "ask_to_stop", "run_on_executors"]
