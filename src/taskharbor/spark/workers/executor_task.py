"""The worker inside a Spark task: the app's ordinary worker, on the task's main thread, until its bounds or a stop.

Nothing here may depend on clean-up: a lost executor or a cancelled task dies at any line, and leases expire.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import msgspec

from taskharbor.cli.app_loading import load_app
from taskharbor.cli.errors import BadInput
from taskharbor.client import Client
from taskharbor.spark.workers.stop_mark import is_marked, watching

_SHIP = " (executors import the app themselves: ship it with --py-files or SparkContext.addPyFile)"


class WorkerOptions(TypedDict, total=False):
    """Settings of each worker, as `Worker` takes them."""

    queues: list[str]
    types: list[str]
    concurrency: int
    lease: float
    heartbeat: float
    poll_interval: float
    prefetch: int
    batch: int
    grace: float
    until_empty: bool
    max_jobs: int
    max_seconds: float


class Order(msgspec.Struct, kw_only=True):
    """The data that a task gets. Plain values: the app itself is imported in the task."""

    run: str
    number: int
    app: str
    url: str | None
    options: dict[str, Any]


class TaskReport(msgspec.Struct, kw_only=True):
    """The report of a task about its worker. A task whose executor died gives none."""

    worker: str
    host: str
    outcomes: dict[str, int]
    seconds: float
    problem: str = ""
    """The reason why the worker could not work, if it would be the same on any other executor."""


def work(orders: Iterable[Order]) -> Iterator[TaskReport]:
    """Run workers in `mapPartitions`, with one order per partition."""
    for order in orders:
        yield _work(order)


def _work(order: Order) -> TaskReport:
    host = socket.gethostname()
    name = f"spark-{order.number}-{host}-{os.getpid()}-{secrets.token_hex(3)}"
    started = time.monotonic()
    outcomes: dict[str, int] = {}
    problem = ""
    try:
        outcomes = _run_worker(order, name)
    except Exception as error:
        # Returned as a value: after an exception, Spark would repeat the task on other executors.
        problem = f"{type(error).__name__}: {error}" + (_SHIP if isinstance(error, BadInput) else "")
    return TaskReport(
        worker=name, host=host, outcomes=outcomes, seconds=time.monotonic() - started, problem=problem
    )


def _run_worker(order: Order, name: str) -> dict[str, int]:
    harbor = load_app(order.app)
    if order.url is not None:
        harbor.use(order.url)
    client = Client(harbor.driver())
    try:
        if is_marked(client, order.run):
            return {}  # Asked to stop before this one began.
        worker = harbor.worker(**order.options, name=name)
        with watching(client, order.run, worker.stop):
            worker.run()
    finally:
        client.close()
    return {str(outcome): count for outcome, count in worker.outcomes.items()}
