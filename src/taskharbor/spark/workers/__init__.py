"""Executors as workers: the ordinary worker inside Spark tasks, one Spark job for each."""

from taskharbor.spark.workers.drain import run_on_executors
from taskharbor.spark.workers.stopping import ask_to_stop
from taskharbor.spark.workers.summary import DrainSummary, ExecutorWorker, Progress

__all__ = ["DrainSummary", "ExecutorWorker", "Progress", "ask_to_stop", "run_on_executors"]
